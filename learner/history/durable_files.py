"""Files that a crash or a full disk leaves whole: appended to all or nothing, or replaced at once."""

import contextlib
import itertools
import os
from pathlib import Path


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

    def append(self, data: bytes) -> None:
        """Hands the bytes to the operating system: they survive this process's death. Raises OSError."""
        if self._torn:
            self._cut()
        try:
            view, at = memoryview(data), self._end
            while view:
                written = os.pwrite(self._handle, view, at)
                view, at = view[written:], at + written
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
        """Returns when all bytes are on the disk."""
        os.fdatasync(self._handle)

    def close(self) -> None:
        """Closes the file."""
        os.close(self._handle)


def write_atomically(path: Path, text: str) -> None:
    """The file holds either its former text or, on the disk, all of the new one."""
    draft = path.with_name(f"{path.name}.new")
    with draft.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Returns when the names in the folder are on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


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


def unused(path: Path) -> Path:
    """The path, or the first of those with a number appended of which there is no file."""
    candidates = itertools.chain([path], (path.with_name(f"{path.name}-{number}") for number in itertools.count(2)))
    return next(candidate for candidate in candidates if not candidate.exists())
