"""Files that a crash or a full disk leaves whole: appended to all or nothing, or replaced at once."""

import itertools
import json
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from services.append_file import AppendFile, sync_folder

logger = logging.getLogger(__name__)


def write_atomically(path: Path, text: str) -> None:
    """The file holds either its former text or, on the disk, all of the new one."""
    draft = path.with_name(f"{path.name}.new")
    with draft.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    sync_folder(path.parent)


def sync_tree(folder: Path) -> None:
    """Returns when everything below the folder is on the disk."""
    for path in folder.rglob("*"):
        if path.is_dir():
            sync_folder(path)
        elif path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    sync_folder(folder)


def end_of_lines(path: Path) -> int:
    """The byte after the last whole line; what follows was being written at a crash. 0 if there is no file."""
    if not path.exists():
        return 0
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - (1 << 16))
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            end = start
    return 0


def lines_backwards(path: Path) -> Iterator[bytes]:
    """The whole lines of a file, the last one first; none if there is no such file."""
    end = end_of_lines(path)
    if end == 0:
        return
    with path.open("rb") as file:
        rest = b""  # the beginning of a line whose start is further ahead
        while end > 0:
            start = max(0, end - (1 << 16))
            file.seek(start)
            first, *lines = (file.read(end - start) + rest).split(b"\n")
            yield from (line for line in reversed(lines) if line)
            rest, end = first, start
        if rest:
            yield rest


def unused(path: Path) -> Path:
    """The path, or the first of those with a number appended of which there is no file."""
    candidates = itertools.chain([path], (path.with_name(f"{path.name}-{number}") for number in itertools.count(2)))
    return next(candidate for candidate in candidates if not candidate.exists())


def ignore(name: object) -> None:
    """Takes note of nothing."""


def anyone() -> None:
    """Nobody else can have the folder."""


class LineFile:
    """Appends lines from any thread. A line that a crash cut short is removed at opening.

    `failed` is told the file's name for each line that could not be written; the first one is said in the log. `told`
    gets each entry, written or not, which is not changed any more. `may_write` is called before each, and raises if the
    folder is not this process's any more.
    """

    def __init__(
        self,
        path: Path,
        *,
        failed: Callable[[str], None] = ignore,
        end: int | None = None,
        told: Callable[[Mapping[str, object]], None] = ignore,
        may_write: Callable[[], None] = anyone,
    ) -> None:
        """`end`: the bytes of the file that stay; all whole lines if left out."""
        self._told = told
        self._may_write = may_write
        self._path = path
        self._failed = failed
        self._file = AppendFile(path, end=end_of_lines(path) if end is None else end)
        self._lock = threading.Lock()
        self._closed = False
        self.lost = 0
        """Lines that could not be written."""

    def write(self, entry: Mapping[str, object]) -> bool:
        """True if the entry is in the file now, as a line. Raises what `may_write` does."""
        self._may_write()
        line = json.dumps(entry, ensure_ascii=False) + "\n"
        self._told(entry)
        try:
            with self._lock:
                self._file.append(line.encode("utf-8", errors="replace"))
        except OSError as error:
            self._count(error)
            return False
        return True

    @property
    def end(self) -> int:
        """Bytes in the file."""
        return self._file.end

    def _count(self, error: OSError) -> None:
        if self._closed:  # the run has ended, and a thread of it not yet: nobody can do anything about it
            return
        self.lost += 1
        self._failed(self._path.name)
        if self.lost == 1:
            logger.warning(
                "%s cannot be written: %s. The run goes on; lines are lost until there is room", self._path, error
            )

    def close(self) -> None:
        """Closes the file; what is written from here on is lost, and not worth a word."""
        self._closed = True
        self._file.close()
