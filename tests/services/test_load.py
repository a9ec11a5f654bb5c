"""The load of a process over a window of time."""

from collections.abc import Iterator

import pytest

from services.load import WINDOW_S, LoadSample, LoadWindow


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
    samples = [LoadSample(done=0, running=2 if second % 4 else 0, waits={"rewards": 1}) for second in range(13)]

    found = window(samples).status()

    assert found is not None
    assert found.busy_share == pytest.approx(0.75)
    assert [(wait.whom, wait.running) for wait in found.waits] == [("rewards", 1.0)]
