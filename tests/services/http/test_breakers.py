"""A breaker's states, with a clock of the test's own."""

import asyncio

import pytest

from services.http.breakers import Breaker, Breakers, BreakerSettings

SETTINGS = BreakerSettings(failures=3, rest_s=1.0, rest_max_s=4.0)


class BreakerClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> BreakerClock:
    return BreakerClock()


@pytest.fixture
def breaker(clock: BreakerClock) -> Breaker:
    return Breaker("b", settings=SETTINGS, clock=clock)


def fail(breaker: Breaker, *, silent: bool = False) -> None:
    with breaker.call() as call:
        call.failed("it broke", silent=silent)


def succeed(breaker: Breaker) -> None:
    with breaker.call() as call:
        call.succeeded()


def test_it_opens_after_several_failures_in_a_row(breaker: Breaker) -> None:
    fail(breaker)
    fail(breaker)
    succeed(breaker)
    fail(breaker)
    fail(breaker)
    assert breaker.admits
    fail(breaker)
    assert breaker.state == "open"
    assert not breaker.admits


def test_silence_opens_it_at_once(breaker: Breaker) -> None:
    fail(breaker, silent=True)
    assert breaker.state == "open"


def test_silence_of_one_that_others_hear_is_a_failure_like_others(breaker: Breaker, clock: BreakerClock) -> None:
    with breaker.call() as slow:
        clock.now = 1.0
        succeed(breaker)
        slow.failed("no answer", silent=True)
    assert breaker.state == "closed"


def test_after_its_rest_it_admits_one_probe(breaker: Breaker, clock: BreakerClock) -> None:
    fail(breaker, silent=True)
    clock.now = 0.9
    assert not breaker.admits
    clock.now = 1.0
    assert breaker.state == "half-open"
    with breaker.call() as probe:
        assert probe.is_probe
        assert not breaker.admits
        probe.succeeded()
        assert breaker.admits


def test_a_probe_that_fails_doubles_the_rest_up_to_its_limit(breaker: Breaker, clock: BreakerClock) -> None:
    fail(breaker, silent=True)
    rests = []
    for _ in range(4):
        ends = breaker.rested_at(since=clock.now)
        assert ends is not None
        rests.append(ends - clock.now)
        clock.now = ends
        fail(breaker)
    assert rests == [1.0, 2.0, 4.0, 4.0]
    clock.now += 4.0
    succeed(breaker)
    fail(breaker, silent=True)
    assert breaker.rested_at(since=clock.now) == clock.now + 1.0


def test_a_probe_that_is_cancelled_gives_its_place_back(breaker: Breaker, clock: BreakerClock) -> None:
    fail(breaker, silent=True)
    clock.now = 1.0
    with breaker.call():
        pass
    assert breaker.state == "half-open"
    assert breaker.admits


def test_a_failure_of_before_the_opening_changes_nothing(breaker: Breaker, clock: BreakerClock) -> None:
    with breaker.call() as early:
        fail(breaker, silent=True)
        clock.now = 1.5
        early.failed("late", silent=True)
    assert breaker.state == "half-open"


def test_a_success_of_before_the_opening_closes_it(breaker: Breaker) -> None:
    with breaker.call() as early:
        fail(breaker, silent=True)
        early.succeeded()
    assert breaker.state == "closed"


async def test_waiting_ends_with_the_first_rest() -> None:
    breakers = Breakers("peer", settings=BreakerSettings(rest_s=0.01))
    fail(breakers["a"], silent=True)
    async with asyncio.timeout(60):
        looked_at = breakers.now()
        while not breakers["a"].admits:
            await breakers.change(["a"], since=looked_at)
            looked_at = breakers.now()


async def test_waiting_ends_with_a_verdict_of_another() -> None:
    clock = BreakerClock()
    breakers = Breakers("peer", clock=clock)
    fail(breakers["a"], silent=True)
    clock.now = 10.0
    with breakers["a"].call() as probe:
        waiting = asyncio.create_task(breakers.change(["a"], since=clock.now))
        await asyncio.sleep(0)
        assert not waiting.done()
        probe.succeeded()
        async with asyncio.timeout(60):
            await waiting


async def test_a_rest_that_ends_between_the_look_and_the_wait_is_not_waited_for() -> None:
    clock = BreakerClock()
    breakers = Breakers("peer", settings=SETTINGS, clock=clock)
    fail(breakers["a"], silent=True)
    looked_at = breakers.now()
    assert not breakers["a"].admits
    clock.now = 1.5
    async with asyncio.timeout(60):
        await breakers.change(["a"], since=looked_at)


def test_one_that_left_and_comes_again_starts_closed() -> None:
    breakers = Breakers("peer")
    fail(breakers["a"], silent=True)
    failed = breakers["a"].state
    breakers.keep(["b"])
    assert (failed, breakers["a"].state) == ("open", "closed")
