"""Starts what-ifs for the page: one at a time for a run, each a process of its own that writes to a folder of its own.

    RUN/what-ifs/what-if-3/      what `learner replay RUN --set ... --to` writes
                 what-if-3.log   what it says, with the reason if it failed
                 what-if-3.json  what it changes, also where it ended before it had a folder
                 lock            held by the process that trains: it is free as soon as that has ended

Nothing else in the run's folder is written to.
"""

import asyncio
import fcntl
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from learner.journal.held import HELD_PREFIX
from learner.page.child_of_page import environment_of_child, replay_words
from learner.reports.what_if_folder import PULLS_PREFIX

FOLDER = "what-ifs"
"""Name of their folder in that of the run."""
LOCK = "lock"
_NAME = re.compile(r"what-if-(\d{1,9})")
_MAX_OF_LOG = 4096
_ONCE_MORE_S = 0.2
_END_S = 6.0
"""Time of a process for its end, with that of the page: of the 8 s that this one has to clean up."""
_KILL_AFTER_S = 10.0
"""Time that an order to end leaves, in seconds: its own stop waits for the step that it trains, and for its ranks."""


class WhatIfBusy(RuntimeError):
    """Another what-if of the run is being trained; the text names it."""


class WhatIfNotOwn(RuntimeError):
    """The page trains no what-if of this name; the text says what is known of it."""


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
        self._told_at: float | None = None

    def names(self) -> list[str]:
        """The names of those that are there, the newest first."""
        found = {path.name.removesuffix(".log") for path in self._root.glob("what-if-*")}  # a note alone is of none
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

    def changes_of(self, name: str) -> list[str]:
        """Changes by which it was started, in words; empty if that is not known."""
        try:
            note = json.loads(self._note_path(name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return []
        return list(note["changes"]) if isinstance(note, dict) and "changes" in note else []

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

    async def start(
        self, changes: Sequence[str], *, told: Sequence[str] = (), groups: bool = True, version: int | None = None
    ) -> str:
        """Starts a what-if by changes that are known to be good; returns its name. One at a time.

        `told` are the same changes in words. Raises WhatIfBusy, and OSError where the run's folder cannot be written.
        """
        self._root.mkdir(exist_ok=True)
        lock = os.open(self._root / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            if not _locked(lock, fcntl.LOCK_EX):
                await asyncio.sleep(_ONCE_MORE_S)  # it may be about to end, or only have been looked at
                if not _locked(lock, fcntl.LOCK_EX):
                    name = self.running() or "another one"
                    raise WhatIfBusy(f"{name} is being trained: one at a time for a run. Wait for its end, or stop it")
            name = f"what-if-{1 + max(map(_number, self.names()), default=0)}"
            words = replay_words(self._run, changes, to=self._root / name, groups=groups, version=version)
            with (self._root / f"{name}.log").open("xb") as log:  # who finds the lock held looks for the newest name
                self._note_path(name).write_text(json.dumps({"changes": list(told)}) + "\n", encoding="utf-8")
                await asyncio.to_thread(self._remove_leftovers)
                self._child = _begun(words, log=log, lock=lock)
            self._own, self._told_at = name, None
            return name
        finally:
            os.close(lock)  # the process has it, too, and holds it until its end

    def stop(self, name: str) -> None:
        """Ends the one of this name, which this page has started; told again after a while, at once.

        Raises WhatIfNotOwn for another one, which is left as it is.
        """
        if name != self._own or self._child is None or self._child.poll() is not None:
            if name == self.running():
                raise WhatIfNotOwn(f"{name} is being trained by another page of this run: stop it there")
            raise WhatIfNotOwn(f"{name} is not being trained, or no longer: there is nothing to stop")
        now = time.monotonic()
        if self._told_at is None:
            self._told_at = now
            self._child.terminate()
        elif now - self._told_at >= _KILL_AFTER_S:
            self._child.kill()

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
        """Removes files that one which was killed held still, and its pulls: as the lock is held, nobody trains."""
        for pattern in (f"{HELD_PREFIX}*", f"what-if-*/{PULLS_PREFIX}*"):
            for path in self._root.glob(pattern):
                shutil.rmtree(path, ignore_errors=True)

    def _note_path(self, name: str) -> Path:
        return self._root / f"{name}.json"


def _begun(words: Sequence[str], *, log: IO[bytes], lock: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=environment_of_child(os.environ),
        pass_fds=[lock],
    )


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
