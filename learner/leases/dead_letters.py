"""Leases that came to nothing: the dead-letter file, the rule by which a run stops when there are too many, and the
wait for room on the journal's disk.
"""

import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from learner.journal.files import LineFile, ignore, lines_backwards
from learner.journal.journal import JournalFull
from learner.ledger import Ledger
from protocol.messages import Failed
from services.http.waiting import Waiting

log = logging.getLogger(__name__)

DEAD_LETTERS = "dead_letters.jsonl"
"""The dead-letter file's name in the run's folder."""

_FEWEST_FINISHED = 20


class RunFailed(RuntimeError):
    """The run cannot go on; the text names the reason and what to do."""


class DeadLetters:
    """Appends one JSON object a line: the failure, its task and the time in seconds since 1970.

    A resumed run needs them: while the disk takes none they are kept here. `failed` is told of each failed write.
    """

    def __init__(self, path: Path, *, largest_share: float, failed: Callable[[str], None] = ignore) -> None:
        self._path = path
        self._largest_share = largest_share
        self._lines = LineFile(path, failed=failed)
        self._unwritten: deque[dict[str, object]] = deque()

    def append(self, failed: Failed, *, task_index: int, version: int) -> None:
        """Notes a lease that was given up while the learner held `version`."""
        self._unwritten.append(
            {**failed.model_dump(), "task_index": task_index, "version": version, "time": time.time()}
        )
        self.write_later()

    def write_later(self) -> None:
        """Tries again to write what the disk has not taken yet."""
        while self._unwritten and self._lines.write(self._unwritten[0]):
            self._unwritten.popleft()

    def close(self) -> None:
        """Closes the file, after a last try to write what is left."""
        self.write_later()
        self._lines.close()

    def verdict(self, ledger: Ledger) -> RunFailed | None:
        """Why the run must stop, if too large a share of the leases was given up; None if it may go on."""
        books = ledger.books()
        finished = books.trained + books.filtered + books.dead_lettered
        if finished < _FEWEST_FINISHED or books.dead_lettered <= self._largest_share * finished:
            return None
        ((reason, count),) = ledger.commonest_reasons(1) or (("none stands out", 1),)
        return RunFailed(
            f"{books.dead_lettered} of {finished} leases were given up; the commonest reason ({count} times) is: "
            f"{reason}. See {self._path}"
        )


def dead_lettered_since(version: int, path: Path) -> list[int]:
    """The leases that were given up since the learner held `version`; those before are in its checkpoint's books.

    Reads no more of the file than that. What follows its last line's end was being written when the learner died: that
    lease is simply granted again.
    """
    found: list[int] = []
    for line in lines_backwards(path):
        entry = json.loads(line)
        if int(entry.get("version", version)) < version:
            break
        found.append(int(entry["lease_id"]))
    return found[::-1]


_SAY_EVERY_S = 30.0
_RETRY_EVERY_S = 0.5
_LATELY_S = 120.0


class DiskRoom:
    """Whether the disk takes what the run must keep. `failed` is told the file of each write that it did not take;
    `clock` is in seconds.
    """

    def __init__(self, *, waits: Waiting, clock: Callable[[], float], failed: Callable[[str], None] = ignore) -> None:
        self._failed = failed
        self._waits = waits
        self._clock = clock
        self._said_at = self._missed_at = float("-inf")

    def is_missing(self) -> bool:
        """Whether a group could not be kept lately: those that are refused now are sent again ever more rarely."""
        return self._clock() - self._missed_at < _LATELY_S

    def say(self, error: JournalFull) -> None:
        """A group could not be kept. Said at most twice a minute."""
        self._missed_at = self._clock()
        self._failed("journal")
        if self._clock() - self._said_at >= _SAY_EVERY_S:
            self._said_at = self._clock()
            log.error("%s. Groups are not acknowledged, and env_services send them again: make room", error.strerror)

    async def wait_for(self, write: Callable[[], None]) -> None:
        """Calls `write` in a thread until the disk takes it."""
        try:
            await asyncio.to_thread(write)
        except JournalFull as error:
            self.say(error)
            with self._waits.wait(f"room on the disk of {error.folder}"):
                await self._until_written(write)

    async def _until_written(self, write: Callable[[], None]) -> None:
        while True:
            await asyncio.sleep(_RETRY_EVERY_S)  # nobody tells when a disk has room again
            try:
                await asyncio.to_thread(write)
            except JournalFull:
                self._failed("journal")
            else:
                return
