"""Descendants of this process whose parent has ended: it takes them over, so that none is left behind. Linux only."""

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_PAUSE_S = 0.01


@dataclass(frozen=True)
class Relative:
    """A child of this process, own or taken over."""

    pid: int
    session: int


def adopt_orphans() -> None:
    """From here on, descendants of this process whose parent ends become its children, and not init's."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children() -> Iterator[Relative]:
    """The children of this process, dead ones that nobody has waited for included."""
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name of the program, in brackets, may hold anything; behind it are state, parent, group, session.
            fields = entry.read_bytes().rpartition(b")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        if int(fields[1]) == os.getpid():
            yield Relative(pid=int(entry.parent.name), session=int(fields[3]))


def kill_children(wanted: Callable[[Relative], bool], *, deadline: float) -> bool:
    """Kills the wanted children, and those that become wanted children by it, until `deadline` (monotonic).

    Returns whether none is left.
    """
    while found := [child for child in children() if wanted(child)]:
        for child in found:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(child.pid, signal.SIGKILL)
                os.waitpid(child.pid, os.WNOHANG)
        if time.monotonic() > deadline:
            return False
        time.sleep(_PAUSE_S)
    return True
