"""A second service is asked for what the first is slow with."""

import asyncio
from functools import partial

from services.rewards.settings import Hedges, HedgeSettings
from tests.env_service.peers import eventually
from tests.services.rewards.scripted import ScriptedService, fails, held, status
from tests.services.rewards.test_client import client_of, items, rewards, scripted

AT_ONCE = HedgeSettings(after_s=0.01)


def has_answered(service: ScriptedService) -> bool:
    return bool(service.asked) and not service.under_way


async def test_the_second_service_wins_and_the_first_is_cancelled() -> None:
    first, second = scripted(always=held(asyncio.Event())), scripted()
    async with client_of(first, second, hedging=AT_ONCE) as client:
        (scored,) = await client.score(items("ab"))
        await eventually(lambda: not first.under_way)

    assert (scored.reward, scored.endpoint, scored.attempts) == (2.0, second.url, 2)


async def test_the_first_service_wins_and_the_second_is_cancelled() -> None:
    answer = asyncio.Event()
    first, second = scripted(always=held(answer)), scripted(always=held(asyncio.Event()))
    async with client_of(first, second, hedging=AT_ONCE) as client:
        call = asyncio.create_task(client.score(items("ab")))
        await eventually(lambda: second.under_way)
        answer.set()
        (scored,) = await call
        await eventually(lambda: not second.under_way)

    assert (scored.reward, scored.endpoint) == (2.0, first.url)


async def test_a_second_service_that_fails_takes_nothing_from_the_first() -> None:
    for bad in (status(500), fails("ab")):
        answer = asyncio.Event()
        first, second = scripted(always=held(answer)), scripted(always=bad)
        async with client_of(first, second, hedging=AT_ONCE) as client:
            call = asyncio.create_task(client.score(items("ab")))
            await eventually(partial(has_answered, second))
            answer.set()
            (scored,) = await call

        assert (scored.reward, scored.endpoint) == (2.0, first.url)


async def test_a_first_service_that_fails_while_the_second_works_is_waited_out() -> None:
    answer, fall = asyncio.Event(), asyncio.Event()
    first, second = scripted(always=held(fall, status(500))), scripted(always=held(answer))
    async with client_of(first, second, hedging=AT_ONCE) as client:
        call = asyncio.create_task(client.score(items("ab")))
        await eventually(lambda: second.under_way)
        fall.set()
        await eventually(lambda: not first.under_way)
        answer.set()
        (scored,) = await call

    assert (scored.reward, scored.endpoint, len(first.asked)) == (2.0, second.url, 1)


async def test_no_more_is_asked_twice_than_is_afforded() -> None:
    answer = asyncio.Event()
    first, second = scripted(always=held(answer)), scripted()
    hedging = HedgeSettings(after_s=0.01, share=0.0, burst=2)
    async with client_of(first, second, hedging=hedging) as client:
        call = asyncio.create_task(client.score(items("a", "ab", "abc")))
        await eventually(partial(has_answered, second))
        answer.set()
        assert rewards(await call) == [1.0, 2.0, 3.0]

    assert [asked.texts for asked in second.asked] == [["a", "ab"]]


async def test_one_service_alone_is_never_asked_twice() -> None:
    answer = asyncio.Event()
    async with client_of(service := scripted(always=held(answer)), hedging=AT_ONCE) as client:
        call = asyncio.create_task(client.score(items("a")))
        await eventually(lambda: service.under_way)
        answer.set()
        await call

    assert len(service.asked) == 1


def test_what_may_be_asked_twice_is_a_share_of_what_is_asked() -> None:
    hedges = Hedges(HedgeSettings(share=0.1, burst=4))

    assert [hedges.afford(3), hedges.afford(3), hedges.afford(3)] == [3, 1, 0]
    for _ in range(10):
        hedges.sent(3)
    assert hedges.afford(100) == 3
    hedges.sent(1_000_000)
    assert hedges.afford(10_000_000) <= 0.1 * 1_000_000 + 4


def test_slow_is_slower_than_most_of_a_verifiers_recent_answers() -> None:
    hedges = Hedges(HedgeSettings(percentile=0.9))

    for number in range(20):
        hedges.answered("v", float(number))
    assert hedges.delay_s("v") is None
    for number in range(20, 100):
        hedges.answered("v", float(number))
    assert hedges.delay_s("v") == 90.0
    assert hedges.delay_s("w") is None
    for _ in range(1000):
        hedges.answered("v", 0.001)
    assert hedges.delay_s("v") == 0.02


def test_a_delay_that_was_given_is_kept() -> None:
    assert Hedges(HedgeSettings(after_s=0.5)).delay_s("v") == 0.5
