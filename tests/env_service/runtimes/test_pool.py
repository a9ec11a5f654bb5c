"""The pool: room, warm runtimes, and what a killed service leaves."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from env_service.runtimes import images
from env_service.runtimes.bubblewrap import BubblewrapRuntime
from env_service.runtimes.config import RuntimesConfig
from env_service.runtimes.images import ImageFault, RuntimesOff
from env_service.runtimes.interface import RuntimeEnded, RuntimesBusy
from env_service.runtimes.pool import RuntimePool
from services.http.metrics import Metrics
from services.isolation.faults import CannotIsolate
from tests.env_service.runtimes.conftest import SMALL, keepers, said
from tests.process_ends import all_end, children_of

SERVICE = """
import asyncio, os, sys
from env_service.runtimes.config import RuntimesConfig
from env_service.runtimes.interface import RuntimeCommand
from env_service.runtimes.pool import RuntimePool
async def main():
    pool = RuntimePool(RuntimesConfig(spare=1))
    made = [await pool.start("host") for _ in range(3)]
    for each in made:
        await each.exec(RuntimeCommand(argv=("sh", "-c", "setsid sleep 1000 >/dev/null 2>&1 &")))
    print("stands", flush=True)
    await asyncio.sleep(1000)
asyncio.run(main())
"""


def family(pid: int) -> list[int]:
    """All descendants of a process."""
    below = children_of(pid)
    return [*below, *(each for child in below for each in family(child))]


async def test_room_is_counted_and_who_waits_is_next() -> None:
    pool, metrics = RuntimePool(RuntimesConfig(spare=1, max_runtimes=2, patience_s=0.5, limits=SMALL)), Metrics("test")
    pool.show(metrics)

    def shown(state: str) -> object:
        return metrics.registry.get_sample_value("headway_test_runtimes", {"state": state})

    try:
        first, second = await pool.start("host"), await pool.start("host")
        assert [shown(state) for state in ("busy", "warm", "waiting")] == [2, 0, 0]
        with pytest.raises(RuntimesBusy, match=r"no room for a runtime in 0.5 s: 2 live"):
            await pool.start("host")
        waiting = asyncio.ensure_future(pool.start("host"))
        await asyncio.sleep(0.1)
        assert shown("waiting") == 1
        await first.stop()
        assert await said(await waiting, "echo third") == "third"
        assert await said(second, "echo second") == "second"
    finally:
        await pool.close()


async def test_who_waits_takes_the_warm_runtime_that_was_on_its_way() -> None:
    pool = RuntimePool(RuntimesConfig(spare=1, max_runtimes=2, patience_s=15, limits=SMALL))
    try:
        first = await pool.start("host")
        await asyncio.sleep(0)  # from here on a warm one takes the last room
        assert await said(await pool.start("host"), "echo second") == "second"
        assert await said(first, "echo first") == "first"
    finally:
        await pool.close()


async def test_a_fork_has_the_room_of_a_warm_runtime_of_its_image() -> None:
    pool = RuntimePool(RuntimesConfig(spare=1, max_runtimes=2, patience_s=15, limits=SMALL))
    try:
        first = await pool.start("host")
        await first.copy_in({"work/kept": b"of the first"})
        snapshot = await first.snapshot()
        await asyncio.gather(*pool._filling)
        assert pool._warm == 1
        assert await said(await pool.start("host", snapshot=snapshot), "cat kept") == "of the first"
    finally:
        await pool.close()


async def test_a_lifetime_is_that_of_the_task_and_not_of_the_wait_for_one() -> None:
    limits = SMALL.model_copy(update={"lifetime_s": 1.5})
    pool = RuntimePool(RuntimesConfig(spare=1, limits=limits))
    try:
        await (await pool.start("host")).stop()
        await asyncio.gather(*pool._filling)
        await asyncio.sleep(2)
        (warm,) = keepers()
        runtime = await pool.start("host")
        assert warm in keepers()
        assert await said(runtime, "echo works") == "works"
        with pytest.raises(RuntimeEnded, match=r"its time was over after 1.5 s"):
            await said(runtime, "sleep 5")
    finally:
        await pool.close()


async def test_starts_at_once_of_an_image_that_is_not_the_first_all_come_to_stand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    complete = images.complete_root

    def slow(root: Path, *, user: int) -> None:
        time.sleep(0.2)  # as on a busy disk
        complete(root, user=user)

    monkeypatch.setattr(images, "complete_root", slow)
    pool = RuntimePool(RuntimesConfig(spare=0, limits=SMALL))
    try:
        monkeypatch.setattr(pool, "_try_walls", _nothing)  # which has the first image's walls made
        made = await asyncio.gather(*(pool.start("host") for _ in range(3)))
        assert [await said(each, "pwd; cat /etc/hosts") for each in made] == ["/work\n127.0.0.1 localhost"] * 3
    finally:
        await pool.close()


async def test_each_of_many_that_begin_at_once_has_limits_of_its_own(pool: RuntimePool) -> None:
    many = 4 * (os.cpu_count() or 1)  # twice as many as are launched at a time
    await asyncio.gather(*(pool.start("host") for _ in range(many)))
    assert len({cast("BubblewrapRuntime", each)._name for each in pool._living}) == many


async def _nothing(_kind: object) -> None:
    """Tries no walls."""


async def test_a_warm_runtime_that_died_is_not_given_out() -> None:
    pool, metrics = RuntimePool(RuntimesConfig(spare=1, limits=SMALL)), Metrics("test")
    pool.show(metrics)
    try:
        await (await pool.start("host")).stop()
        await asyncio.sleep(1.5)
        (warm,) = keepers()
        os.kill(warm, signal.SIGKILL)
        assert all_end([warm])
        await asyncio.sleep(0.1)
        assert await said(await pool.start("host"), "echo works") == "works"
        # Nor does it take room any more.
        assert metrics.registry.get_sample_value("headway_test_runtimes", {"state": "busy"}) == 1
    finally:
        await pool.close()


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A folder for temporary ones that every user can search."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        os.chmod(name, 0o755)
        yield Path(name)


def test_nothing_is_left_of_a_killed_service(temporary: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen([sys.executable, "-c", SERVICE], stdout=subprocess.PIPE, text=True, env=environment) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "stands\n"
            left = family(child.pid)
            assert len(left) >= 12, "keepers, bubblewraps, first processes, and what runs"
        finally:
            child.kill()
    assert all_end(left)
    (folder,) = temporary.iterdir()
    os.utime(folder, (1e6, 1e6))  # a young one might be somebody's who has just made it
    with subprocess.Popen([sys.executable, "-c", SERVICE], stdout=subprocess.PIPE, text=True, env=environment) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "stands\n"
            assert folder not in list(temporary.iterdir())
        finally:
            child.kill()


async def test_a_start_that_is_given_up_ends_at_once(pool: RuntimePool) -> None:
    await pool.open()
    for pause_s in (0.0, 0.002, 0.01):
        starting = asyncio.ensure_future(pool.start("host"))
        await asyncio.sleep(pause_s)
        starting.cancel()
        async with asyncio.timeout(60):
            await asyncio.wait([starting])
    await asyncio.sleep(0.3)  # one that was being forked is there by now
    assert await asyncio.to_thread(lambda: all_end(keepers()))


def test_an_image_that_there_is_not_and_runtimes_that_are_off_are_named(tmp_path: Path) -> None:
    with pytest.raises(ImageFault, match=r"no image 'none' in .*; expected one of: host; make it by"):
        RuntimePool(RuntimesConfig(folder=tmp_path)).need("none")
    with pytest.raises(RuntimesOff, match=r"env-service.runtimes.kind is 'off'"):
        RuntimePool(RuntimesConfig(kind="off")).need("host")


@pytest.mark.skipif(os.geteuid() != 0, reason="runtimes are the service's own user")
async def test_a_temporary_folder_that_their_user_cannot_reach_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.chmod(tmp_path, 0o700)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(CannotIsolate, match=r"user 64000, as whom runtimes run, cannot reach .*: set TMPDIR"):
        await RuntimePool(RuntimesConfig()).start("host")
