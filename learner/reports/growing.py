"""A file of lines that is read while it grows.

A `Mark` is how far somebody has read: the file's identity and the byte after its last whole line.
"""

import os
from dataclasses import dataclass
from pathlib import Path

_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True)
class Mark:
    """Position of a reader: `inode` 0 before the file was there."""

    inode: int = 0
    at: int = 0

    def __str__(self) -> str:
        return f"{self.inode}-{self.at}"

    @classmethod
    def at_end_of(cls, path: Path) -> "Mark":
        """Past all that a file holds; at its beginning, if it is not there."""
        try:
            found = path.stat()
        except OSError:
            return cls()
        return cls(found.st_ino, found.st_size)

    @classmethod
    def parse(cls, text: str) -> "Mark":
        """The value that `str` made. Raises ValueError."""
        inode, at = text.split("-")
        return cls(int(inode), int(at))


class FileRestarted(Exception):
    """The file is another one, or shorter than what was read of it, or takes back what was read: begin anew."""


def lines_after(path: Path, mark: Mark) -> tuple[list[bytes], Mark]:
    """The whole lines after a mark, at most some MiB of them, and the new mark. Raises Restarted.

    A half-written line waits for its end; a file that is not there is an empty one.
    """
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if mark.inode and (status.st_ino != mark.inode or status.st_size < mark.at):
                raise FileRestarted
            file.seek(mark.at)
            data = file.read(_CHUNK_BYTES)
            while data and b"\n" not in data and len(data) % _CHUNK_BYTES == 0 and (more := file.read(_CHUNK_BYTES)):
                data += more
    except FileNotFoundError:
        if mark.inode:
            raise FileRestarted from None
        return [], mark
    end = data.rfind(b"\n") + 1
    return data[:end].splitlines(), Mark(status.st_ino, mark.at + end)
