"""`headway doctor`: what ails a running system, and what would ail one that is about to be started.

targets ─▶ asking ─▶ diagnosis ─▶ report        a running system: its processes are asked how they are
before  ─▶ findings ───────────▶ report         nothing runs: the machine, the files and the settings are looked at
"""
