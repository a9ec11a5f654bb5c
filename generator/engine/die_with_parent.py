"""The processes of an engine end when the process that owns it ends, however that comes about: vLLM leaves them behind.

The tie travels within vLLM's config and takes hold when a child unpickles that: before the child waits for its parent,
which it otherwise does for minutes after a parent's early death.
"""

import os
import select
import threading
from collections.abc import Callable


class OwnerTie:
    """A value of vLLM's `additional_config`. Unpickled in another process than `owner_pid`'s, it ties that process."""

    def __init__(self, *, owner_pid: int) -> None:
        self._owner_pid = owner_pid

    def compute_hash(self) -> str:
        """vLLM asks what this changes in a compiled model: nothing."""
        return ""

    def __reduce__(self) -> "tuple[Callable[[int], OwnerTie], tuple[int]]":
        return tied_to, (self._owner_pid,)


def tied_to(owner_pid: int) -> OwnerTie:
    """Watch the owner from a thread of this process, unless this process is the owner."""
    if owner_pid != os.getpid():
        threading.Thread(target=_exit_after, args=(owner_pid,), name="headway-owner", daemon=True).start()
    return OwnerTie(owner_pid=owner_pid)


def _exit_after(owner_pid: int) -> None:
    try:
        watch = os.pidfd_open(owner_pid)
    except ProcessLookupError:
        os._exit(1)
    poll = select.poll()
    poll.register(watch, select.POLLIN)
    poll.poll()
    os._exit(1)
