"""Answers that come line by line, and answers that are lost on the way."""

import asyncio
from collections import deque
from typing import Any

from services.rewards.settings import HedgeSettings
from tests.env_service.peers import eventually
from tests.services.rewards.scripted import ArrivedRequest, breaks_off, lines, of, result, status
from tests.services.rewards.test_client import client_of, items, rewards, scripted


def keys(asked: list[ArrivedRequest]) -> list[str]:
    return [each.http.headers["Idempotency-Key"] for each in asked]


async def test_a_call_does_not_wait_for_a_slow_item_of_another_one() -> None:
    late = asyncio.Event()
    async with client_of(service := scripted(always=lines(late, "slow")), batch_wait_s=0.01) as client:
        slow, fast = (asyncio.create_task(client.score(items(text))) for text in ("slow", "a"))
        (scored,) = await fast
        assert not slow.done()
        late.set()
        assert rewards(await slow) == [4.0]

    assert (scored.reward, scored.service_id, scored.endpoint) == (1.0, "lines", service.url)
    assert len(service.asked) == 1


async def test_what_came_before_a_connection_broke_is_not_asked_again() -> None:
    broken = asyncio.Event()
    broken.set()
    first, second = scripted(lines(broken, "ab", breaks=True)), scripted()
    async with client_of(first, second, batch_wait_s=0.01) as client:
        a, b = await asyncio.gather(client.score(items("a", "ab")), client.score(items("abc")))

    assert (rewards(a), rewards(b)) == ([1.0, 2.0], [3.0])
    assert [asked.texts for asked in second.asked] == [["ab"]]


async def test_a_second_service_is_asked_only_for_what_is_late() -> None:
    first, second = scripted(always=lines(asyncio.Event(), "ab")), scripted()
    async with client_of(first, second, hedging=HedgeSettings(after_s=0.2)) as client:
        assert rewards(await client.score(items("a", "ab", "abc"))) == [1.0, 2.0, 3.0]
        await eventually(lambda: not first.under_way)

    assert "ab" in second.asked[0].texts


async def test_an_answer_that_ends_too_early_is_completed_elsewhere() -> None:
    async def too_few(asked: Any) -> Any:
        asked = ArrivedRequest(asked.http, asked.body.model_copy(update={"items": asked.body.items[:1]}), asked.when)
        done = asyncio.Event()
        done.set()
        return await lines(done)(asked)

    async with client_of(scripted(too_few), second := scripted(), batch_wait_s=0.01) as client:
        a, b = await asyncio.gather(client.score(items("a")), client.score(items("ab")))

    assert (rewards(a), rewards(b)) == ([1.0], [2.0])
    assert [asked.texts for asked in second.asked] == [["ab"]]


async def test_a_service_whose_answers_always_end_too_early_is_given_up() -> None:
    async def nothing(asked: ArrivedRequest) -> Any:
        done = asyncio.Event()
        done.set()
        return await lines(done)(ArrivedRequest(asked.http, asked.body.model_copy(update={"items": ()}), asked.when))

    hedging = HedgeSettings(after_s=1000.0)
    async with client_of(service := scripted(always=nothing), hedging=hedging, patience_s=5.0) as client:
        scored = await client.score(items("a", "ab"))

    assert len(service.asked) == 3
    for one in scored:
        assert one.error is not None
        assert one.error.kind == "infrastructure"
        assert "its answer ended without 2 of the results" in one.error.message


async def test_an_answer_that_was_lost_is_asked_for_again_under_the_same_key() -> None:
    async with client_of(service := scripted(breaks_off), scripted()) as client:
        (scored,) = await client.score(items("a"))

    one, two = service.asked
    assert scored.endpoint == service.url
    assert one.body == two.body
    assert len({*keys([one, two])}) == 1


async def test_what_is_judged_anew_has_another_key() -> None:
    async with client_of(service := scripted(status(500), status(500))) as client:
        await client.score(items("a"))
        await client.score(items("a"))

    assert len({*keys(service.asked)}) == len(service.asked) == 4


async def test_a_service_that_knows_its_keys_judges_once() -> None:
    judged: list[str] = []
    known: dict[str, Any] = {}

    async def judges(asked: ArrivedRequest) -> Any:
        (key,) = keys([asked])
        if key not in known:
            judged.extend(asked.texts)
            known[key] = [result(item) for item in asked.body.items]
            return await breaks_off(asked)
        return of("scripted", known[key])

    async with client_of(scripted(always=judges)) as client:
        for text in ("a", "ab", "abc"):
            assert rewards(await client.score(items(text))) == [float(len(text))]

    assert judged == ["a", "ab", "abc"]


async def test_connections_of_answers_read_to_their_end_are_used_again() -> None:
    done = asyncio.Event()
    done.set()
    ports: deque[int] = deque()

    async def noted(asked: ArrivedRequest) -> Any:
        assert asked.http.transport is not None
        ports.append(asked.http.transport.get_extra_info("peername")[1])
        return await lines(done)(asked)

    async with client_of(service := scripted(always=noted), batch_wait_s=0.01) as client:
        for _ in range(5):
            await asyncio.gather(client.score(items("a")), client.score(items("ab")))
            await eventually(lambda: not service.under_way)

    assert len(set(ports)) < 5
