"""The pool: room, warm runtimes, and what a killed service leaves."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from env_service.runtimes.config import RuntimesConfig
from env_service.runtimes.images import ImageFault
from env_service.runtimes.interface import RuntimesBusy
from env_service.runtimes.pool import RuntimePool, RuntimesOff
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


async def test_a_warm_runtime_that_died_is_not_given_out() -> None:
    pool = RuntimePool(RuntimesConfig(spare=1, limits=SMALL))
    try:
        await (await pool.start("host")).stop()
        await asyncio.sleep(1.5)
        (warm,) = keepers()
        os.kill(warm, signal.SIGKILL)
        assert all_end([warm], timeout_s=20)
        await asyncio.sleep(0.1)
        assert await said(await pool.start("host"), "echo works") == "works"
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
    assert all_end(left, timeout_s=20)
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
        async with asyncio.timeout(10):
            await asyncio.wait([starting])
    await asyncio.sleep(0.3)
    assert keepers() == []


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
