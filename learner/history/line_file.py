"""Files of one JSON object a line that are good to have: a full disk costs lines, and never the run."""

import json
import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from learner.history.durable_files import AppendFile, end_of_lines

log = logging.getLogger(__name__)


def ignore(name: str) -> None:
    """Takes note of nothing."""


class LineFile:
    """Appends lines from any thread. A line that a crash cut short is removed at opening.

    `failed` is told the file's name for each line that could not be written; the first one is said in the log.
    """

    def __init__(self, path: Path, *, failed: Callable[[str], None] = ignore) -> None:
        self._path = path
        self._failed = failed
        self._file = AppendFile(path, end=end_of_lines(path))
        self._lock = threading.Lock()
        self.lost = 0
        """Lines that could not be written."""

    def write(self, entry: Mapping[str, object]) -> bool:
        """Whether the entry is in the file now, as a line."""
        line = json.dumps(entry, ensure_ascii=False) + "\n"
        try:
            with self._lock:
                self._file.append(line.encode("utf-8", errors="replace"))
        except OSError as error:
            self._count(error)
            return False
        return True

    def _count(self, error: OSError) -> None:
        self.lost += 1
        self._failed(self._path.name)
        if self.lost == 1:
            log.warning(
                "%s cannot be written: %s. The run goes on; lines are lost until there is room", self._path, error
            )

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
