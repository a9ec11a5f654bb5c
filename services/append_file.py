"""A file that a crash or a full disk leaves whole: appended to all or nothing."""

import contextlib
import errno
import os
from collections.abc import Sequence
from pathlib import Path

_CHUNK_BYTES = 1 << 20
_PARTS_AT_ONCE = 512
"""Of one write; Linux takes 1024."""


class AppendFile:
    """A file that grows at its end. An append that fails leaves the file as it was. For one thread at a time."""

    def __init__(self, path: Path, *, end: int | None = None) -> None:
        """Opens the file, or makes it; what follows the byte `end` is cut off."""
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._end = os.fstat(self._handle).st_size
        self._torn = False
        if end is not None and end < self._end:
            self._end = end
            os.ftruncate(self._handle, end)

    @property
    def end(self) -> int:
        """Bytes in the file."""
        return self._end

    def append(self, *parts: bytes | memoryview) -> None:
        """Hands the bytes, one part after the other, to the operating system: they survive this process's death.

        Parts have items of one byte. Raises OSError.
        """
        if self._torn:
            self._cut()
        try:
            rest, at = list(parts), self._end
            while rest:
                if len(rest) == 1:
                    written = os.pwrite(self._handle, rest[0], at)
                else:
                    written = os.pwritev(self._handle, rest[:_PARTS_AT_ONCE], at)
                rest, at = _after(rest, written), at + written
        except OSError:
            self._torn = True
            with contextlib.suppress(OSError):  # tried again before the next append
                self._cut()
            raise
        self._end = at

    def _cut(self) -> None:
        os.ftruncate(self._handle, self._end)
        self._torn = False

    def sync(self) -> None:
        """Returns when all bytes are on the disk. After an OSError only what `write_again` wrote is sure to get there:
        the kernel may have given up the bytes that it could not write, and say nothing of them at the next call.
        """
        if self._handle < 0:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        os.fdatasync(self._handle)

    def write_again(self, start: int) -> None:
        """Hands what is in the file from the byte `start` on to the operating system once more. Raises OSError."""
        while start < self._end:
            data = os.pread(self._handle, min(_CHUNK_BYTES, self._end - start), start)
            start += os.pwrite(self._handle, data, start)

    def close(self) -> None:
        """Closes the file; what is asked of it after that raises OSError."""
        handle, self._handle = self._handle, -1
        os.close(handle)


def _after(parts: Sequence[bytes | memoryview], written: int) -> list[bytes | memoryview]:
    """The rest of the parts after so many bytes."""
    for number, part in enumerate(parts):
        if written < len(part):
            return [memoryview(part)[written:], *parts[number + 1 :]]
        written -= len(part)
    return []


def sync_folder(folder: Path) -> None:
    """Returns when the names in the folder are on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_folder(folder: Path) -> None:
    """The folder is there, and its name and those of the ones above it that were made for it are on the disk."""
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for each in made:
        sync_folder(each.parent)
