"""Processes that are to end, children or not."""

import os
import select
import time
from collections.abc import Iterable
from pathlib import Path


def all_end(pids: Iterable[int], *, timeout_s: float = 240.0) -> bool:
    """True if all of them are gone, or go, within that time."""
    deadline = time.monotonic() + timeout_s
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            if not select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
                return False
        finally:
            os.close(descriptor)
    return True


def children_of(pid: int) -> list[int]:
    """The children of a process's first thread."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
