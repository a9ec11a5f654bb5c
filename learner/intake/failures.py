"""Leases that came to nothing: the dead-letter file, and the rule by which a run stops when there are too many."""

import json
import time
from pathlib import Path

from learner.ledger import Ledger
from protocol.messages import Failed

_FEWEST_FINISHED = 20


class RunFailed(RuntimeError):
    """The run cannot go on; the text names the reason and what to do."""


class DeadLetters:
    """Appends one JSON object a line: the failure, its task and the time in seconds since 1970."""

    def __init__(self, path: Path, *, largest_share: float) -> None:
        self._path = path
        self._largest_share = largest_share

    def append(self, failed: Failed, *, task_index: int) -> None:
        """Notes a lease that was given up."""
        letter = {**failed.model_dump(), "task_index": task_index, "time": time.time()}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(letter) + "\n")

    def verdict(self, ledger: Ledger) -> RunFailed | None:
        """Why the run must stop, if too large a share of the leases was given up; None if it may go on."""
        books = ledger.books()
        finished = books.trained + books.filtered + books.dead_lettered
        if finished < _FEWEST_FINISHED or books.dead_lettered <= self._largest_share * finished:
            return None
        reason, count = ledger.commonest_reasons(1)[0]
        return RunFailed(
            f"{books.dead_lettered} of {finished} leases were given up; the commonest reason ({count} times) is: "
            f"{reason}. See {self._path}"
        )
