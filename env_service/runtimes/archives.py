"""Trees of files as tar archives, for runtimes to which files go by these.

What comes out was made by whoever is inside, or of what is theirs: sizes are looked at before content is read, paths do
not leave the tree, and what is neither file, folder nor link is left out.
"""

import io
import tarfile
import tempfile
import time
from collections.abc import Iterable
from typing import IO

from env_service.runtimes.tree import FILE, FOLDER, LINK, MAX_ENTRIES, TooLarge, TreeEntry

OVERHEAD = MAX_ENTRIES * 1024
"""Bytes of an archive beside the files' own."""

_IN_MEMORY = 8 << 20


class ArchiveFault(ValueError):
    """An archive that is none, or has what no tree has."""


def pack_archive(entries: Iterable[TreeEntry], *, user: int, group: int) -> IO[bytes]:
    """An archive of entries, all of them of one user; to be closed."""
    kept = tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY)  # noqa: SIM115  it is the caller's
    now = int(time.time())
    with tarfile.open(fileobj=kept, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for entry in entries:
            found = tarfile.TarInfo(entry.path.strip("/"))
            found.mode, found.uid, found.gid, found.mtime = entry.mode & 0o1777, user, group, now
            if entry.kind == FOLDER:
                found.type = tarfile.DIRTYPE
                archive.addfile(found)
            elif entry.kind == LINK:
                found.type = tarfile.SYMTYPE
                found.linkname = entry.content.decode("utf-8", "surrogateescape")
                archive.addfile(found)
            else:
                found.size = len(entry.content)
                archive.addfile(found, io.BytesIO(entry.content))
    kept.seek(0)
    return kept


def unpack_archive(archive: IO[bytes], *, most: int) -> list[TreeEntry]:
    """Entries of an archive of one file or folder, by their paths below that, which comes first and has the path "".

    Raises TooLarge and ArchiveFault.
    """
    entries: dict[str, TreeEntry] = {}
    left, top = most, ""
    try:
        with tarfile.open(fileobj=archive, mode="r|") as opened:
            for member in opened:
                name = _name_of(member.name)
                if not top and not entries:
                    top = name
                path = "" if name == top else _below(top, name)
                if member.isfile() and member.size > left:  # of a sparse file more than the archive holds
                    raise TooLarge(most)
                entry = _entry(opened, member, path, others=entries, top=top)
                if entry is None:
                    continue
                left -= len(entry.content)
                entries[path] = entry
                if left < 0 or len(entries) > MAX_ENTRIES:
                    raise TooLarge(most)
    except (tarfile.TarError, EOFError, UnicodeError, RecursionError) as error:
        raise ArchiveFault(str(error) or type(error).__name__) from error
    return list(entries.values())


def _name_of(name: str) -> str:
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise ArchiveFault(f"a path with '..': {name!r}")
    return "/".join(parts)


def _below(top: str, name: str) -> str:
    if not top:
        return name
    if not name.startswith(f"{top}/"):
        raise ArchiveFault(f"{name!r} is not below {top!r}")
    return name.removeprefix(f"{top}/")


def _entry(
    archive: tarfile.TarFile, member: tarfile.TarInfo, path: str, *, others: dict[str, TreeEntry], top: str
) -> TreeEntry | None:
    mode = member.mode & 0o7777
    if member.isdir():
        return TreeEntry(FOLDER, path, mode, b"")
    if member.issym():
        return TreeEntry(LINK, path, 0o777, member.linkname.encode("utf-8", "surrogateescape"))
    if member.islnk():
        other = others.get(_below(top, _name_of(member.linkname)))
        return None if other is None else TreeEntry(FILE, path, mode, other.content)
    if not member.isfile():
        return None
    file = archive.extractfile(member)
    return TreeEntry(FILE, path, mode, b"" if file is None else file.read())
