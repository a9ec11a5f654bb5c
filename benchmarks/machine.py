"""The machine, and the state of the code, that a result is of; and the memory of a process."""

import os
import subprocess
from collections.abc import Iterable
from pathlib import Path


def described_machine() -> str:
    """Cores, the processor's name, the load of the last minute, and the commit; in a sentence without its full stop."""
    load = os.getloadavg()[0]
    return f"{os.cpu_count()} cores ({_processor()}), load {load:.1f} at the end; commit {commit_of_code()}"


def machines_of(described: Iterable[str]) -> list[str]:
    """Lines of Markdown for what `described_machine` said of several runs: one for each machine and commit, with the
    least and the highest load.
    """
    loads: dict[str, list[float]] = {}
    for each in described:
        machine, _, rest = each.partition(", load ")
        load, _, commit = rest.partition(" at the end; ")
        loads.setdefault(f"- {machine}; {commit}; load at the end ", []).append(float(load))
    return [f"{words}{min(found):.1f} to {max(found):.1f}" for words, found in sorted(loads.items())]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def commit_of_code() -> str:
    """The commit's short name, and whether files differ from it; results of benchmarks are no code."""
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    changes = ["git", "status", "--porcelain", "-uno", "--", ":(top,exclude)benchmarks/results"]
    dirty = subprocess.run(changes, capture_output=True, text=True, check=False)
    return (found.stdout.strip() or "unknown") + (" with changes" if dirty.stdout.strip() else "")


def rss() -> int:
    """Bytes of memory that this process holds now; from here on `peak_rss` counts anew."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _of_status("VmRSS")


def peak_rss() -> int:
    """The most bytes that this process has held since `rss` was asked."""
    return _of_status("VmHWM")


def _of_status(key: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{key}:"))
