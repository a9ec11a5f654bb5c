"""The lock of a run's folder: between processes of one machine, and between machines by the lease alone."""

import asyncio
import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest

from services.run_lock import FolderLost, FolderTaken, Pace, RunLock, holder_of, life_in

RARE = Pace(beat_s=1000.0, silence_s=5000.0)
"""No beat comes by itself."""

HOLD = """
import asyncio, sys
from pathlib import Path
from services.run_lock import RunLock

async def hold() -> None:
    with await RunLock.held(Path(sys.argv[1])):
        print("held", flush=True)
        sys.stdin.read()

asyncio.run(hold())
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


def lease_of_another_machine(folder: Path, *, number: int = 4) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"lease-{number}.json"
    holder = {"host": "other", "place": "elsewhere/1", "pid": 17, "command": "learner --config a.toml", "since": 1e9}
    path.write_text(json.dumps({**holder, "token": "t", "beat": 1}))
    return path


def names(folder: Path, pattern: str = "*") -> list[str]:
    return sorted(path.name for path in folder.glob(pattern))


def counting(naps: list[float], then: Callable[[], None] = lambda: None) -> Callable[[float], Awaitable[None]]:
    async def sleep(seconds: float) -> None:
        naps.append(seconds)
        then()

    return sleep


async def test_one_process_has_the_folder_and_another_is_told_which(folder: Path) -> None:
    with await RunLock.held(folder, pace=RARE):
        with pytest.raises(FolderTaken, match=rf"{folder} is that of process {os.getpid()} on .*: stop it first"):
            await RunLock.held(folder, pace=RARE)
        holder = holder_of(folder)
        assert holder is not None
        assert holder.pid == os.getpid()
    assert holder_of(folder) is None
    assert names(folder.parent) == [], "nothing of it stays in a folder that was empty"


def another_process(folder: Path) -> "subprocess.Popen[str]":
    """It takes the folder and keeps it."""
    words = [sys.executable, "-c", HOLD, str(folder)]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


async def test_a_killed_process_has_the_folder_no_more_and_nobody_waits(folder: Path) -> None:
    with another_process(folder) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "held\n"
            child.send_signal(signal.SIGSTOP)  # it stands still, and lives
            with pytest.raises(FolderTaken, match=f"process {child.pid} "):
                await RunLock.held(folder, pace=RARE)
        finally:
            child.kill()
    naps: list[float] = []
    with await RunLock.held(folder, pace=RARE, sleep=counting(naps)) as lock:
        lock.check()
        assert names(folder, "lease-*") == ["lease-2.json"]
    assert naps == []


async def test_a_lease_of_another_machine_that_is_renewed_keeps_the_folder(folder: Path) -> None:
    path = lease_of_another_machine(folder)
    naps: list[float] = []

    def renew() -> None:
        if len(naps) == 3:
            path.write_text(path.read_text().replace('"beat": 1', '"beat": 2'))

    with pytest.raises(FolderTaken, match=r"process 17 on other \(learner --config a.toml\)"):
        await RunLock.held(folder, sleep=counting(naps, renew))
    assert (naps, names(folder)) == ([3.0] * 3, ["lease-4.json", "run.lock"])


async def test_a_lease_of_another_machine_that_stands_still_is_taken_over(folder: Path) -> None:
    lease_of_another_machine(folder)
    naps: list[float] = []
    with await RunLock.held(folder, sleep=counting(naps)):
        assert names(folder, "lease-*") == ["lease-5.json"]
    assert naps == [3.0] * 5


async def test_a_lease_of_another_machine_that_is_given_back_is_not_outwaited(folder: Path) -> None:
    path = lease_of_another_machine(folder)
    naps: list[float] = []
    with await RunLock.held(folder, sleep=counting(naps, path.unlink)):
        pass
    assert len(naps) == 1


def _too_soon(folder: Path) -> None:
    lease_of_another_machine(folder, number=5)


async def test_of_two_machines_that_take_over_a_dead_lease_one_succeeds(folder: Path) -> None:
    lease_of_another_machine(folder)
    with pytest.raises(FolderTaken):
        await RunLock.held(folder, sleep=counting([], partial(_too_soon, folder)))
    assert names(folder, "lease-*") == ["lease-4.json", "lease-5.json"]


async def test_who_was_taken_over_while_standing_still_writes_no_more(folder: Path) -> None:
    (folder / "journal").mkdir(parents=True)
    with await RunLock.held(folder, pace=Pace(beat_s=1000.0, silence_s=0.0)) as lock:
        lock.check()
        lease_of_another_machine(folder)
        with pytest.raises(FolderLost, match="was taken over by process 17 on other"):
            lock.check()
        with pytest.raises(FolderLost):
            lock.check()
    assert names(folder, "lease-*") == ["lease-4.json"], "the other's lease stays"


async def test_who_was_taken_over_by_one_that_has_ended_since_writes_no_more(folder: Path) -> None:
    """The other one may have trained there, and has taken its lease with it."""
    (folder / "journal").mkdir(parents=True)
    with await RunLock.held(folder, pace=Pace(beat_s=1000.0, silence_s=0.0)) as lock:
        lock.check()
        successor = lease_of_another_machine(folder)
        (folder / "lease-1.json").unlink()
        successor.unlink()
        with pytest.raises(FolderLost, match="its lease was removed"):
            lock.check()


async def test_a_loop_ends_who_was_taken_over(folder: Path) -> None:
    with await RunLock.held(folder, pace=Pace(beat_s=0.001, silence_s=1000.0)) as lock:
        lease_of_another_machine(folder)
        with pytest.raises(FolderLost):
            await lock.watch()


async def test_a_disk_that_takes_its_time_with_a_lease_keeps_nobody_waiting(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, free = threading.Event(), threading.Event()

    def fsync(handle: int) -> None:
        begun.set()
        free.wait(30.0)

    lock = await RunLock.held(folder, pace=Pace(beat_s=1000.0, silence_s=0.0))
    monkeypatch.setattr("services.run_lock.os.fsync", fsync)
    beating = threading.Thread(target=lock.beat, daemon=True)
    beating.start()
    assert begun.wait(10.0)
    try:
        async with asyncio.timeout(60):
            await asyncio.to_thread(lock.check)
            await asyncio.to_thread(lock.release)
    finally:
        free.set()
        beating.join(10.0)


async def test_without_locks_of_the_kernel_the_lease_alone_decides(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(handle: int, operation: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("services.run_lock.fcntl.flock", unsupported)
    with await RunLock.held(folder, pace=RARE) as first:
        naps: list[float] = []
        with pytest.raises(FolderTaken, match=f"process {os.getpid()} "):
            await RunLock.held(folder, sleep=counting(naps, first.beat))
        assert len(naps) == 1


async def test_a_folder_moved_aside_is_free_and_the_new_one_is_held(folder: Path) -> None:
    aside = folder.with_name("run.former")
    with await RunLock.held(folder, pace=RARE) as lock:
        (folder / "note").write_text("old")
        lock.move_aside(aside)
        assert holder_of(aside) is None
        assert holder_of(folder) is not None
        assert names(aside) == ["note", "run.lock"]


async def test_a_lease_shows_life_on_a_full_disk_and_says_so_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(handle: int, data: bytes, at: int) -> int:
        raise OSError(28, "No space left on device")

    with await RunLock.held(folder, pace=RARE) as lock:
        path = folder / "lease-1.json"
        os.utime(path, ns=(0, 0))
        monkeypatch.setattr("services.run_lock.os.pwrite", full)
        lock.beat()
        lock.beat()
        lock.check()
        assert os.stat(path).st_mtime_ns > 0
    assert caplog.text.count("cannot be renewed: [Errno 28] No space left on device") == 1


async def test_somebody_who_only_looks_does_not_keep_a_learner_from_its_folder(folder: Path) -> None:
    with await RunLock.held(folder, pace=RARE):
        (folder / "note").write_text("a run")
    looking = os.open(folder / "run.lock", os.O_RDWR)
    fcntl.flock(looking, fcntl.LOCK_EX)
    asyncio.get_running_loop().call_soon(os.close, looking)
    with await RunLock.held(folder, pace=RARE):
        pass


async def test_a_folder_tells_if_its_process_goes_on_or_has_died_or_ended(folder: Path) -> None:
    with another_process(folder) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "held\n"
            (folder / "note").write_text("a run")
            alive = life_in(folder)
        finally:
            child.kill()
    killed = life_in(folder)
    with await RunLock.held(folder, pace=RARE):
        pass

    assert (alive, killed, life_in(folder)) == ("goes on", "died", "ended")


def test_a_lease_of_another_machine_is_of_a_process_that_goes_on_while_it_is_renewed(folder: Path) -> None:
    path = lease_of_another_machine(folder)
    renewed = life_in(folder, pace=RARE)
    os.utime(path, (0, 0))

    assert (renewed, life_in(folder, pace=RARE)) == ("goes on", "died")


async def test_the_holder_of_a_folder_in_which_this_user_may_not_write_is_seen_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really = os.open

    def reads_alone(path: Path, flags: int) -> int:
        if flags & os.O_RDWR:
            raise PermissionError(errno.EACCES, "Permission denied")
        return really(path, flags)

    with await RunLock.held(folder, pace=RARE):
        monkeypatch.setattr(os, "open", reads_alone)
        holder = holder_of(folder)
        monkeypatch.undo()
    assert holder is not None
    assert holder.pid == os.getpid()
