"""Files of a container, by the engine's archives; and those in which it differs from its image.

The engine looks paths up in the container's root, without what is mounted there: /proc, /dev and /dev/shm are empty. It
reads and writes as it likes: whose files may be changed is a matter for commands alone.
"""

import asyncio
import posixpath
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import IO

from env_service.runtimes.archives import OVERHEAD, pack_archive, unpack_archive
from env_service.runtimes.engine_api import Change, EngineApi
from env_service.runtimes.interface import RuntimeRefused
from env_service.runtimes.tree import FOLDER, MAX_ENTRIES, WHITEOUT, TooLarge, TreeEntry

CHANGED, ADDED, REMOVED = 0, 1, 2
OPAQUE = b"y"
_AT_ONCE = 8
# What an engine puts into every container.
_OF_THE_ENGINE = frozenset(("dev", "proc", "sys", ".dockerenv", "etc/hosts", "etc/hostname", "etc/resolv.conf"))

NAMES = frozenset(("etc/passwd", "etc/group"))
"""Files into which Podman writes the name of a user whom the image does not know."""


@dataclass(frozen=True, kw_only=True)
class ContainerFiles:
    """The files of one container. `of_the_engine`: paths that are left out of what differs. Raises EngineError, and
    TooLarge and ArchiveFault of what is read.
    """

    api: EngineApi
    container: str
    user: int
    group: int
    disk_bytes: int
    of_the_engine: Set[str] = frozenset()

    async def write(self, entries: Sequence[TreeEntry]) -> None:
        """Write files and links with the folders that they need, all of them the user's. Raises RuntimeRefused."""
        if sum(len(entry.content) for entry in entries) > self.disk_bytes:
            raise RuntimeRefused(f"No space left: more than {self.disk_bytes} bytes (limits.disk_mib)")
        folders = await self._missing({parent for entry in entries for parent in _parents(entry.path)})
        made = [TreeEntry(FOLDER, path, 0o755, b"") for path in folders]
        await self._unpack([*made, *entries], replaces_folders=False)

    async def lay(self, entries: Sequence[TreeEntry]) -> None:
        """Write folders, which are the user's then."""
        await self._unpack(entries, replaces_folders=False)

    async def read(self, path: str, *, most: int) -> list[TreeEntry]:
        """The file at a path, or the folder with all that is in it, by paths from there on. Raises RuntimeRefused."""
        place = f"/{path.lstrip('/')}"
        told = await self.api.path(self.container, place)
        if told is not None and told.is_link:
            place = told.linkTarget
            told = await self.api.path(self.container, place) if place else None
        if told is None or told.is_link:
            raise RuntimeRefused("No such file or directory")
        entries = await self._read(place, most=most)
        if not entries:
            raise RuntimeRefused("neither a file nor a folder")
        return entries

    async def differing(self) -> list[TreeEntry]:
        """Entries that differ from the image, folders before what is in them."""
        changes = {each.Path.strip("/"): each.Kind for each in await self.api.changes(self.container) if _counts(each)}
        changes = _without(self.of_the_engine, changes)
        if len(changes) > MAX_ENTRIES:
            raise TooLarge(self.disk_bytes)
        found = _Differing(self, changes)
        places = asyncio.Semaphore(_AT_ONCE)

        async def one(path: str, kind: int) -> None:
            async with places:
                await found.add(path, kind)

        try:
            async with asyncio.TaskGroup() as tasks:
                for path, kind in changes.items():
                    if kind != ADDED or changes.get(posixpath.dirname(path)) != ADDED:
                        tasks.create_task(one(path, kind))
        except ExceptionGroup as errors:
            first = errors.exceptions[0]
            raise TooLarge(self.disk_bytes) if isinstance(first, TooLarge) else first from errors
        return sorted(found.entries.values(), key=lambda entry: entry.path.split("/"))

    async def restore(self, entries: Sequence[TreeEntry]) -> None:
        """Write what differed elsewhere into a fresh container from which the removed has been removed."""
        folders = {entry.path: entry for entry in entries if entry.kind == FOLDER}
        there = set(folders) - set(await self._missing(folders))
        kept = []
        for entry in entries:
            if entry.kind == FOLDER and entry.path in there:
                told = await self.api.path(self.container, f"/{entry.path}")
                # One that is as in the image stays its owner's there.
                if told is not None and told.permissions == entry.mode:
                    continue
            if entry.kind != WHITEOUT:
                kept.append(entry)
        await self._unpack(kept, replaces_folders=True)

    async def read_one(self, path: str, *, most: int) -> list[TreeEntry]:
        """As `read`, but of a link itself; nothing if there is nothing."""
        return [] if await self.api.path(self.container, path) is None else await self._read(path, most=most)

    async def _read(self, path: str, *, most: int) -> list[TreeEntry]:
        archive = await self.api.read(self.container, path, most=most, overhead=OVERHEAD)
        return await asyncio.to_thread(_unpacked, archive, most)

    async def _unpack(self, entries: Sequence[TreeEntry], *, replaces_folders: bool) -> None:
        if entries:
            archive = await asyncio.to_thread(pack_archive, entries, user=self.user, group=self.group)
            with archive:
                await self.api.write(self.container, archive, replaces_folders=replaces_folders)

    async def _missing(self, folders: Iterable[str]) -> list[str]:
        """Folders of these that are missing, in order; what is below such a one is not asked for."""
        missing: set[str] = set()
        for path in sorted(folders, key=lambda path: path.split("/")):
            if (
                posixpath.dirname(path) in missing
                or not _is_utf8(path)
                or await self.api.path(self.container, f"/{path}") is None
            ):
                missing.add(path)
        return sorted(missing, key=lambda path: path.split("/"))


class _Differing:
    """Collects entries as long as there is room for them."""

    def __init__(self, files: ContainerFiles, changes: Mapping[str, int]) -> None:
        self._files = files
        self._left = files.disk_bytes
        self._folders = {parent for path in changes for parent in _parents(path)}
        self.entries: dict[str, TreeEntry] = {}

    async def add(self, path: str, kind: int) -> None:
        files, place = self._files, f"/{path}"
        if kind == ADDED:
            for entry in await files.read_one(place, most=self._left):
                self._keep(entry._replace(path=posixpath.join(path, entry.path) if entry.path else path))
            return
        told = await files.api.path(files.container, place)
        if kind == REMOVED:
            if told is None:
                self._keep(TreeEntry(WHITEOUT, path, 0, b""))
            elif told.is_folder:  # made anew, and hides the one of the image
                self._keep(TreeEntry(FOLDER, path, told.permissions, OPAQUE))
        elif told is not None and told.is_folder:
            self._keep(TreeEntry(FOLDER, path, told.permissions, b""))
        elif told is not None:
            for entry in await files.read_one(place, most=self._left):
                self._keep(entry._replace(path=path))

    def _keep(self, entry: TreeEntry) -> None:
        self._left -= len(entry.content)
        self.entries[entry.path] = entry
        if self._left < 0 or len(self.entries) > MAX_ENTRIES:
            raise TooLarge(self._files.disk_bytes)


def removed(entries: Sequence[TreeEntry]) -> list[str]:
    """Absolute paths that a fresh container must not have, before entries are restored."""
    return [
        f"/{entry.path}"
        for entry in entries
        if entry.kind == WHITEOUT or (entry.kind == FOLDER and entry.content == OPAQUE)
    ]


def _unpacked(archive: IO[bytes], most: int) -> list[TreeEntry]:
    with archive:
        return unpack_archive(archive, most=most)


def _parents(path: str) -> list[str]:
    parts = path.strip("/").split("/")
    return ["/".join(parts[:at]) for at in range(1, len(parts))]


def _without(paths: Set[str], changes: Mapping[str, int]) -> dict[str, int]:
    """Changes but for those of some paths, and of folders in which nothing else has changed."""
    left = {path: kind for path, kind in changes.items() if path not in paths}
    emptied = {parent for path in changes.keys() & paths for parent in _parents(path)}
    emptied -= {parent for path in left.keys() - emptied for parent in _parents(path)}
    return {path: kind for path, kind in left.items() if kind != CHANGED or path not in emptied}


def _counts(change: Change) -> bool:
    path = change.Path.strip("/")
    return bool(path) and path not in _OF_THE_ENGINE and path.split("/")[0] not in ("dev", "proc", "sys")


def checked_path(path: str) -> str:
    """Raises RuntimeRefused for a path that no engine can be asked for."""
    if not _is_utf8(path) or "\0" in path:
        raise RuntimeRefused("a path in UTF-8 without null characters was expected")
    return path


def _is_utf8(path: str) -> bool:
    """False of names that only archives can tell, in what the engine calls added."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True
