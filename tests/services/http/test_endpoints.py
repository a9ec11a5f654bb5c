"""Choice of the service that is asked next."""

import asyncio
from contextlib import ExitStack

import pytest

from services.http.breakers import Breakers
from services.http.client import ServiceRefused
from services.http.endpoints import Endpoints


class StandingClock:
    """Stands still unless it is set."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def at_once(endpoints: Endpoints, stack: ExitStack, *, most: int = 100) -> list[str]:
    """Begins calls for as long as one is admitted, at most so many."""
    chosen: list[str] = []
    while len(chosen) < most and (url := endpoints.another(than=())) is not None:
        stack.enter_context(endpoints.call(url))
        chosen.append(url)
    return chosen


async def test_the_least_busy_is_asked_and_equals_take_turns() -> None:
    endpoints = Endpoints(["a", "b"], breakers=Breakers("service"))

    with ExitStack() as stack:
        assert at_once(endpoints, stack, most=4) == ["a", "b", "a", "b"]
    with endpoints.call("a"), endpoints.call("a"), ExitStack() as stack:
        assert at_once(endpoints, stack, most=2) == ["b", "b"]


async def test_one_to_be_avoided_is_asked_if_there_is_no_other() -> None:
    endpoints = Endpoints(["a", "b"], breakers=Breakers("service"))

    assert [await endpoints.choose(avoid=["a"]) for _ in range(3)] == ["b"] * 3
    assert await endpoints.choose(avoid=["a", "b"]) in {"a", "b"}


async def test_a_busy_service_is_asked_for_no_more_at_once_than_it_took_and_for_more_later() -> None:
    clock = StandingClock()
    endpoints = Endpoints(["a"], breakers=Breakers("service", clock=clock))
    with ExitStack() as stack:
        at_once(endpoints, stack, most=3)
        endpoints.busy("a", for_s=2.0)
    with ExitStack() as stack:
        assert at_once(endpoints, stack) == []
    clock.now += 3.0
    with ExitStack() as stack:
        assert len(at_once(endpoints, stack)) == 3
    clock.now += 10.0
    with ExitStack() as stack:
        assert len(at_once(endpoints, stack)) == 6


async def test_one_that_says_it_is_busy_is_well_however_often_it_says_so() -> None:
    clock = StandingClock()
    breakers = Breakers("service", clock=clock)
    endpoints = Endpoints(["a"], breakers=breakers)
    for _ in range(10):
        with pytest.raises(ServiceRefused), endpoints.call("a"):
            raise ServiceRefused("a", status=429, kind="busy", message="come again", retry_after_s=1.0)
        assert breakers["a"].state == "closed"
        clock.now += 2.0
        assert endpoints.at_hand, "it is asked again as soon as it said"


async def test_a_place_at_a_busy_service_is_taken_as_soon_as_it_is_free() -> None:
    clock = StandingClock()
    endpoints = Endpoints(["a"], breakers=Breakers("service", clock=clock))
    endpoints.busy("a", for_s=0.0)
    clock.now += 1.0
    with endpoints.call("a"):
        waiting = asyncio.create_task(endpoints.choose())
        await asyncio.sleep(0)
        assert not waiting.done()
    assert await waiting == "a"
