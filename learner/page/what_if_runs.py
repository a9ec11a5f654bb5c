"""Starts what-ifs for the page: one at a time for a run, each a process of its own that writes to a folder of its own.

    RUN/what-ifs/what-if-3/      what `learner replay RUN --set ... --to` writes
                 what-if-3.log   what it says, with the reason if it failed
                 lock            held by the process that trains: it is free as soon as that has ended

Nothing else in the run's folder is written to.
"""

import asyncio
import fcntl
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from learner.journal.held import HELD_PREFIX
from learner.page.child_of_page import environment_of_child, replay_words

FOLDER = "what-ifs"
"""Name of their folder in that of the run."""
LOCK = "lock"
_NAME = re.compile(r"what-if-(\d{1,9})")
_MAX_OF_LOG = 4096
_END_S = 3.0


class WhatIfBusy(RuntimeError):
    """Another what-if of the run is being trained; the text names it."""


class WhatIfRunner:
    """The what-ifs of the run in `folder`; those of others, such as a page beside this one, are seen by their files.

    `start` and `stop` are to be called in the thread of the event loop: the kernel ends the process with the thread
    that has started it.
    """

    def __init__(self, folder: Path) -> None:
        self._run = folder
        self._root = folder / FOLDER
        self._child: subprocess.Popen[bytes] | None = None
        self._own = ""
        self._told_to_end = False

    def names(self) -> list[str]:
        """The names of those that are there, the newest first."""
        found = {path.name.removesuffix(".log") for path in self._root.glob("what-if-*")}
        return sorted((name for name in found if _NAME.fullmatch(name)), key=_number, reverse=True)

    def folder_of(self, name: str) -> Path:
        """The folder of one of `names`, which is there once its process has looked at the run."""
        return self._root / name

    def log_of(self, name: str) -> str:
        """The end of what its process said."""
        try:
            with (self._root / f"{name}.log").open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _MAX_OF_LOG))
                return file.read().decode(errors="replace").strip()
        except OSError:
            return ""

    def running(self) -> str | None:
        """Name of the one that is being trained, by whichever page; None if none is."""
        if self._child is not None and self._child.poll() is None:
            return self._own
        try:
            handle = os.open(self._root / LOCK, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            return None if _locked(handle, fcntl.LOCK_SH) else next(iter(self.names()), None)
        finally:
            os.close(handle)

    def start(self, changes: Sequence[str], *, groups: bool = True, version: int | None = None) -> str:
        """Starts a what-if by changes that are known to be good; returns its name. Raises WhatIfBusy, and OSError where
        the run's folder cannot be written.
        """
        self._root.mkdir(exist_ok=True)
        lock = os.open(self._root / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            if not _locked(lock, fcntl.LOCK_EX):
                name = self.running() or "another one"
                raise WhatIfBusy(f"{name} is being trained: one at a time for a run. Wait for its end, or stop it")
            self._remove_leftovers()
            name = f"what-if-{1 + max(map(_number, self.names()), default=0)}"
            words = replay_words(self._run, changes, to=self._root / name, groups=groups, version=version)
            with (self._root / f"{name}.log").open("xb") as log:
                self._child = subprocess.Popen(
                    words,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment_of_child(os.environ),
                    pass_fds=[lock],
                )
            self._own, self._told_to_end = name, False
            return name
        finally:
            os.close(lock)  # the process has it, too, and holds it until its end

    def stop(self) -> None:
        """Ends the one that this page has started, if it still runs; told for the second time, at once."""
        if self._child is None or self._child.poll() is not None:
            return
        if self._told_to_end:
            self._child.kill()
        else:
            self._child.terminate()
        self._told_to_end = True

    async def end(self) -> None:
        """Ends its process, and returns when it has ended: within seconds."""
        child = self._child
        if child is None or child.poll() is not None:
            return
        child.terminate()
        try:
            await asyncio.wait_for(asyncio.to_thread(child.wait), _END_S)
        except TimeoutError:
            child.kill()
            await asyncio.to_thread(child.wait)

    def reap(self) -> None:
        """Takes notice of the end of its process, which else stays as a zombie until the end of this one."""
        if self._child is not None:
            self._child.poll()

    def _remove_leftovers(self) -> None:
        """Files that one held still which was killed: nobody else can be training, as the lock is held."""
        for path in self._root.glob(f"{HELD_PREFIX}*"):
            shutil.rmtree(path, ignore_errors=True)


def _number(name: str) -> int:
    found = _NAME.fullmatch(name)
    return int(found[1]) if found else 0


def _locked(handle: int, kind: int) -> bool:
    """True if the lock was free, or there are no such locks on this file system."""
    with suppress(OSError):
        try:
            fcntl.flock(handle, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True
