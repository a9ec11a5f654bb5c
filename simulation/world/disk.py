"""Disks with faults, laid over real files in a folder in memory: full, failing, and losing what was not synced.

Only what goes through `os` can fail here: the journal, the lines of records, syncs, and files opened to be written.
What a process that is dead still tries to do raises Killed. What was written since the last sync of a file is known,
and what was renamed since the last sync of a folder, so that a host can lose a part of it.
"""

import errno
import fcntl
import os
import pathlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from stat import S_ISDIR
from typing import Any

from simulation.world.clock import ProcessKilled, World
from simulation.world.process import Process
from simulation.world.threads import current_thread

_RARELY = 0.03
_REAL: dict[str, Callable[..., Any]] = {
    name: getattr(os, name)
    for name in (
        "open",
        "close",
        "pwrite",
        "pwritev",
        "fsync",
        "fdatasync",
        "ftruncate",
        "truncate",
        "rename",
        "replace",
    )
}
_REAL_PATH_OPEN = pathlib.Path.open
_REAL_USAGE = shutil.disk_usage
_REAL_FLOCK = fcntl.flock


@dataclass(frozen=True)
class Rename:
    """A name that was given and is not on the disk yet; `former` is what had it before, if anything did."""

    source: Path
    target: Path
    former: Path | None

    def undo(self) -> None:
        """Both names are as they were."""
        if self.target.exists() and not self.source.exists():
            _REAL["rename"](self.target, self.source)
            if self.former is not None:
                _REAL["rename"](self.former, self.target)


@dataclass
class Disk:
    """The state of the disk of `host`, which the run's folder is on. `root` is the folder of the whole simulation."""

    root: Path
    world: World
    host: str = "learner"
    full: bool = False
    failing: bool = False
    synced: dict[int, int] = field(default_factory=dict)
    owners: dict[int, Process] = field(default_factory=dict)
    locks: dict[tuple[int, int, str], Process] = field(default_factory=dict)
    apart: bool = False
    """Locks are those of each host, as on some shared volumes."""
    renames: list[Rename] = field(default_factory=list)
    writes: int = 0
    sync_s: float = 0.0
    """Mean seconds of a sync; now and then ten times as long."""
    name_s: float = 0.0
    """Mean seconds until a thread gives a name, in which its process may die."""
    expecting: list[tuple[str, Callable[[], object]]] = field(default_factory=list)
    """Prefixes of names, with calls that are made once, when a name that begins so is on the disk."""
    syncing: list[Callable[[], object]] = field(default_factory=list)
    """Calls that are made once, when the next sync begins."""

    def check_alive(self) -> None:
        """Raises Killed where a dead process goes on."""
        thread = current_thread()
        if thread is not None:
            thread.check()
        if self.world.over:
            raise ProcessKilled

    def take_time(self) -> None:
        """A sync of this disk is under way: in a thread others go on meanwhile, an event loop stands still."""
        current, random = self.world.current, self.world.random
        if not isinstance(current, Process) or current.host != self.host:
            return
        while self.syncing:
            self.syncing.pop()()
        if not self.sync_s:
            return
        seconds = random.expovariate(1 / self.sync_s) * (10.0 if random.random() < _RARELY else 1.0)
        thread = current_thread()
        if thread is not None:
            thread.sleep(seconds)
        else:
            current.block_until(self.world.now + seconds)

    def take_time_to_name(self) -> None:
        """A name is about to be given."""
        thread, current = current_thread(), self.world.current
        if self.name_s and thread is not None and isinstance(current, Process) and current.host == self.host:
            thread.sleep(self.world.random.expovariate(1 / self.name_s))

    def check_write(self) -> None:
        """Raises OSError for a write that this disk does not take."""
        self.check_alive()
        self.writes += 1
        current = self.world.current
        if not isinstance(current, Process) or current.host != self.host:
            return
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        if self.failing:
            raise OSError(errno.EIO, "Input/output error")

    def lose_unsynced(self, folder: Path) -> list[str]:
        """The host went down: of each file's unsynced end, a part is gone, and so are the last of the names that were
        given and not synced. Names what was lost.
        """
        lost = self._lose_names()
        for path in sorted(folder.rglob("*")):
            if not path.is_file():
                continue
            stat = path.stat()
            safe = min(self.synced.get(stat.st_ino, 0), stat.st_size)
            if safe < stat.st_size:
                left = safe + int(self.world.random.random() * (stat.st_size - safe))
                _REAL["truncate"](path, left)
                lost.append(f"{path.relative_to(folder)} {stat.st_size - left} bytes")
        return lost

    def _lose_names(self) -> list[str]:
        count = int(self.world.random.random() * (len(self.renames) + 1)) if self.renames else 0
        gone = self.renames[len(self.renames) - count :]
        for rename in reversed(gone):
            rename.undo()
        self.renames.clear()
        return [f"the name {rename.target.name}" for rename in gone]

    def renamed(self, source: Path, target: Path) -> None:
        """To be called before it is done."""
        current = self.world.current
        if isinstance(current, Process) and current.host == self.host and source.parent == target.parent:
            former = None
            if target.is_file():
                former = self.root / "tmp" / f"former-{self.world.serial()}"
                os.link(target, former)
            self.renames.append(Rename(source, target, former))

    def names_synced(self, folder: Path, *, among: Sequence[Rename]) -> None:
        """Of these renames, the names in a folder are on the disk."""
        done = {id(rename): rename for rename in among if rename.target.parent == folder}
        self.renames = [rename for rename in self.renames if id(rename) not in done]
        for rename in done.values():
            due = [each for each in self.expecting if rename.target.name.startswith(each[0])]
            self.expecting = [each for each in self.expecting if each not in due]
            for _, tell in due:
                tell()

    def release(self, process: Process) -> None:
        """Closes what a dead process held open."""
        for handle in [handle for handle, owner in self.owners.items() if owner is process]:
            del self.owners[handle]
            _REAL["close"](handle)
        for key in [key for key, owner in self.locks.items() if owner is process]:
            del self.locks[key]


def disk_of() -> Disk | None:
    """The disk of the world that runs, if one does."""
    world = World.active
    return world.part(Disk) if world is not None and world.has(Disk) else None


def _owner(disk: Disk) -> Process | None:
    current = disk.world.current
    return current if isinstance(current, Process) else None


def _open(path: Any, flags: int, mode: int = 0o777, **kwargs: Any) -> int:
    disk = disk_of()
    handle: int = _REAL["open"](path, flags, mode, **kwargs)
    if disk is not None and (owner := _owner(disk)) is not None:
        disk.owners[handle] = owner
    return handle


def _close(handle: int) -> None:
    disk = disk_of()
    if disk is not None:
        if handle not in disk.owners and current_thread() is not None:
            disk.check_alive()
        disk.owners.pop(handle, None)
    _REAL["close"](handle)


def _pwrite(handle: int, data: Any, offset: int) -> int:
    disk = disk_of()
    if disk is not None:
        disk.check_write()
    written: int = _REAL["pwrite"](handle, data, offset)
    return written


def _pwritev(handle: int, buffers: Any, offset: int) -> int:
    disk = disk_of()
    if disk is not None:
        disk.check_write()
    written: int = _REAL["pwritev"](handle, buffers, offset)
    return written


def _ftruncate(handle: int, length: int) -> None:
    disk = disk_of()
    if disk is not None:
        disk.check_alive()
    _REAL["ftruncate"](handle, length)


def simulated_sync(name: str) -> Callable[[Any], None]:
    """Stands for os.fsync or os.fdatasync, by name."""

    def sync(handle: Any) -> None:
        disk = disk_of()
        if disk is None:
            _REAL[name](handle)
            return
        disk.check_write()
        number = handle if isinstance(handle, int) else handle.fileno()
        found, renames = os.fstat(number), list(disk.renames)
        disk.take_time()
        disk.synced[found.st_ino] = found.st_size  # what was appended meanwhile is not
        if S_ISDIR(found.st_mode):
            disk.names_synced(Path(f"/proc/self/fd/{number}").readlink(), among=renames)

    return sync


def _rename(name: str) -> Callable[..., None]:
    def rename(source: Any, target: Any, **kwargs: Any) -> None:
        disk = disk_of()
        if disk is not None:
            disk.take_time_to_name()
            disk.renamed(Path(source), Path(target))
        _REAL[name](source, target, **kwargs)

    return rename


def _path_open(self: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
    disk = disk_of()
    if disk is not None and any(letter in mode for letter in "wxa+"):
        disk.check_write()
    return _REAL_PATH_OPEN(self, mode, *args, **kwargs)


def _usage(path: Any) -> Any:
    disk = disk_of()
    usage = _REAL_USAGE(path)
    return usage if disk is None or not disk.full else usage._replace(free=0)


def _flock(handle: Any, operation: int) -> None:
    """flock by process: descriptors of one real process would not keep each other out."""
    disk = disk_of()
    if disk is None:
        _REAL_FLOCK(handle, operation)
        return
    stat = os.fstat(handle if isinstance(handle, int) else handle.fileno())
    owner = _owner(disk)
    key = (stat.st_dev, stat.st_ino, owner.host if disk.apart and owner is not None else "")
    holder = disk.locks.get(key)
    if operation & fcntl.LOCK_UN:
        if holder is owner:
            disk.locks.pop(key, None)
    elif holder is not None and holder is not owner and holder.alive:
        raise BlockingIOError(errno.EWOULDBLOCK, "Resource temporarily unavailable")
    elif owner is not None:
        disk.locks[key] = owner


def install() -> None:
    """Puts the faults in front of `os`."""
    for name, replacement in {
        "open": _open, "close": _close, "pwrite": _pwrite, "pwritev": _pwritev, "ftruncate": _ftruncate,
        "fsync": simulated_sync("fsync"), "fdatasync": simulated_sync("fdatasync"), "rename": _rename("rename"),
        "replace": _rename("replace"),
    }.items():  # fmt: skip
        setattr(os, name, replacement)
    pathlib.Path.open = _path_open  # type: ignore[method-assign]
    shutil.disk_usage = _usage
    fcntl.flock = _flock
    fcntl.lockf = lambda handle, operation, *_: _flock(handle, operation)
