"""Scoring by several reward services that fail, hang, leave and come."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio
from aiohttp import web

from env_service.rollouts.judging import GroupScoring, given_text, shortened
from env_service.rollouts.outcomes import DataFailure, InfrastructureFailure
from protocol.rewards import ScoreItem, ScoreRequest, ScoreResponse, ScoreResult
from services.http.backoff import Backoff
from services.http.breakers import BreakerSettings
from services.http.waiting import Waiting
from services.rewards.client import RewardClient
from services.rewards.settings import ClientSettings
from tests.env_service.peers import ScriptedRewards, eventually, hanging, served

LONG_REST = BreakerSettings(rest_s=1000.0, rest_max_s=1000.0)
SHORT_REST = BreakerSettings(rest_s=0.01, rest_max_s=0.05)


def length(text: str, _: dict[str, object]) -> float | str:
    return float(len(text))


def items(*texts: str) -> list[ScoreItem]:
    return [ScoreItem(id=f"{number}", verifier="v", completion=text) for number, text in enumerate(texts)]


@pytest_asyncio.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as opened:
        yield opened


async def client_of(
    stack: AsyncExitStack, urls: Sequence[str], settings: BreakerSettings = SHORT_REST, *, deadline_s: float = 20.0
) -> RewardClient:
    client = RewardClient(
        urls,
        settings=ClientSettings(
            deadline_s=deadline_s,
            margin_s=0.0,
            patience_s=None,
            attempts=3,
            item_attempts=2,
            rests=settings,
            backoff=Backoff(first_s=0.01, max_s=0.02, sleep=asyncio.sleep),
        ),
    )
    return await stack.enter_async_context(client)


async def scoring_of(
    stack: AsyncExitStack, urls: Sequence[str], settings: BreakerSettings = SHORT_REST, *, deadline_s: float = 20.0
) -> GroupScoring:
    return GroupScoring(await client_of(stack, urls, settings, deadline_s=deadline_s))


async def test_a_score_says_who_made_it_where_and_at_which_attempt(stack: AsyncExitStack) -> None:
    broken = ScriptedRewards(length, statuses=[500])
    judge = ScriptedRewards(length, service_id="rewards-1")
    urls = [await stack.enter_async_context(served(each.handle, "/v1/score")) for each in (broken, judge)]

    (record,) = await (await scoring_of(stack, urls)).score(items("abc"))

    assert (record.reward, record.service_id, record.endpoint, record.attempts) == (3.0, "rewards-1", urls[1], 2)


async def test_a_score_is_explained_by_what_the_verifier_said_and_was_given(stack: AsyncExitStack) -> None:
    judge = ScriptedRewards(length, explanation="counted them")
    scoring = await scoring_of(stack, [await stack.enter_async_context(served(judge.handle, "/v1/score"))])
    given = ScoreItem(id="0", verifier="v", completion="abc", arguments={"answer": "drei", "tests": "x" * 5000})

    (plain,) = await scoring.score(items("abc"))
    (record,) = await scoring.score([given])
    short = given.model_copy(update={"arguments": {"tests": "x" * 900}})
    many = await scoring.score([short.model_copy(update={"id": str(number)}) for number in range(600)])

    assert plain.explanation == "counted them"
    assert record.explanation.startswith('counted them\ngiven: {"answer": "drei", "tests": "xxx')
    assert record.explanation.endswith("x…")
    assert len(record.explanation) < 1100
    assert given_text({"answer": "\ud800"}) == 'given: {"answer": "?"}', "halves of characters cannot be sent"
    # All of a group is one message, which has a limit.
    assert sum(len(each.explanation) for each in many) <= 1 << 19


async def test_results_are_put_in_order_by_their_id(stack: AsyncExitStack) -> None:
    url = await stack.enter_async_context(served(ScriptedRewards(length).handle, "/v1/score"))

    records = await (await scoring_of(stack, [url])).score(items("a", "ab", "abc"))

    assert [record.reward for record in records] == [1.0, 2.0, 3.0]


async def test_only_the_items_that_a_service_failed_to_judge_are_asked_for_again(stack: AsyncExitStack) -> None:
    first = ScriptedRewards(lambda text, _: "a worker died" if text == "ab" else 1.0, error_kind="infrastructure")
    second = ScriptedRewards(length)
    urls = [await stack.enter_async_context(served(each.handle, "/v1/score")) for each in (first, second)]

    records = await (await scoring_of(stack, urls)).score(items("a", "ab", "abc"))

    assert [(record.reward, record.attempts) for record in records] == [(1.0, 1), (2.0, 2), (1.0, 1)]
    assert [[item.id for item in asked.items] for asked in second.requests] == [["1"]]


async def test_an_item_that_no_service_can_judge_has_an_error_and_no_reward(stack: AsyncExitStack) -> None:
    judge = ScriptedRewards(lambda text, _: "too slow" if text == "ab" else 1.0, error_kind="infrastructure")
    url = await stack.enter_async_context(served(judge.handle, "/v1/score"))

    good, bad = await (await scoring_of(stack, [url])).score(items("a", "ab"))

    assert (bad.reward, bad.error, bad.error_kind, bad.attempts) == (None, "too slow", "infrastructure", 2)
    assert good.reward == 1.0
    assert len(judge.requests) == 2


async def test_an_error_of_the_data_is_not_asked_for_again(stack: AsyncExitStack) -> None:
    judge = ScriptedRewards(lambda text, _: "no number")
    url = await stack.enter_async_context(served(judge.handle, "/v1/score"))

    (record,) = await (await scoring_of(stack, [url])).score(items("a"))

    assert (record.error_kind, len(judge.requests)) == ("data", 1)


async def test_one_that_hangs_costs_one_deadline_and_not_one_for_each_request(stack: AsyncExitStack) -> None:
    connections: list[asyncio.StreamWriter] = []
    silent = await stack.enter_async_context(hanging(connections))
    judge = ScriptedRewards(length)
    url = await stack.enter_async_context(served(judge.handle, "/v1/score"))
    scoring = await scoring_of(stack, [silent, url], LONG_REST, deadline_s=0.5)

    records = [(await scoring.score(items("a")))[0] for _ in range(10)]

    assert [record.attempts for record in records] == [2] + [1] * 9
    assert len(connections) == 1


async def test_a_probe_of_one_that_hangs_sends_no_items(stack: AsyncExitStack) -> None:
    connections: list[asyncio.StreamWriter] = []
    silent = await stack.enter_async_context(hanging(connections))
    scoring = asyncio.create_task((await scoring_of(stack, [silent], deadline_s=0.2)).score(items("a")))
    await eventually(lambda: len(connections) >= 3)
    scoring.cancel()
    await asyncio.wait([scoring])

    assert scoring.cancelled()


async def test_services_that_are_all_away_are_waited_for_and_named(stack: AsyncExitStack) -> None:
    judge = ScriptedRewards(length, statuses=[503] * 20)
    url = await stack.enter_async_context(served(judge.handle, "/v1/score"))
    client, waits = await client_of(stack, [url]), Waiting()
    waits.started()
    watching = asyncio.create_task(client.watch(waits))
    scoring = asyncio.create_task(GroupScoring(client).score(items("a")))
    await eventually(lambda: not waits.readiness().ready)
    assert url in waits.readiness().waiting_for[0]
    async with asyncio.timeout(60):
        (record,) = await scoring
    await eventually(lambda: waits.readiness().ready)
    watching.cancel()

    assert (record.reward, record.attempts) == (1.0, 21)


async def test_one_that_is_absent_at_the_start_is_asked_once_it_has_come(stack: AsyncExitStack) -> None:
    async with served(ScriptedRewards(length).handle, "/v1/score") as gone:
        port = int(gone.rpartition(":")[2])
    present, late = ScriptedRewards(length), ScriptedRewards(length)
    url = await stack.enter_async_context(served(present.handle, "/v1/score"))
    scoring = await scoring_of(stack, [gone, url])
    assert [(await scoring.score(items("a")))[0].endpoint for _ in range(3)] == [url] * 3
    async with served(late.handle, "/v1/score", port=port), asyncio.timeout(60):
        while (await scoring.score(items("a")))[0].endpoint == url:
            continue
        assert late.requests
    assert (await scoring.score(items("a")))[0].endpoint == url


async def test_a_batch_that_breaks_every_service_is_given_up(stack: AsyncExitStack) -> None:
    judges = [ScriptedRewards(length, statuses=[500] * 9) for _ in range(2)]
    urls = [await stack.enter_async_context(served(each.handle, "/v1/score")) for each in judges]

    with pytest.raises(InfrastructureFailure, match="3 attempts at reward services failed"):
        await (await scoring_of(stack, urls)).score(items("a"))


async def test_a_batch_that_is_refused_is_a_fault_of_the_data(stack: AsyncExitStack) -> None:
    url = await stack.enter_async_context(served(ScriptedRewards(length, statuses=[422]).handle, "/v1/score"))

    with pytest.raises(DataFailure):
        await (await scoring_of(stack, [url])).score(items("a"))


@pytest.mark.parametrize(("name", "given", "kept"), [("part ", 2000, 1280), ("turn_", 1024, 1024)])
async def test_a_verifier_that_says_more_than_a_record_holds_keeps_its_reward(
    stack: AsyncExitStack, name: str, given: int, kept: int
) -> None:
    async def verbose(request: web.Request) -> web.StreamResponse:
        asked = ScoreRequest.model_validate_json(await request.read())
        results = tuple(
            ScoreResult(
                id=item.id,
                verifier=item.verifier,
                reward=1.0,
                components={f"{name}{number}": 1.0 for number in range(given)},
                verifier_version="1" * 5000,
                latency_s=0.0,
            )
            for item in asked.items
        )
        return web.Response(text=ScoreResponse(service_id="verbose", results=results).model_dump_json())

    url = await stack.enter_async_context(served(verbose, "/v1/score"))

    (record,) = await (await scoring_of(stack, [url])).score(items("a"))

    assert (record.reward, len(record.components), len(record.verifier_version)) == (1.0, kept, 1024)


@pytest.mark.parametrize(
    ("texts", "most_bytes", "kept"),
    [
        ([], 8, []),
        (["", "abc", "abcde"], 8, ["", "abc", "abcde"]),
        (["abcdefgh", "a", "abcdef"], 8, ["abc", "a", "abc"]),
        (["é" * 4, "é" * 4], 10, ["éé", "éé"]),
    ],
)
def test_the_longest_texts_of_a_group_are_cut_first(texts: list[str], most_bytes: int, kept: list[str]) -> None:
    assert shortened(texts, most_bytes=most_bytes) == kept
