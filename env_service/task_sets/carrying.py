"""Carrying an agent's work into a fresh computer: files alone, from the folders that count, and nothing that judges.

A computer's files are taken as they differ from its image's. The fresh one begins as the agent's did, and gets those of
the changes since then that are below carried folders; but for files that are guarded, for links that lead away, such as
to where the tests will be, and for bytecode: Python would run that in place of a source that says something else, where
it says so or where both are of the same second and size. What is left out is named, so that a task that needs it is
understood.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

from env_service.runtimes.interface import RuntimeSnapshot
from env_service.runtimes.tree import FILE, FOLDER, LINK, TreeEntry

# A link may lead to programs of the image, which no agent has changed there.
OF_THE_IMAGE = ("usr", "bin", "sbin", "lib", "lib64", "opt", "etc")
_MOST_LINKS = 40
_CACHE = "__pycache__"
_NOISE = ("tmp", "var/tmp", "proc", "dev", "run")


@dataclass(frozen=True, kw_only=True)
class CarriedWork:
    """A fresh computer's files; paths of changes that are kept out by name, and of those outside of all folders."""

    snapshot: RuntimeSnapshot
    kept_out: tuple[str, ...]
    outside: tuple[str, ...]


def carried_work(
    before: RuntimeSnapshot,
    after: RuntimeSnapshot,
    *,
    folders: Sequence[str],
    guarded: Sequence[str],
    allowed: Sequence[str] = (),
) -> CarriedWork:
    """The files of `before`, with the changes in `after` that go over. `folders` are absolute paths."""
    old = {entry.path: entry for entry in map(TreeEntry._make, before.entries)}
    new = {entry.path: entry for entry in map(TreeEntry._make, after.entries)}
    places = [folder.strip("/") for folder in folders]
    changed = [path for path in old.keys() | new.keys() if old.get(path) != new.get(path)]
    found, kept_out, outside = dict(old), set(), set()
    for path in changed:
        place = next(
            (each for each in places if path.startswith(f"{each}/") or _is_file_at(each, path, old, new)), None
        )
        if place is None:
            outside.add(path)
        elif is_bytecode(path, new) or is_guarded(path.removeprefix(f"{place}/"), guarded, allowed):
            kept_out.add(path)
        elif (entry := new.get(path)) is None:
            found.pop(path, None)
        elif entry.kind == LINK and not _stays(path, new, places):
            kept_out.add(path)
        else:
            found[path] = entry
    _drop_bytecode(found, [path for path in changed if found.get(path) != old.get(path)])
    kept_out |= _make_folders(found, old)
    entries = tuple(found[path] for path in sorted(found, key=lambda path: path.split("/")))
    shown = {path for path in outside if not _is_noise(path, new.get(path), places)}
    return CarriedWork(
        snapshot=RuntimeSnapshot(after.image, entries),
        kept_out=_without_folders(kept_out, new),
        outside=_without_folders(shown, new),
    )


def _is_file_at(place: str, path: str, old: Mapping[str, TreeEntry], new: Mapping[str, TreeEntry]) -> bool:
    """True of a place that is one file. Of a folder, what is below is carried, and never the folder itself: as a link,
    removed or made anew, it would hide what is guarded in it.
    """
    entry = new.get(path) or old.get(path)
    return path == place and entry is not None and entry.kind == FILE


def is_bytecode(path: str, paths: Container[str]) -> bool:
    """True of what Python keeps of sources, and of what lies beside one of `paths` as older Pythons kept it."""
    return _CACHE in path.split("/") or (path.endswith((".pyc", ".pyo")) and path[:-1] in paths)


def bytecode_names(source: str) -> str:
    """The beginning of the paths of all that Python, or pytest, keeps of a source; `.pyc` is the end of them."""
    path = PurePosixPath(source)
    return str(path.parent / _CACHE / f"{path.stem}.")


def _drop_bytecode(found: dict[str, TreeEntry], sources: Sequence[str]) -> None:
    """Leave out bytecode, from before the agent came, of sources that are others now."""
    stale = tuple(bytecode_names(path) for path in sources if path.endswith(".py"))
    for path in [path for path in found if stale and path.startswith(stale)]:
        del found[path]


def is_guarded(path: str, guarded: Sequence[str], allowed: Sequence[str] = ()) -> bool:
    """True of a path, from a carried folder on, that stays as it was before the agent came."""
    return _is_named(path, guarded) and not _is_named(path, allowed)


def _is_named(path: str, patterns: Sequence[str]) -> bool:
    parts = path.split("/")
    return any(
        fnmatchcase(path, pattern) if "/" in pattern else any(fnmatchcase(part, pattern) for part in parts)
        for pattern in patterns
    )


def _make_folders(found: dict[str, TreeEntry], old: Mapping[str, TreeEntry]) -> set[str]:
    """See that everything lies in a folder; returns what had to give way to one."""
    gone = set()
    for path in list(found):
        parts = path.split("/")
        for at in range(1, len(parts)):
            parent = "/".join(parts[:at])
            there = found.get(parent)
            if there is None or there.kind != FOLDER:
                if there is not None:
                    gone.add(parent)
                before = old.get(parent)
                is_folder = before is not None and before.kind == FOLDER
                found[parent] = before if before and is_folder else TreeEntry(FOLDER, parent, 0o755, b"")
    return gone


def _stays(path: str, entries: Mapping[str, TreeEntry], places: Sequence[str]) -> bool:
    """True of a link that leads, by whatever other links, to a carried folder or to the image's programs."""
    here: list[str] = []
    waiting, links = path.split("/"), 0
    while waiting:
        part = waiting.pop(0)
        if part in ("", "."):
            continue
        if part == "..":
            here = here[:-1]
            continue
        entry = entries.get("/".join([*here, part]))
        if entry is None or entry.kind != LINK:
            here = [*here, part]
            continue
        links += 1
        if links > _MOST_LINKS:
            return False
        target = entry.content.decode(errors="surrogateescape")
        here = [] if target.startswith("/") else here
        waiting = [*target.split("/"), *waiting]
    end = "/".join(here)
    inside = any(end == place or end.startswith(f"{place}/") for place in places)
    return inside or (bool(here) and here[0] in OF_THE_IMAGE)


def _is_noise(path: str, entry: TreeEntry | None, places: Sequence[str]) -> bool:
    """True of what programs leave anywhere, and of folders on the way to carried ones."""
    if entry is not None and entry.kind == FOLDER and any(f"{place}/".startswith(f"{path}/") for place in places):
        return True
    return any(path == each or path.startswith(f"{each}/") for each in _NOISE)


def _without_folders(paths: set[str], entries: Mapping[str, TreeEntry]) -> tuple[str, ...]:
    """The paths in order; without folders of which something inside is named, and without what Python keeps."""
    named = {path for path in paths if _CACHE not in path.split("/") and ".git" not in path.split("/")}
    parents = {"/".join(path.split("/")[:at]) for path in named for at in range(1, path.count("/") + 1)}
    return tuple(f"/{path}" for path in sorted(named - parents) if path in entries or path not in parents)
