"""The load of a process over a window of time."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence

import pytest

from protocol.status import GpuStatus
from services import load
from services.load import LONG_S, WINDOW_S, LoadSample, LoadWindow
from services.local_processes import usage_of


def window(samples: list[LoadSample], *, every_s: float = 1.0, limit: int | None = None) -> LoadWindow:
    times: Iterator[float] = iter(every_s * number for number in range(len(samples)))
    given = iter(samples)
    made = LoadWindow(lambda: next(given), limit=lambda: limit, clock=lambda: next(times))
    for _ in samples:
        made.sample()
    return made


def test_a_window_of_a_moment_tells_nothing() -> None:
    assert window([LoadSample(done=0, running=1)] * 3).status() is None


def test_rates_are_of_the_window_and_not_of_the_whole_life() -> None:
    fast = [LoadSample(done=100.0 * second, running=8, idle_s=0.0) for second in range(100)]
    slow = [LoadSample(done=9900.0 + second, running=4, idle_s=0.5 * second) for second in range(1, 40)]

    found = window([*fast, *slow], limit=64).status()

    assert found is not None
    assert (found.over_s, found.per_s, found.running, found.limit) == (WINDOW_S, 1.0, 4.0, 64)
    assert found.busy_share == pytest.approx(0.5)


def test_without_an_idle_time_looks_without_anything_at_hand_are_idle() -> None:
    samples = [LoadSample(done=0, running=2 if second % 4 else 0, waits={"rewards": 1}) for second in range(9)]

    found = window(samples).status()

    assert found is not None
    assert found.busy_share == pytest.approx(0.75)
    assert [(wait.whom, wait.running) for wait in found.waits] == [("rewards", 1.0)]


def test_the_cores_at_work_are_those_of_the_last_seconds() -> None:
    times = iter([0.0, 10.0, 15.0])
    watched = LoadWindow(lambda: LoadSample(done=0, running=0), limit=lambda: None, clock=lambda: next(times))
    watched._measure(100.0, 5)
    assert watched.usage is None, "once is no rate"
    watched._measure(105.0, 6)
    held = (GpuStatus(index=2, busy_share=0.5, memory_bytes=8, total_bytes=9),)
    watched._measure(115.0, 7, gpus=held)

    assert watched.usage is not None
    assert (watched.usage.cores, watched.usage.memory_bytes, watched.usage.gpus) == (2.0, 7, held)


async def test_shared_pages_are_looked_at_only_if_somebody_has_asked_since(monkeypatch: pytest.MonkeyPatch) -> None:
    now, looks = [0.0], list[int]()

    def look(pid: int) -> int:
        looks.append(pid)
        return 5

    monkeypatch.setattr(load, "proportional_memory_of", look)
    watched = LoadWindow(lambda: LoadSample(done=0, running=0), limit=lambda: None, clock=lambda: now[0])
    assert [await watched._memory_bytes(9) for _ in range(3)] == [5, 5, 5]
    now[0] = 29.0
    assert watched.usage is None
    assert await watched._memory_bytes(9) == 5
    assert len(looks) == 1, "that is too soon, whoever asks"
    now[0] = 30.0
    assert await watched._memory_bytes(9) == 5
    assert len(looks) == 2
    now[0] = 60.0
    assert await watched._memory_bytes(9) == 5
    assert len(looks) == 2, "nobody has asked"
    now[0] = 30.0 + LONG_S + 1
    assert await watched._memory_bytes(9) == 9, "what was seen so long ago says nothing"
    assert watched.usage is None
    assert [await watched._memory_bytes(9) for _ in range(2)] == [5, 5]
    assert len(looks) == 3


async def test_what_a_process_holds_of_gpus_is_told_from_the_first_look_on() -> None:
    told = asyncio.Queue[Sequence[GpuStatus]]()
    watched = LoadWindow(lambda: LoadSample(done=0, running=0), limit=lambda: None)
    running = asyncio.create_task(watched.run(gpus=told.put_nowait))
    try:
        first = await told.get()
    finally:
        running.cancel()

    assert all(gpu.memory_bytes <= gpu.total_bytes for gpu in first)


def test_what_a_process_takes_counts_its_children() -> None:
    alone_s, alone = usage_of(os.getpid())
    words = [sys.executable, "-c", "x = bytearray(200 << 20); print(len(x), flush=True); input()"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        child.stdout.readline()
        together_s, together = usage_of(os.getpid())
        own_s, own = usage_of(child.pid)
        child.communicate("\n")

    assert own > 200 << 20
    assert together > alone + (150 << 20)
    assert together_s >= alone_s
    assert own_s < together_s
    assert usage_of(1 << 30) == (0.0, 0)


def test_long_work_is_seen_whole_over_a_longer_time() -> None:
    samples = [LoadSample(done=0, running=1, idle_s=10.0 * (second // 20)) for second in range(100)]

    assert window(samples[:15]).status().long_busy_share is None  # type: ignore[union-attr]
    found = window(samples).status()
    assert found is not None
    assert found.busy_share == 1.0
    assert found.long_busy_share == pytest.approx(0.5)
