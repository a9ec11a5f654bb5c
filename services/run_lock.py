"""A lock of the kernel's, and a lease for where that cannot be trusted: one living process for a run's folder.

    flock on `run.lock`      gone with the process, however it ends; but some shared volumes keep it to one machine
    `lease-<number>.json`    rewritten every few seconds by its holder; whoever starts on another machine watches it for
                             a while: one that changes is alive, one that does not is of a process that has died

A lease is made with O_EXCL under a number of its own, so that of two who take a dead one over only one succeeds. Who
finds a higher number than his own, or his own lease removed, has lost the folder, and must not write there any more.
"""

import asyncio
import contextlib
import errno
import fcntl
import json
import logging
import os
import re
import secrets
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from services.append_file import make_folder

logger = logging.getLogger(__name__)

LOCK_FILE = "run.lock"
_LEASE = re.compile(r"lease-(\d+)\.json")
_HELD = (errno.EAGAIN, errno.EACCES)
_ONCE_MORE_S = 0.2
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class FolderTaken(RuntimeError):
    """Another process holds the folder; the text says which."""


class FolderLost(RuntimeError):
    """Another process has taken the folder over, since this one was silent for too long."""


@dataclass(frozen=True)
class Holder:
    """Holder of a folder. `place` is the machine's start and the file system; `since` in seconds since 1970."""

    host: str
    place: str
    pid: int
    command: str
    since: float

    @classmethod
    def here(cls, folder: Path) -> Self:
        """This process."""
        boot = _BOOT_ID.read_text(encoding="ascii").strip() if _BOOT_ID.exists() else socket.gethostname()
        return cls(
            host=socket.gethostname(),
            place=f"{boot}/{folder.stat().st_dev}",
            pid=os.getpid(),
            command=" ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
            since=time.time(),
        )

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"process {self.pid} on {self.host} ({self.command}), which runs since {since}"


@dataclass(frozen=True)
class Pace:
    """Interval at which a lease is rewritten, and the silence after which its process counts as dead; in seconds."""

    beat_s: float = 3.0
    silence_s: float = 15.0


DEFAULT_PACE = Pace()


class RunLock:
    """Holds a run's folder until `release`; a context manager. `held` makes one."""

    def __init__(self, claim: "_Claim", pace: Pace) -> None:
        self._claim = claim
        self._pace = pace
        self._mutex = threading.Lock()
        self._ended = threading.Event()
        self._looked_at = time.monotonic()
        self._failing = False
        self._lost: FolderLost | None = None
        self._thread = threading.Thread(target=self._beat_on, name="run_lock", daemon=True)
        self._thread.start()

    @classmethod
    async def held(
        cls, folder: Path, *, pace: Pace = DEFAULT_PACE, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> Self:
        """Takes the folder, which is made if it is missing. Raises FolderTaken.

        Waits where a process of another machine held it last and did not say that it has ended.
        """
        try:
            claim = _Claim.open(folder)
        except FolderTaken:
            await asyncio.sleep(_ONCE_MORE_S)  # it may be about to end, or only have been looked at
            claim = _Claim.open(folder)
        try:
            claim.make(after=await _outwait(claim, pace, sleep))
        except BaseException:
            claim.close()
            raise
        return cls(claim, pace)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()

    def release(self) -> None:
        """Gives the folder back. A folder that holds nothing else is removed."""
        self._ended.set()
        self._thread.join(timeout=1.0)
        with self._mutex:
            self._claim.give_up()

    def move_aside(self, aside: Path) -> None:
        """Renames the folder, and holds a new and empty one of its name. Raises FolderTaken, OSError."""
        with self._mutex:
            former, folder = self._claim, self._claim.folder
            folder.rename(aside)
            former.folder = aside
            try:
                self._claim = _Claim.open(folder)
                self._claim.make(after=0)
            finally:
                former.give_up()

    def check(self) -> None:
        """To be called before a write. Raises FolderLost once the folder is another's.

        Costs nothing if the lease was looked at lately: only a process that stood still can have lost it. It waits for
        no write: the event loop calls it.
        """
        if self._lost is None and time.monotonic() - self._looked_at > self._pace.silence_s / 2:
            with self._said_once():
                self._look()
        if self._lost is not None:
            raise self._lost

    def beat(self) -> None:
        """Rewrites the lease, if it is still this process's."""
        with self._said_once():
            self._look()
            if self._lost is not None:
                return
            with self._mutex:
                if self._ended.is_set():
                    return
                written = self._claim.beat()
            try:
                os.fsync(written)  # which may take seconds, and so not under the mutex
            finally:
                os.close(written)
            self._failing = False

    def _look(self) -> None:
        claim, now = self._claim, time.monotonic()
        taken_by = claim.overtaken_by()
        if taken_by is not None:
            self._lost = FolderLost(
                f"{claim.folder} was taken over by {taken_by}, while this process stood still: it ends without writing "
                "there"
            )
        elif claim.is_removed() and claim is self._claim and not self._ended.is_set():
            self._lost = FolderLost(
                f"{claim.folder} was taken over while this process stood still, by one that has ended since: its lease "
                "was removed, and it ends without writing there"
            )
        self._looked_at = now

    @contextlib.contextmanager
    def _said_once(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self._failing:
                logger.warning("the lease of %s cannot be renewed: %s", self._claim.folder, error)
            self._failing = True

    async def watch(self) -> None:
        """Returns never: raises FolderLost once the folder is another's."""
        while True:
            await asyncio.sleep(self._pace.beat_s)
            if self._lost is not None:
                raise self._lost

    def _beat_on(self) -> None:
        while not self._ended.wait(self._pace.beat_s) and self._lost is None:
            self.beat()


def holder_of(folder: Path) -> Holder | None:
    """Holder of the folder, as far as this machine's kernel knows; changes nothing. It may be another user's."""
    try:
        handle = _opened(folder / LOCK_FILE)
    except OSError:
        return None
    try:
        return None if _flock(handle) is not False else _holder_named(folder)
    finally:
        os.close(handle)


def _opened(path: Path) -> int:
    """To be locked for writers alone, as NFS wants it; where this user may not write there, to be read."""
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def life_in(folder: Path, *, pace: Pace = DEFAULT_PACE) -> Literal["goes on", "died", "ended"]:
    """State of a folder's process, as its files tell on whatever machine; changes nothing. One that has ended, also by
    an error, has removed its lease; one that was killed could not.
    """
    if holder_of(folder) is not None:
        return "goes on"
    newest = max(_leases(folder), default=0)
    if newest == 0:
        return "ended"
    path = _lease_path(folder, newest)
    try:
        silent_s = time.time() - path.stat().st_mtime
    except OSError:
        return "ended"
    elsewhere = _holder(path).place != Holder.here(folder).place
    return "goes on" if elsewhere and silent_s < pace.silence_s else "died"


class _Claim:
    """The lock and the lease of one process on one folder."""

    def __init__(self, folder: Path, handle: int, *, kernel_locks: bool) -> None:
        self.folder = folder
        self.kernel_locks = kernel_locks
        self._handle = handle
        self._number = 0
        self._lease = -1
        self._beats = 0
        self._entry: dict[str, object] = {}

    @classmethod
    def open(cls, folder: Path) -> "_Claim":
        """Raises FolderTaken if the kernel says that another process has it."""
        while True:
            make_folder(folder)
            path = folder / LOCK_FILE
            try:
                handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            except FileNotFoundError:
                continue  # the folder was moved aside since
            locked = _flock(handle)
            if locked is False:
                os.close(handle)
                raise FolderTaken(taken_text(folder, _holder_named(folder)))
            if _is_file(handle, path):
                return cls(folder, handle, kernel_locks=locked is True)
            os.close(handle)

    def make(self, *, after: int) -> None:
        """Makes the lease that follows a dead one. Raises FolderTaken if somebody else did so first."""
        number = after + 1
        entry = {**asdict(Holder.here(self.folder)), "token": secrets.token_hex(8)}
        try:
            lease = os.open(_lease_path(self.folder, number), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileExistsError:
            raise FolderTaken(taken_text(self.folder, _holder_named(self.folder))) from None
        self._number, self._lease, self._entry = number, lease, entry
        written = self.beat()
        os.fsync(written)
        os.close(written)
        taken_by = self.overtaken_by()
        if taken_by is not None:
            raise FolderTaken(taken_text(self.folder, taken_by))
        for former in _leases(self.folder):
            if former < number:
                _lease_path(self.folder, former).unlink(missing_ok=True)

    def beat(self) -> int:
        """Another handle on what was written, to be synced and closed: the lease may be given up meanwhile."""
        self._beats += 1
        data = json.dumps({**self._entry, "beat": self._beats}).encode()
        os.utime(self._lease)  # a sign of life also where nothing can be written
        os.pwrite(self._lease, data, 0)
        os.ftruncate(self._lease, len(data))
        return os.dup(self._lease)

    def overtaken_by(self) -> Holder | None:
        """Holder of a lease with a higher number."""
        higher = [number for number in _leases(self.folder) if number > self._number]
        return _holder(_lease_path(self.folder, max(higher))) if higher else None

    def is_removed(self) -> bool:
        """Tells whether somebody has removed the lease: who took the folder over, and may be gone again."""
        return self._lease >= 0 and os.fstat(self._lease).st_nlink == 0

    def give_up(self) -> None:
        """Removes the lease, and a folder of which nothing else is left."""
        with contextlib.suppress(OSError):
            if self._lease >= 0:
                _lease_path(self.folder, self._number).unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        if self._lease >= 0:
            os.close(self._lease)
            self._lease = -1
        with contextlib.suppress(OSError):
            if [path.name for path in self.folder.iterdir()] == [LOCK_FILE]:
                (self.folder / LOCK_FILE).unlink()
                self.folder.rmdir()
        os.close(self._handle)


async def _outwait(claim: _Claim, pace: Pace, sleep: Callable[[float], Awaitable[None]]) -> int:
    """The number of the newest lease (0: none), once it is known to be of nobody alive. Raises FolderTaken."""
    newest = max(_leases(claim.folder), default=0)
    if newest == 0:
        return newest
    path = _lease_path(claim.folder, newest)
    holder = _holder(path)
    if claim.kernel_locks and holder.place == Holder.here(claim.folder).place:
        return newest  # its lock is gone, so it is dead
    logger.info("%s is locked by %s: checking for %g s whether it is alive", claim.folder, holder, pace.silence_s)
    before = _content(path)
    for _ in range(max(1, round(pace.silence_s / pace.beat_s))):
        await sleep(pace.beat_s)
        now = _content(path)
        if now is None:
            break  # it has ended
        if now != before:
            raise FolderTaken(taken_text(claim.folder, holder))
    return newest


def _flock(handle: int) -> bool | None:
    """True if the lock was free and is ours now; None where there are no such locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in _HELD else None
    return True


def _is_file(handle: int, path: Path) -> bool:
    """True if the path still names the open file: its folder may have been moved aside meanwhile."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _leases(folder: Path) -> list[int]:
    return [int(name[1]) for path in folder.glob("lease-*.json") if (name := _LEASE.fullmatch(path.name))]


def _lease_path(folder: Path, number: int) -> Path:
    return folder / f"lease-{number}.json"


def _content(path: Path) -> tuple[bytes, int] | None:
    """The content of the file, and when it was last changed."""
    try:
        return path.read_bytes(), path.stat().st_mtime_ns
    except FileNotFoundError:
        return None


def _holder_named(folder: Path) -> Holder:
    return _holder(_lease_path(folder, max(_leases(folder), default=0)))


def _holder(path: Path) -> Holder:
    """Author of the lease; somebody unknown if it is being written or is damaged."""
    try:
        entry = json.loads(path.read_bytes())
        return Holder(**{name: entry[name] for name in ("host", "place", "pid", "command", "since")})
    except (OSError, ValueError, KeyError, TypeError):
        return Holder(host="an unknown machine", place="", pid=0, command="not known", since=time.time())


def taken_text(folder: Path, holder: Holder) -> str:
    """The text that a second start is told."""
    return f"the run in {folder} is that of {holder}: stop it first, or give this run another name (run.name)"
