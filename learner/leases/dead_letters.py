"""Leases that came to nothing: the dead-letter file, and the rule by which a run stops when there are too many."""

import json
import logging
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from learner.journal.files import LineFile, anyone, ignore, lines_backwards
from learner.ledger import Ledger
from protocol.messages import FailedLease
from services.run_lock import FolderLost

logger = logging.getLogger(__name__)

DEAD_LETTERS = "dead_letters.jsonl"
"""The dead-letter file's name in the run's folder."""

_FEWEST_FINISHED = 20


class RunAborted(RuntimeError):
    """The run cannot go on; the text names the reason and what to do."""


class DeadLetters:
    """Appends one JSON object a line: the failure, its task and the time in seconds since 1970.

    A resumed run needs them: while the disk takes none they are kept here. `failed` and `may_write` are as for a
    LineFile.
    """

    def __init__(
        self,
        path: Path,
        *,
        largest_share: float,
        failed: Callable[[str], None] = ignore,
        may_write: Callable[[], None] = anyone,
    ) -> None:
        self._path = path
        self._largest_share = largest_share
        self._lines = LineFile(path, failed=failed, may_write=may_write)
        self._unwritten: deque[dict[str, object]] = deque()

    def append(self, failed: FailedLease, *, task_index: int, version: int) -> None:
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
        with suppress(FolderLost):  # what is left is the other process's to find out
            self.write_later()
        self._lines.close()

    def verdict(self, ledger: Ledger) -> RunAborted | None:
        """Reason to stop the run, if too large a share of the leases was given up; None if it may go on."""
        books = ledger.books()
        finished = books.trained + books.filtered + books.dead_lettered
        if finished < _FEWEST_FINISHED or books.dead_lettered <= self._largest_share * finished:
            return None
        ((reason, count),) = ledger.commonest_reasons(1) or (("none stands out", 1),)
        return RunAborted(
            f"{books.dead_lettered} of {finished} leases were given up; the commonest reason ({count} times) is: "
            f"{reason}. See {self._path}"
        )


def dead_lettered_since(version: int, path: Path) -> list[int]:
    """The leases that were given up since the learner held `version`; those before are in its checkpoint's books.

    Reads no more of the file than that. What follows its last line's end was being written when the learner died: that
    lease is simply granted again.
    """
    found: list[int] = []
    unread = 0
    for line in lines_backwards(path):
        try:
            entry = json.loads(line)
            lease_id, given_up_at = int(entry["lease_id"]), int(entry.get("version", version))
        except (ValueError, KeyError, TypeError, AttributeError):
            unread += 1
            continue
        if given_up_at < version:
            break
        found.append(lease_id)
    if unread:
        logger.warning("%s: %d lines cannot be read; the leases that they name are granted again", path, unread)
    return found[::-1]
