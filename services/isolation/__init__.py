"""Walls around code that is not ours: namespaces by bubblewrap, filtered system calls, cgroups, and what was left of
both by a killed process. Programs of the reward service and runtimes of the env_service stand behind the same ones.
"""
