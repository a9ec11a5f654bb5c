"""The choice of a generator."""

import asyncio
from contextlib import suppress

from env_service.rollouts.generation import GeneratorFleet
from protocol.messages import ServingGenerator
from services.http.calls import Breakers, BreakerSettings
from services.http.client import ServiceError, ServiceTimeout
from tests.env_service.peers import serving

A, B, C = (serving(name, f"http://{name}") for name in "abc")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def fail(fleet: GeneratorFleet, generator: ServingGenerator) -> None:
    with suppress(ServiceError), fleet.occupy(generator, completions=1):
        raise ServiceTimeout(generator.url, "it died")


async def test_the_generator_with_the_fewest_completions_outstanding_is_chosen() -> None:
    fleet = GeneratorFleet()
    fleet.replace([A, B])
    with fleet.occupy(A, completions=8):
        assert await fleet.choose() == B
        with fleet.occupy(B, completions=16):
            assert await fleet.choose() == A
    assert not fleet.outstanding


async def test_one_that_was_tried_is_chosen_only_if_there_is_no_other() -> None:
    fleet = GeneratorFleet()
    fleet.replace([A, B])
    assert await fleet.choose(avoid=["a"]) == B
    fleet.replace([A])
    assert await fleet.choose(avoid=["a"]) == A


async def test_one_that_has_failed_rests_for_a_while() -> None:
    clock = Clock()
    fleet = GeneratorFleet(breakers=Breakers("generator", settings=BreakerSettings(rest_s=2.0), clock=clock))
    fleet.replace([A, B])
    fail(fleet, A)
    with fleet.occupy(B, completions=8):
        assert await fleet.choose() == B
        clock.now = 3.0
        assert await fleet.choose() == A


async def test_a_choice_waits_until_somebody_serves() -> None:
    fleet = GeneratorFleet()
    choice = asyncio.ensure_future(fleet.choose())
    await asyncio.sleep(0)
    assert not choice.done()
    fleet.replace([C])
    assert await choice == C


async def test_a_choice_waits_for_the_rest_of_the_only_one() -> None:
    fleet = GeneratorFleet(breakers=Breakers("generator", settings=BreakerSettings(rest_s=0.01)))
    fleet.replace([A])
    fail(fleet, A)
    assert not fleet.answering
    async with asyncio.timeout(10):
        assert await fleet.choose() == A


async def test_one_that_was_away_and_serves_again_is_asked_at_once() -> None:
    fleet = GeneratorFleet(breakers=Breakers("generator", settings=BreakerSettings(rest_s=1000.0)))
    fleet.replace([A])
    fail(fleet, A)
    choice = asyncio.ensure_future(fleet.choose())
    await asyncio.sleep(0)
    fleet.replace([])
    fleet.replace([A])
    async with asyncio.timeout(10):
        assert await choice == A


async def test_a_cancelled_choice_ends() -> None:
    fleet = GeneratorFleet()
    choice = asyncio.ensure_future(fleet.choose())
    await asyncio.sleep(0)
    choice.cancel()
    await asyncio.wait([choice])
    assert choice.cancelled()
