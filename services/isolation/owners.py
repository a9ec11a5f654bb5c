"""Marks of the processes behind walls, by which those of a killed service are found.

A mark among the arguments of a process says whose it is. Keepers and bubblewrap die with their parents, but for the
instant in which a process has not asked the kernel for that yet: a service that is killed then leaves a first process
that waits for ever.
"""

import logging
import os
import re
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from services.local_processes import each_process, fields_of

logger = logging.getLogger(__name__)

_MARK = re.compile(r"headway-sandbox:(\d+):(\d+):(\d+)")


@dataclass(frozen=True, kw_only=True)
class Owner:
    """A service: its process id, when it started in ticks since the boot, and the namespace in which that is its id."""

    namespace: int
    pid: int
    started: int

    @classmethod
    def this(cls) -> Self:
        """This process."""
        pid = os.getpid()
        return cls(namespace=_namespace(), pid=pid, started=_started(pid) or 0)

    @classmethod
    def of(cls, mark: str) -> Self | None:
        """The service of a mark; None if it is none."""
        found = _MARK.fullmatch(mark)
        if found is None:
            return None
        namespace, pid, started = map(int, found.groups())
        return cls(namespace=namespace, pid=pid, started=started)

    @property
    def mark(self) -> str:
        """The argument by which its sandboxes are known."""
        return f"headway-sandbox:{self.namespace}:{self.pid}:{self.started}"

    @property
    def is_gone(self) -> bool:
        """True if it has ended. One in another namespace is not known to have."""
        return self.namespace == _namespace() and _started(self.pid) != self.started


def end_orphans(sign: str) -> int:
    """Kill the processes with that sign among their arguments whose service has ended; how many there were."""
    found = 0
    for pid in list(_orphans(sign)):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
            found += 1
    if found:
        logger.warning("killed %d processes behind walls (%s) that a killed service had left", found, sign)
    return found


def _orphans(sign: str) -> Iterator[int]:
    for pid, told in each_process("cmdline"):
        owner = _owner(told.decode(errors="replace").rstrip("\0").split("\0"), sign)
        if owner is not None and owner.is_gone:
            yield pid


def _owner(words: list[str], sign: str) -> Owner | None:
    """Of a process with these arguments, if it is that of a sandbox."""
    return Owner.of(words[-1]) if any(sign in word for word in words) else None


def _started(pid: int) -> int | None:
    """Start time of a process; None if there is none of that id, or only its remains."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    fields = fields_of(stat)
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def _namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino
