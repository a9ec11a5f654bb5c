"""Reports of waits, in logs and to /readyz."""

import asyncio
import contextlib
import logging

import pytest

from services.http.waiting import Waiting


class WaitingClock:
    """A clock that is set by hand, in seconds."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_wait_is_said_at_its_beginning_again_and_at_its_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock, waited = WaitingClock(), list[tuple[str, float]]()
    waiting = Waiting(clock=clock, on_waited=lambda whom, seconds: waited.append((whom, seconds)))
    with waiting.wait("a generator", remedy="start one"):
        clock.now += 15
        waiting.remind()
        clock.now += 6
        waiting.remind()
    assert caplog.messages == [
        "waiting for a generator: start one",
        "waiting for a generator since 21 s: start one",
        "waited 21.0 s for a generator: going on",
    ]
    assert waited == [("a generator", 21.0)]


def test_a_wait_that_lasts_is_said_ever_more_rarely(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock = WaitingClock()
    waiting = Waiting(clock=clock)
    said = []
    with waiting.wait("a generator", quiet_s=10):
        for second in range(1, 1201):
            clock.now += 1
            waiting.remind()
            if caplog.messages:
                said.append(second)
            caplog.clear()
    assert said == [10, 30, 70, 150, 310, 610, 910]


def test_a_wait_of_days_goes_on_being_said(caplog: pytest.LogCaptureFixture) -> None:
    clock = WaitingClock()
    waiting = Waiting(clock=clock)
    with caplog.at_level(logging.INFO), waiting.wait("a generator") as current:
        current.said = 5000
        clock.now += 500_000
        caplog.clear()
        waiting.remind()
        assert caplog.messages == ["waiting for a generator since 500000 s"]
        assert current.next_line_at == clock.now + 300


@pytest.mark.parametrize("error", [asyncio.CancelledError, RuntimeError])
def test_a_wait_in_vain_is_not_said_to_have_been_otherwise(
    caplog: pytest.LogCaptureFixture, error: type[BaseException]
) -> None:
    caplog.set_level(logging.INFO)
    clock = WaitingClock()
    waiting = Waiting(clock=clock)
    with contextlib.suppress(error), waiting.wait("a generator"):
        clock.now += 21
        raise error
    assert caplog.messages[1:] == ["no longer waiting, after 21.0 s, for a generator"]


def test_the_end_of_a_wait_leaves_out_how_far_it_was(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock = WaitingClock()
    waiting = Waiting(clock=clock)
    with waiting.wait("groups") as wait:
        wait.whom = "groups: 3 of 4 are there"
        clock.now += 2
    assert caplog.messages[-1] == "waited 2.0 s for groups: going on"


async def test_a_long_start_is_said_until_it_is_over(caplog: pytest.LogCaptureFixture) -> None:
    """By a clock that an event loop has, too: each look at it is one more second."""
    caplog.set_level(logging.INFO)
    times = iter(range(1000))
    waiting = Waiting(start="a model is loaded", remind_every_s=0.01, clock=lambda: next(times) * 10.0)
    said_twice = asyncio.Event()
    handler = logging.Handler()
    handler.emit = lambda record: said_twice.set() if len(caplog.messages) > 1 else None  # type: ignore[method-assign]
    logging.getLogger("services.http.waiting").addHandler(handler)
    async with asyncio.timeout(60):
        await said_twice.wait()
    logging.getLogger("services.http.waiting").removeHandler(handler)
    assert caplog.messages[0].startswith("starting since ")
    assert caplog.messages[0].endswith(" s: a model is loaded")
    waiting.started()
    said = len(caplog.messages)
    await asyncio.sleep(0.05)
    assert len(caplog.messages) == said


def test_a_short_wait_of_normal_work_is_not_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock = WaitingClock()
    waiting = Waiting(clock=clock)
    with waiting.wait("a batch", quiet_s=2):
        clock.now += 1
        waiting.remind()
    assert not caplog.messages
    with waiting.wait("a batch", quiet_s=2):
        clock.now += 3
        waiting.remind()
    assert caplog.messages == ["waiting for a batch since 3 s", "waited 3.0 s for a batch: going on"]


def test_readiness_names_whom_the_process_waits_for_and_how_long() -> None:
    clock = WaitingClock()
    waiting = Waiting(clock=clock)
    assert waiting.readiness().waiting_for == ("its own start",)
    waiting.started()
    assert waiting.readiness().ready
    with waiting.wait("the learner"):
        clock.now += 2
        with waiting.wait("a reward", blocks_readiness=False), waiting.wait("a generator"):
            clock.now += 1
            state = waiting.readiness()
    assert (state.ready, state.waiting_for, state.waiting_s) == (False, ("the learner", "a generator"), 3.0)
    assert waiting.readiness().ready


async def test_reminders_come_by_themselves_in_an_event_loop(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    said_twice = asyncio.Event()
    handler = logging.Handler()
    handler.emit = lambda record: said_twice.set() if "since" in record.getMessage() else None  # type: ignore[method-assign]
    logging.getLogger("services.http.waiting").addHandler(handler)
    with Waiting(remind_every_s=0.01).wait("the learner"):
        async with asyncio.timeout(60):
            await said_twice.wait()
    logging.getLogger("services.http.waiting").removeHandler(handler)


def test_a_wait_ends_when_its_body_raises() -> None:
    waiting = Waiting()
    waiting.started()
    with pytest.raises(KeyError), waiting.wait("the learner"):
        raise KeyError("x")
    assert waiting.readiness().ready
