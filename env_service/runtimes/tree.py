"""Trees of files as they go in and out of a runtime: entries in one memory file, which is handed over as a descriptor.

What is inside belongs to whoever runs there, and may change while it is read. A path is looked up in the runtime's own
root, by the kernel, so that no link leads out of it; and what is neither file, folder nor link is left out.
"""

import contextlib
import ctypes
import errno
import marshal
import os
import stat
from collections.abc import Iterator, Sequence
from typing import NamedTuple

FILE, FOLDER, LINK, WHITEOUT = "file", "folder", "link", "whiteout"
MAX_ENTRIES = 100_000

_OPENAT2 = 437
_RESOLVE_NO_MAGICLINKS, _RESOLVE_IN_ROOT = 0x02, 0x10
_OPAQUE = "user.overlay.opaque"
_PART = 1 << 20


class TreeEntry(NamedTuple):
    """A file, folder or link by its relative path. `content` is of a file its bytes, of a link where it leads to; of a
    folder in a snapshot it is not empty where that hides the one of the image.
    """

    kind: str
    path: str
    mode: int
    content: bytes


class TooLarge(OSError):
    """A tree has more bytes or entries than may be read."""

    def __init__(self, most: int) -> None:
        super().__init__(errno.EFBIG, f"more than {most} bytes or {MAX_ENTRIES} files")


class _How(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


def open_inside(libc: ctypes.CDLL, root: int, path: str, flags: int, mode: int = 0) -> int:
    """A descriptor of a path looked up in the folder `root` as if that were all there is. Raises OSError."""
    how = _How(flags | os.O_CLOEXEC, mode, _RESOLVE_IN_ROOT | _RESOLVE_NO_MAGICLINKS)
    name = os.fsencode(path)
    found = int(libc.syscall(_OPENAT2, root, name, ctypes.byref(how), ctypes.sizeof(how)))
    if found < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)
    return found


def write_inside(libc: ctypes.CDLL, root: int, entries: Sequence[TreeEntry]) -> None:
    """Write entries below `root`, with the folders that they need. Raises OSError."""
    for entry in entries:
        parent, _, name = entry.path.strip("/").rpartition("/")
        folder = _folder_inside(libc, root, parent)
        try:
            if entry.kind == FOLDER:
                os.close(_folder_inside(libc, root, entry.path.strip("/")))
            elif entry.kind == LINK:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=folder)
                os.symlink(os.fsdecode(entry.content), name, dir_fd=folder)
            else:
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK
                # Whoever is inside can have made a link of that name: it leads nowhere but inside.
                write_file(open_inside(libc, root, entry.path, flags, 0o600), entry)
        finally:
            os.close(folder)


def write_file(handle: int, entry: TreeEntry) -> None:
    """Write an entry's content and mode, and close the file."""
    try:
        written = 0
        while written < len(entry.content):
            written += os.write(handle, entry.content[written : written + _PART])
        os.fchmod(handle, entry.mode & 0o777)
    finally:
        os.close(handle)


def _folder_inside(libc: ctypes.CDLL, root: int, path: str) -> int:
    """A folder below `root`, made if need be."""
    place = open_inside(libc, root, "/", os.O_PATH | os.O_DIRECTORY)
    so_far = ""
    for name in filter(None, path.split("/")):
        if name == "..":
            raise OSError(errno.EINVAL, "a path with '..'", path)
        so_far = f"{so_far}/{name}"
        try:
            below = open_inside(libc, root, so_far, os.O_PATH | os.O_DIRECTORY)
        except FileNotFoundError:
            os.mkdir(name, 0o755, dir_fd=place)
            below = open_inside(libc, root, so_far, os.O_PATH | os.O_DIRECTORY)
        os.close(place)
        place = below
    return place


def read_inside(libc: ctypes.CDLL, root: int, path: str, *, most: int) -> list[TreeEntry]:
    """The file at a path, or the folder with all that is in it, by paths from there on. Raises OSError, TooLarge."""
    handle = open_inside(libc, root, path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        status = os.fstat(handle)
        if stat.S_ISREG(status.st_mode):
            return [TreeEntry(FILE, "", stat.S_IMODE(status.st_mode), _content(handle, most))]
        if not stat.S_ISDIR(status.st_mode):
            raise OSError(errno.EINVAL, "neither a file nor a folder", path)
        return list(read_tree(handle, most=most, layered=False))
    finally:
        os.close(handle)


def read_tree(folder: int, *, most: int, layered: bool) -> Iterator[TreeEntry]:
    """Entries of an open folder. `layered`: it is the upper layer of an overlay, whose marks count. Raises TooLarge."""
    left, count = most, 0
    for parent, names, files, handle in os.fwalk(".", dir_fd=folder, follow_symlinks=False):
        below = parent.removeprefix(".").removeprefix("/")
        for name in sorted(names) + sorted(files):
            entry = _entry(handle, name, os.path.join(below, name), most=left, layered=layered)
            if entry is None:
                continue
            left, count = left - len(entry.content), count + 1
            if count > MAX_ENTRIES:
                raise TooLarge(most)
            yield entry


def _entry(folder: int, name: str, path: str, *, most: int, layered: bool) -> TreeEntry | None:
    try:
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        mode = stat.S_IMODE(status.st_mode)
        if stat.S_ISLNK(status.st_mode):
            return TreeEntry(LINK, path, mode, os.fsencode(os.readlink(name, dir_fd=folder)))
        if stat.S_ISDIR(status.st_mode):
            return TreeEntry(FOLDER, path, mode, _opacity(folder, name) if layered else b"")
        if layered and stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:
            return TreeEntry(WHITEOUT, path, mode, b"")
        if not stat.S_ISREG(status.st_mode):
            return None
        handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    except FileNotFoundError:  # removed meanwhile
        return None
    try:
        return TreeEntry(FILE, path, mode, _content(handle, most))
    finally:
        os.close(handle)


def _opacity(folder: int, name: str) -> bytes:
    handle = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
    try:
        return os.getxattr(handle, _OPAQUE)
    except OSError:
        return b""
    finally:
        os.close(handle)


def _content(handle: int, most: int) -> bytes:
    parts, size = [], 0
    while part := os.read(handle, _PART):
        parts.append(part)
        size += len(part)
        if size > most:
            raise TooLarge(most)
    return b"".join(parts)


def restore(folder: str, entries: Sequence[TreeEntry]) -> None:
    """Write a snapshot into an empty upper layer that nobody uses yet."""
    for entry in entries:
        path = os.path.join(folder, entry.path)
        if entry.kind == FOLDER:
            os.mkdir(path)
            os.chmod(path, entry.mode)
            if entry.content:
                os.setxattr(path, _OPAQUE, entry.content)
        elif entry.kind == LINK:
            os.symlink(os.fsdecode(entry.content), path)
        elif entry.kind == WHITEOUT:
            os.mknod(path, stat.S_IFCHR, os.makedev(0, 0))
        else:
            write_file(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL), entry)


def packed(entries: Sequence[TreeEntry]) -> int:
    """A descriptor of a memory file with entries, to be handed over."""
    handle = os.memfd_create("headway-tree", os.MFD_CLOEXEC)
    with open(handle, "wb", closefd=False) as file:
        marshal.dump([tuple(entry) for entry in entries], file)
    os.lseek(handle, 0, os.SEEK_SET)
    return handle


def unpacked(handle: int) -> list[TreeEntry]:
    """The entries of such a file, which is closed."""
    with open(handle, "rb") as file:
        file.seek(0)
        return [TreeEntry(*each) for each in marshal.load(file)]
