"""The client of reward services, against services that fail in every way that there is."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from pydantic import SecretStr

from env_service.rollouts.judging import GroupScoring
from protocol.rewards import ScoreItem
from services.http.backoff import Backoff
from services.http.breakers import BreakerSettings
from services.rewards.client import RewardClient
from services.rewards.items import ItemScore
from services.rewards.settings import ClientSettings, RewardService
from tests.env_service.peers import eventually
from tests.services.rewards.scripted import (
    Answer,
    ArrivedRequest,
    ScriptedService,
    breaks_off,
    breaks_on,
    fails,
    held,
    of,
    result,
    scores,
    serving,
    status,
)

LONG_REST = BreakerSettings(rest_s=1000.0, rest_max_s=1000.0)


def items(*texts: str, verifier: str = "v") -> list[ScoreItem]:
    return [ScoreItem(id=f"mine-{text}", verifier=verifier, completion=text) for text in texts]


def settings(**changes: Any) -> ClientSettings:
    given: dict[str, Any] = {
        "deadline_s": 60.0,
        "patience_s": 60.0,
        "attempts": 3,
        "batch_wait_s": 0.0,
        "rests": BreakerSettings(rest_s=0.01, rest_max_s=0.05),
        "backoff": Backoff(first_s=0.01, max_s=0.02, sleep=asyncio.sleep),
        **changes,
    }
    return ClientSettings(**given)


def scripted(*script: Answer, always: Answer | None = None) -> ScriptedService:
    return ScriptedService(deque(script), always)


@asynccontextmanager
async def client_of(*services: ScriptedService, **changes: Any) -> AsyncIterator[RewardClient]:
    async with serving(*services) as urls, RewardClient(urls, settings=settings(**changes)) as client:
        yield client


def rewards(results: Sequence[ItemScore]) -> list[float | None]:
    return [one.reward for one in results]


async def test_a_result_has_the_callers_id_and_says_who_made_it() -> None:
    async with client_of(service := scripted()) as client:
        (scored,) = await client.score(items("abc"))

    assert scored == ItemScore(
        id="mine-abc", verifier="v", reward=3.0, answered=True, service_id="scripted", endpoint=service.url,
        latency_s=0.25, attempts=1,
    )  # fmt: skip


async def test_nothing_to_score_is_no_request() -> None:
    async with client_of(service := scripted()) as client:
        assert await client.score([]) == []

    assert service.asked == []


async def test_items_may_share_an_id_and_come_back_in_their_order() -> None:
    same = [ScoreItem(id="x", verifier="v", completion=text) for text in ("a", "abc", "ab")]

    async with client_of(scripted()) as client:
        assert rewards(await client.score(same)) == [1.0, 3.0, 2.0]


async def test_only_the_items_that_failed_are_asked_again_and_elsewhere_first() -> None:
    async with client_of(scripted(fails("ab")), second := scripted()) as client:
        results = await client.score(items("a", "ab", "abc"))

    assert rewards(results) == [1.0, 2.0, 3.0]
    assert [one.attempts for one in results] == [1, 2, 1]
    assert [asked.texts for asked in second.asked] == [["ab"]]


async def test_an_item_that_no_service_can_judge_has_the_services_error_and_no_reward() -> None:
    async with client_of(scripted(always=fails("ab")), scripted(always=fails("ab"))) as client:
        good, bad = await client.score(items("a", "ab"))

    assert good.reward == 1.0
    assert bad.error is not None
    assert (bad.reward, bad.error.kind, bad.answered, bad.attempts) == (None, "infrastructure", True, 2)


async def test_an_error_of_the_data_is_final() -> None:
    async with client_of(service := scripted(always=fails("a", kind="data"))) as client:
        (bad,) = await client.score(items("a"))

    assert bad.error is not None
    assert (bad.error.kind, len(service.asked)) == ("data", 1)


async def test_a_failed_request_is_repeated_at_another_service() -> None:
    async with client_of(scripted(status(500)), second := scripted()) as client:
        (scored,) = await client.score(items("a"))

    assert (scored.reward, scored.attempts, scored.endpoint) == (1.0, 2, second.url)


async def test_failures_without_end_are_an_error_that_names_the_last_one() -> None:
    async with client_of(scripted(always=status(500)), scripted(always=status(500))) as client:
        (scored,) = await client.score(items("a"))

    assert scored.error is not None
    assert (scored.reward, scored.error.kind, scored.answered) == (None, "infrastructure", False)
    assert scored.error.message.startswith("3 attempts at reward services failed, last: http://127.0.0.1")


async def test_patience_ends_with_an_error_where_nobody_answers() -> None:
    async with serving(scripted()) as urls:
        pass
    async with RewardClient(urls, settings=settings(patience_s=0.2)) as client:
        (scored,) = await client.score(items("a"))

    assert scored.error is not None
    assert (scored.reward, scored.error.kind, scored.answered) == (None, "infrastructure", False)
    assert scored.error.message.startswith("not scored within 0.2 s, last: ")


async def test_a_refused_request_is_the_callers_fault_and_not_repeated() -> None:
    async with client_of(first := scripted(always=status(422)), second := scripted()) as client:
        results = await client.score(items("a", "ab"))

    assert [one.error and one.error.kind for one in results] == ["user", "user"]
    assert (len(first.asked), len(second.asked)) == (1, 0)


async def test_a_request_that_is_too_large_is_halved() -> None:
    async def at_most_two(asked: Any) -> Any:
        return await (status(413) if len(asked.body.items) > 2 else scores)(asked)

    async with client_of(service := scripted(always=at_most_two)) as client:
        results = await client.score(items("a", "ab", "abc", "abcd", "abcde"))

    assert rewards(results) == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert max(len(asked.body.items) for asked in service.asked[2:]) <= 3


async def test_a_connection_that_breaks_in_the_middle_of_an_answer_costs_no_result() -> None:
    async with client_of(scripted(breaks_off, breaks_off), scripted()) as client:
        assert rewards(await client.score(items("a", "ab"))) == [1.0, 2.0]


async def test_results_that_are_not_those_of_the_request_are_not_believed() -> None:
    async def others(asked: Any) -> Any:
        return of("mad", [result(item, id="12345") for item in asked.body.items])

    async def twice(asked: Any) -> Any:
        return of("mad", [result(asked.body.items[0]) for _ in asked.body.items])

    async def too_few(asked: Any) -> Any:
        return of("mad", [result(asked.body.items[0])])

    for bad in (others, twice, too_few):
        async with client_of(scripted(bad), good := scripted()) as client:
            results = await client.score(items("a", "ab"))
        assert rewards(results) == [1.0, 2.0]
        assert {one.endpoint for one in results} == {good.url}


async def test_a_service_that_fails_again_and_again_is_left_alone() -> None:
    async with client_of(bad := scripted(always=status(500)), scripted(), rests=LONG_REST) as client:
        for _ in range(10):
            assert rewards(await client.score(items("a"))) == [1.0]

    assert len(bad.asked) == 3


async def test_a_busy_service_is_asked_again_when_it_said() -> None:
    async with client_of(service := scripted(status(429, Retry_After="1"))) as client:
        (scored,) = await client.score(items("a"))

    assert (scored.reward, scored.attempts) == (1.0, 2)
    assert service.asked[1].when - service.asked[0].when >= 1.0


async def test_while_one_is_busy_the_others_are_asked() -> None:
    async with client_of(busy := scripted(status(429, Retry_After="1000")), scripted()) as client:
        for _ in range(6):
            assert rewards(await client.score(items("a"))) == [1.0]

    assert len(busy.asked) == 1


async def test_small_calls_share_a_request() -> None:
    async with client_of(service := scripted(), batch_wait_s=0.01) as client:
        results = await asyncio.gather(*(client.score(items("a" * size)) for size in range(1, 21)))

    assert [rewards(each) for each in results] == [[float(size)] for size in range(1, 21)]
    assert [len(asked.body.items) for asked in service.asked] == [20]


async def test_calls_for_different_verifiers_do_not_share_one() -> None:
    async with client_of(service := scripted(), batch_wait_s=0.01) as client:
        await asyncio.gather(*(client.score(items("a", verifier=name)) for name in ("v", "w", "v")))

    assert sorted(len(asked.body.items) for asked in service.asked) == [1, 2]


async def test_large_calls_are_split() -> None:
    async with client_of(service := scripted(), batch_items=4) as client:
        results = await client.score(items(*("a" * size for size in range(1, 11))))

    assert rewards(results) == [float(size) for size in range(1, 11)]
    assert sorted(len(asked.body.items) for asked in service.asked) == [2, 4, 4]


async def test_an_item_that_breaks_a_service_takes_no_other_call_along() -> None:
    services = [scripted(always=breaks_on("poison")) for _ in range(2)]
    async with client_of(*services, batch_wait_s=0.01) as client:
        poisoned, *others = await asyncio.gather(*(client.score(items(text)) for text in ("poison", "a", "ab")))

    assert [rewards(each) for each in others] == [[1.0], [2.0]]
    assert poisoned[0].error is not None
    assert poisoned[0].error.kind == "infrastructure"


async def test_a_refused_item_takes_no_other_call_along() -> None:
    async def picky(asked: Any) -> Any:
        return await (status(422) if "bad" in asked.texts else scores)(asked)

    async with client_of(scripted(always=picky), batch_wait_s=0.01) as client:
        (bad,), (good,) = await asyncio.gather(*(client.score(items(text)) for text in ("bad", "a")))

    assert good.reward == 1.0
    assert bad.error is not None
    assert bad.error.kind == "user"


async def test_verifiers_have_their_own_services() -> None:
    async with serving(math := scripted(), code := scripted(), judge := scripted()) as urls:
        services = [
            RewardService(url=urls[1], verifiers=("code",)),
            RewardService(url=urls[2], verifiers=("judge", "win"), token=SecretStr("theirs")),
        ]
        async with RewardClient(urls[:1], services=services, token=SecretStr("ours"), settings=settings()) as client:
            mixed = [*items("a", verifier="math"), *items("ab", verifier="code"), *items("abc", verifier="win")]
            results = await client.score(mixed)

    assert rewards(results) == [1.0, 2.0, 3.0]
    assert [[asked.texts for asked in each.asked] for each in (math, code, judge)] == [[["a"]], [["ab"]], [["abc"]]]
    tokens = [each.asked[0].http.headers["Authorization"] for each in (math, code, judge)]
    assert tokens == ["Bearer ours", "Bearer ours", "Bearer theirs"]


async def test_a_verifier_without_a_service_is_the_callers_fault() -> None:
    async with serving(scripted()) as urls:
        services = [RewardService(url=urls[0], verifiers=("code",))]
        async with RewardClient(services=services, settings=settings()) as client:
            (scored,) = await client.score(items("a", verifier="math"))

    assert scored.error is not None
    assert scored.error.kind == "user"
    assert "no reward service is set for verifier 'math'" in scored.error.message


async def test_a_cancelled_call_leaves_nothing_running() -> None:
    async with client_of(service := scripted(always=held(asyncio.Event()))) as client:
        call = asyncio.create_task(client.score(items("a")))
        await eventually(lambda: service.under_way)
        call.cancel()
        await eventually(lambda: not service.under_way)

    assert call.cancelled()


async def test_a_cancelled_call_takes_nothing_from_those_that_share_its_request() -> None:
    answer = asyncio.Event()
    async with client_of(service := scripted(always=held(answer)), batch_wait_s=0.01) as client:
        gone, stays = (asyncio.create_task(client.score(items(text))) for text in ("a", "ab"))
        await eventually(lambda: service.under_way)
        gone.cancel()
        await asyncio.wait([gone])
        answer.set()
        assert rewards(await stays) == [2.0]

    assert len(service.asked) == 1


async def test_a_call_that_is_under_way_when_the_client_closes_has_an_error() -> None:
    async with serving(service := scripted(always=held(asyncio.Event()))) as urls:
        async with RewardClient(urls, settings=settings()) as client:
            call = asyncio.create_task(client.score(items("a")))
            await eventually(lambda: service.under_way)
        (scored,) = await call
        await eventually(lambda: not service.under_way)

    assert scored.error is not None
    assert (scored.reward, scored.error.kind) == (None, "infrastructure")
    assert "the client was closed" in scored.error.message


async def test_what_the_body_raises_is_not_wrapped() -> None:
    with pytest.raises(ZeroDivisionError):
        async with client_of(scripted()):
            raise ZeroDivisionError


def hangs_on(*texts: str) -> Answer:
    """No answer to a request with one of these completions in it."""

    async def answer(asked: ArrivedRequest) -> web.StreamResponse:
        if set(texts) & set(asked.texts):
            await asyncio.Event().wait()
        return await scores(asked)

    return answer


@pytest.mark.parametrize("together", [("hangs",), ("a", "ab", "hangs", "abc")])
async def test_an_item_that_alone_is_never_answered_becomes_an_error_of_the_data(together: tuple[str, ...]) -> None:
    service = scripted(always=hangs_on("hangs"))
    async with client_of(service, deadline_s=0.2, margin_s=0.0, patience_s=15.0) as client:
        scoring = asyncio.create_task(client.score(items(*together)))
        while not scoring.done():
            await client.score(items("others"))
            await asyncio.sleep(0.02)
        results = dict(zip(together, await scoring, strict=True))

    bad = results.pop("hangs")
    assert bad.error is not None
    assert (bad.reward, bad.error.kind, bad.answered) == (None, "data", False)
    assert bad.error.message.startswith("3 requests for this item alone ran out of time")
    assert [one.reward for one in results.values()] == [float(len(text)) for text in results]


async def test_a_service_that_answers_nobody_is_no_fault_of_the_item() -> None:
    service = scripted(always=hangs_on("hangs"))
    async with client_of(service, deadline_s=0.05, margin_s=0.0, patience_s=1.0) as client:
        (scored,) = await client.score(items("hangs"))

    assert len(service.asked) > 3
    assert scored.error is not None
    assert scored.error.kind == "infrastructure"


async def test_an_item_that_hangs_a_service_with_nothing_else_to_do_is_found_by_one_that_it_answered() -> None:
    service = scripted(always=hangs_on("hangs"))
    async with client_of(service, deadline_s=0.2, margin_s=0.0, patience_s=15.0) as client:
        await client.score(items("well"))
        (bad,) = await client.score(items("hangs"))
        scored = await GroupScoring(client).score(items("hangs", "well"))

    assert bad.error is not None
    assert (bad.reward, bad.error.kind, bad.answered) == (None, "data", False)
    assert bad.error.message.startswith("3 requests for this item alone ran out of time")
    assert [(one.reward, one.error_kind) for one in scored] == [(None, "data"), (4.0, None)]


async def test_a_service_that_answers_no_more_at_all_is_no_fault_of_the_item() -> None:
    service = scripted(scores, always=hangs_on("hangs", "well"))
    async with client_of(service, deadline_s=0.05, margin_s=0.0, patience_s=1.5) as client:
        await client.score(items("well"))
        (scored,) = await client.score(items("hangs"))

    assert len([asked for asked in service.asked if asked.texts == ["hangs"]]) > 3
    assert scored.error is not None
    assert scored.error.kind == "infrastructure"


async def test_an_item_that_failed_is_asked_elsewhere_though_another_service_is_busier() -> None:
    answer = asyncio.Event()
    busy, broken = scripted(held(answer)), scripted(always=fails("x"))

    async with client_of(busy, broken) as client:
        first = asyncio.create_task(client.score(items("first")))
        await eventually(lambda: busy.under_way + broken.under_way == 1)
        (scored,) = await client.score(items("x"))
        answer.set()
        await first

    assert (scored.reward, scored.endpoint) == (1.0, busy.url)
    assert [asked.texts for asked in broken.asked] == [["x"]]


async def test_an_item_that_cannot_be_written_is_refused_and_harms_no_other() -> None:
    (item,) = items("x")
    half = item.model_copy(update={"arguments": {"answer": "\ud83d"}})

    async with client_of(scripted(), batch_wait_s=0.05) as client:
        (refused,), (scored,) = await asyncio.gather(client.score([half]), client.score(items("abc")))
        assert rewards(await client.score(items("abc"))) == [3.0]

    assert scored.reward == 3.0
    assert refused.error is not None
    assert (refused.error.kind, "expected text of whole characters" in refused.error.message) == ("user", True)
