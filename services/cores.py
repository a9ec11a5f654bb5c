"""Cores that a process may keep busy: those of its affinity, within the quota of its container."""

import os
import sys
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


def cores(*, cgroups: Path = _CGROUPS) -> int:
    """Whole number of `usable_cores`, at least one."""
    return max(1, round(usable_cores(cgroups=cgroups)))


def usable_cores(*, cgroups: Path = _CGROUPS) -> float:
    """Cores that this process may keep busy: of its affinity, and by the quota of its container, which may be a part
    of a core. `cgroups` is the mount of cgroups(7) of version 2, or the folder of those of version 1.
    """
    count = len(os.sched_getaffinity(0)) if sys.platform == "linux" else _all_cores()
    quota = _quota(cgroups)
    return count if quota is None or quota >= count else quota


def has_whole_machine(*, cgroups: Path = _CGROUPS) -> bool:
    """True if this process may keep all cores of its machine busy."""
    return usable_cores(cgroups=cgroups) >= _all_cores()


def _all_cores() -> int:
    return os.cpu_count() or 1


def _quota(cgroups: Path) -> float | None:
    try:
        limit, period = (cgroups / "cpu.max").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        try:
            limit, period = ((cgroups / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        except OSError:
            return None
    try:
        quota = int(limit) / int(period)
    except (ValueError, ZeroDivisionError):  # "max"
        return None
    return quota if quota > 0 else None  # version 1 says -1 where there is none
