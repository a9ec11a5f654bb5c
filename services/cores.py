"""Cores that a process may keep busy: those of its affinity, within the quotas of its control groups."""

import os
import sys
from pathlib import Path

from services.own_cgroups import enclosing_groups

_PROCESS = Path("/proc/self")


def cores(*, process: Path = _PROCESS) -> int:
    """Whole number of `usable_cores`, at least one."""
    return max(1, round(usable_cores(process=process)))


def usable_cores(*, process: Path = _PROCESS) -> float:
    """Cores that this process may keep busy: of its affinity, and by the quota of its container, which may be a part
    of a core.
    """
    count = len(os.sched_getaffinity(0)) if sys.platform == "linux" else _all_cores()
    quotas = (quota for group in enclosing_groups("cpu", process) if (quota := _quota(group)) is not None)
    return min([count, *quotas])


def has_whole_machine(*, process: Path = _PROCESS) -> bool:
    """True if this process may keep all cores of its machine busy."""
    return usable_cores(process=process) >= _all_cores()


def _all_cores() -> int:
    return os.cpu_count() or 1


def _quota(group: Path) -> float | None:
    try:
        limit, period = (group / "cpu.max").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        try:
            limit, period = ((group / f"cpu.cfs_{name}_us").read_text(encoding="ascii") for name in ("quota", "period"))
        except OSError:
            return None
    try:
        quota = int(limit) / int(period)
    except (ValueError, ZeroDivisionError):  # "max"
        return None
    return quota if quota > 0 else None  # version 1 says -1 where there is none
