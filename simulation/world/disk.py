"""Disks with faults, laid over real files in a folder in memory: full, failing, and losing what was not synced.

Only what goes through `os` can fail here: the journal, the lines of records, syncs, and files opened to be written.
What a process that is dead still tries to do raises Killed. What was written since the last sync of a file is known,
and what was renamed since the last sync of a folder, so that a host can lose a part of it. What a sync could not bring
to the disk is given up, as kernels do it: a later sync that succeeds says nothing of it, unless it was written again.

A process may be struck at an operation: it dies, or its host goes down, between one operation of the disk and the next.
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
_TORN = 0.5
"""Share of the writes that a disk refuses of which it takes a part, and of the cuts that a full one refuses."""
_REAL: dict[str, Callable[..., Any]] = {
    name: getattr(os, name)
    for name in (
        "open",
        "dup",
        "close",
        "pwrite",
        "pwritev",
        "fsync",
        "fdatasync",
        "ftruncate",
        "truncate",
        "rename",
        "replace",
        "unlink",
        "rmdir",
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
class DiskStrike:
    """Something that comes at an operation of the disk, which so many others go before: of the processes of a `place`,
    if one is given. They are counted `since` the first one of that kind, if one is given, or since a name is given that
    begins so. One that comes `gently` leaves the process to do what it was about to.
    """

    act: Callable[[], object]
    count: int
    since: str = ""
    gently: bool = False
    place: str = ""

    def comes_now(self, process: Process, kind: str, name: str) -> bool:
        """True at its operation; counts the others."""
        if self.place and process.name.partition("#")[0] != self.place:
            return False
        if self.since and kind != self.since and not name.startswith(self.since):
            return False
        self.since = ""
        self.count -= 1
        return self.count < 0


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
    strikes: list[DiskStrike] = field(default_factory=list)
    doomed: Process | None = None
    """It was struck, and is dead before it does anything more on this disk."""
    given_up: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By file: the bytes that a sync could not bring to the disk, and that were not written again."""
    _torn: set[int] = field(default_factory=set)

    def operation(self, kind: str = "", name: str = "") -> None:
        """A process of this host is about to do something on its disk, such as to give a name. Raises Killed where it
        is struck before it.
        """
        current = self.world.current
        if not self.strikes or not isinstance(current, Process) or current.host != self.host or not current.alive:
            return
        for strike in [strike for strike in self.strikes if strike.comes_now(current, kind, name)]:
            self.strikes.remove(strike)
            if strike.gently:
                strike.act()
            else:
                self._hit(current, strike.act)

    def _hit(self, process: Process, act: Callable[[], object]) -> None:
        """An event loop dies in the middle of its callback. A thread gives the turn back first: nobody ends himself."""
        self.doomed = process
        thread = current_thread()
        if thread is not None:
            self.world.at(self.world.now, act)
            thread.sleep(0.0)
        else:
            act()
        raise ProcessKilled

    def check_alive(self) -> None:
        """Raises Killed where a dead process goes on."""
        thread = current_thread()
        if thread is not None:
            thread.check()
        current = self.world.current
        if self.world.over or (isinstance(current, Process) and (current is self.doomed or not current.alive)):
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
        error = self.refusal()
        if error is not None:
            raise error

    def refusal(self) -> OSError | None:
        """Error that a write is answered with now; None if the disk takes it."""
        current = self.world.current
        if not isinstance(current, Process) or current.host != self.host:
            return None
        if self.full:
            return OSError(errno.ENOSPC, "No space left on device")
        return OSError(errno.EIO, "Input/output error") if self.failing else None

    def part_of(self, handle: int, size: int) -> int:
        """Bytes that it takes of a write of so many. Raises OSError where it takes none: a disk without room may take
        a part first, and one that fails may have written one.
        """
        try:
            self.check_write()
        except OSError:
            if size < 2 or handle in self._torn or self.world.random.random() >= _TORN:
                self._torn.discard(handle)
                raise
            self._torn.add(handle)
            return 1 + int(self.world.random.random() * (size - 1))
        return size

    def wrote(self, handle: int, start: int, end: int) -> None:
        """These bytes of a file are the kernel's again, which may bring them to the disk."""
        inode = os.fstat(handle).st_ino
        first, last = self.given_up.get(inode, (end, end))
        if start <= first < end < last:
            self.given_up[inode] = end, last
        elif start <= first < end:
            del self.given_up[inode]

    def gave_up(self, inode: int, size: int) -> None:
        """A sync failed."""
        first = min(self.synced.get(inode, 0), self.given_up.get(inode, (size, size))[0])
        if first < size:
            self.given_up[inode] = first, size

    def begins_anew(self, inode: int, length: int = 0) -> None:
        """A file was cut there."""
        if length <= self.given_up.get(inode, (length, 0))[0]:
            self.given_up.pop(inode, None)
        self.synced[inode] = min(length, self.synced.get(inode, 0))

    def lose_unsynced(self, folder: Path) -> list[str]:
        """The host went down: of each file's unsynced end, a part is gone, and so are the last of the names that were
        given and not synced. Names what was lost.
        """
        lost = self._lose_names()
        self.given_up.clear()
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
        """Of each folder the last ones: what was renamed in one may be on the disk before what was in another."""
        lost: list[Rename] = []
        for folder in dict.fromkeys(rename.target.parent for rename in self.renames):
            there = [rename for rename in self.renames if rename.target.parent == folder]
            gone = there[len(there) - int(self.world.random.random() * (len(there) + 1)) :]
            for rename in reversed(gone):
                rename.undo()
            lost += gone
        self.renames.clear()
        return [f"the name {rename.target.name}" for rename in lost]

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


def _dup(handle: int) -> int:
    disk = disk_of()
    copy: int = _REAL["dup"](handle)
    if disk is not None and (owner := _owner(disk)) is not None:
        disk.owners[copy] = owner
    return copy


def _close(handle: int) -> None:
    disk = disk_of()
    if disk is not None:
        if handle not in disk.owners and (current_thread() is not None or disk.world.current is not None):
            disk.check_alive()  # the end of a process has closed its handles, and somebody else may have the number
        disk.owners.pop(handle, None)
    _REAL["close"](handle)


def simulated_write(name: str) -> Callable[[int, Any, int], int]:
    """Stands for os.pwrite or os.pwritev, by name."""

    def write(handle: int, data: Any, offset: int) -> int:
        disk = disk_of()
        if disk is None:
            return int(_REAL[name](handle, data, offset))
        disk.operation()
        size = len(data) if name == "pwrite" else sum(map(len, data))
        taken = disk.part_of(handle, size)
        if taken < size:
            whole = bytes(data) if name == "pwrite" else b"".join(map(bytes, data))
            written: int = _REAL["pwrite"](handle, whole[:taken], offset)
        else:
            written = _REAL[name](handle, data, offset)
        if disk.given_up:
            disk.wrote(handle, offset, offset + written)
        return written

    return write


def _ftruncate(handle: int, length: int) -> None:
    disk = disk_of()
    if disk is not None:
        disk.operation()
        disk.check_alive()
        refusal = disk.refusal()
        if refusal is not None and (disk.failing or disk.world.random.random() < _TORN):
            raise refusal
        disk.begins_anew(os.fstat(handle).st_ino, length)
    _REAL["ftruncate"](handle, length)


def simulated_sync(name: str) -> Callable[[Any], None]:
    """Stands for os.fsync or os.fdatasync, by name."""

    def sync(handle: Any) -> None:
        disk = disk_of()
        if disk is None:
            _REAL[name](handle)
            return
        disk.operation("sync")
        number = handle if isinstance(handle, int) else handle.fileno()
        found, renames = os.fstat(number), list(disk.renames)
        try:
            disk.check_write()
        except OSError:
            disk.gave_up(found.st_ino, found.st_size)
            raise
        disk.take_time()
        disk.synced[found.st_ino] = disk.given_up.get(found.st_ino, (found.st_size, 0))[0]  # nor what came meanwhile
        if S_ISDIR(found.st_mode):
            disk.names_synced(Path(f"/proc/self/fd/{number}").readlink(), among=renames)

    return sync


def _rename(name: str) -> Callable[..., None]:
    def rename(source: Any, target: Any, **kwargs: Any) -> None:
        disk = disk_of()
        if disk is not None:
            disk.operation("rename", Path(target).name)
            disk.check_alive()
            disk.take_time_to_name()
            disk.renamed(Path(source), Path(target))
        _REAL[name](source, target, **kwargs)

    return rename


def _removal(name: str) -> Callable[..., None]:
    def remove(path: Any, **kwargs: Any) -> None:
        disk = disk_of()
        if disk is not None:
            disk.operation()
            disk.check_alive()
        _REAL[name](path, **kwargs)

    return remove


def _path_open(self: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
    disk = disk_of()
    if disk is not None and any(letter in mode for letter in "wxa+"):
        disk.operation()
        disk.check_write()
        if "w" in mode and self.exists():
            disk.begins_anew(self.stat().st_ino)
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
        "open": _open, "dup": _dup, "close": _close, "ftruncate": _ftruncate,
        "pwrite": simulated_write("pwrite"), "pwritev": simulated_write("pwritev"),
        "fsync": simulated_sync("fsync"), "fdatasync": simulated_sync("fdatasync"), "rename": _rename("rename"),
        "replace": _rename("replace"), "unlink": _removal("unlink"), "rmdir": _removal("rmdir"),
    }.items():  # fmt: skip
        setattr(os, name, replacement)
    pathlib.Path.open = _path_open  # type: ignore[method-assign]
    shutil.disk_usage = _usage
    fcntl.flock = _flock
    fcntl.lockf = lambda handle, operation, *_: _flock(handle, operation)
