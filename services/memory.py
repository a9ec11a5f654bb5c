"""Memory of a process: what its machine has, within the limits of its control groups, as in a container."""

import os
from pathlib import Path

from services.own_cgroups import enclosing_groups

_MEMINFO = Path("/proc/meminfo")
_PROCESS = Path("/proc/self")
_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Of both versions of cgroups(7): a group's limit, what it takes, and what of that is files nobody used lately."""


def memory_here(*, process: Path = _PROCESS) -> int:
    """Bytes that this machine has, or that this process may have."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = (_number(group / names[0]) for group in enclosing_groups("memory", process) for names in _FILES)
    return min([machine, *(limit for limit in limits if limit is not None)])


def available_memory(*, meminfo: Path = _MEMINFO, process: Path = _PROCESS) -> int | None:
    """Bytes that this process may still take, or None if the kernel does not say."""
    left = [_of_machine(meminfo)]
    left += [_left_in(group, *names) for group in enclosing_groups("memory", process) for names in _FILES]
    return min((size for size in left if size is not None), default=None)


def _of_machine(meminfo: Path) -> int | None:
    try:
        lines = meminfo.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), None)


def _left_in(group: Path, limit_file: str, taken_file: str, reclaimed: str) -> int | None:
    """None where there is no such limit. The kernel takes files that nobody used lately before it ends a process."""
    limit, taken = _number(group / limit_file), _number(group / taken_file)
    if limit is None or taken is None:
        return None
    try:
        counts = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
    except (OSError, ValueError):
        counts = {}
    return max(0, limit - taken + int(counts.get(reclaimed, 0)))


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):  # none, or "max"
        return None
