"""Files of a pod, by find and tar of its image; and those in which it differs from how it began.

What a runtime has at its start is listed once, with the times of the last change of each file, which nobody inside can
set. What is new or has another time is in a snapshot; what is missing is said to be.
"""

import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from env_service.runtimes.tree import FOLDER, WHITEOUT, TreeEntry

LIST = (
    "/bin/sh", "-c",
    r"find / -xdev -mindepth 1 \( -path /proc -o -path /sys -o -path /dev -o -path /run/secrets \) -prune "
    r"-o -printf '%C@ %y %m %P\0' 2>/dev/null; [ $? -le 1 ]",
)  # fmt: skip
UNPACK = ("tar", "-C", "/", "-xpf", "-")
PACK_NAMED = ("tar", "-C", "/", "--null", "--no-recursion", "--ignore-failed-read", "-T", "-", "-cf", "-")
PACK = (
    "/bin/sh", "-c",
    'at=$(readlink -e -- "$1") || exit 44; tar -C "$(dirname -- "$at")" -cf - -- "$(basename -- "$at")"', "sh",
)  # fmt: skip
ABSENT = 44


class ListedFile(NamedTuple):
    """A path as find tells it; `kind` is f, d, l or another letter."""

    changed: str
    kind: str
    mode: int


class FileListing:
    """Files of a pod at one time, kept small."""

    def __init__(self, told: bytes) -> None:
        self._told = zlib.compress(told, 1)

    def files(self) -> dict[bytes, ListedFile]:
        """All of them by their paths from the root on. Raises ValueError if it cannot be read."""
        found = {}
        for line in zlib.decompress(self._told).split(b"\0")[:-1]:
            changed, kind, mode, path = line.split(b" ", 3)
            found[path] = ListedFile(changed.decode(), kind.decode(), int(mode, 8))
        return found


class DifferingFiles(NamedTuple):
    """Differences between two listings: folders, and what was removed; and paths of files and links to be read."""

    entries: list[TreeEntry]
    paths: list[bytes]


def differing(before: Mapping[bytes, ListedFile], after: Mapping[bytes, ListedFile]) -> DifferingFiles:
    """Compare how a pod is with how it began."""
    entries, paths = [], []
    for path, file in after.items():
        if before.get(path) == file:
            continue
        if file.kind == "d":
            entries.append(TreeEntry(FOLDER, _text(path), file.mode, b""))
        elif file.kind in ("f", "l"):
            paths.append(path)
    for path in before.keys() - after.keys():
        parent = path.rpartition(b"/")[0]
        if not parent or (parent in after and after[parent].kind == "d"):
            entries.append(TreeEntry(WHITEOUT, _text(path), 0, b""))
    return DifferingFiles(entries, sorted(paths))


def restored(entries: Sequence[TreeEntry], before: Mapping[bytes, ListedFile]) -> list[TreeEntry]:
    """Entries that have to be written into a pod that is as `before`; folders that are so already are not."""

    def is_there(entry: TreeEntry) -> bool:
        file = before.get(entry.path.encode("utf-8", "surrogateescape"))
        return entry.kind == FOLDER and file is not None and (file.kind, file.mode) == ("d", entry.mode)

    return [entry for entry in entries if entry.kind != WHITEOUT and not is_there(entry)]


def _text(path: bytes) -> str:
    return path.decode("utf-8", "surrogateescape")
