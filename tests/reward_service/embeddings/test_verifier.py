"""Similarity by a scripted embedding endpoint, over a real socket."""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from reward_service.config import RewardServiceConfig
from tests.reward_service.scripted_api import Answer, JsonObject, Refusal, ScriptedApi
from tests.reward_service.serving import OpenService, components, item_of, serving

ANGLES = {"north": 0.0, "east": 90.0, "northeast": 45.0, "south": 180.0, "tall north": 0.0, "q: north": 0.0}
TOKENS = 5


def vector(text: str) -> list[float]:
    """Of a length that is not 1, as some models give it."""
    angle = math.radians(ANGLES[text])
    return [3 * math.cos(angle), 3 * math.sin(angle)]


def texts(body: JsonObject) -> list[str]:
    assert isinstance(body["input"], list)
    return body["input"]


def well(number: int, body: JsonObject) -> Answer:
    """The last one first, since order is by index."""
    data = [{"index": at, "embedding": vector(text), "object": "embedding"} for at, text in enumerate(texts(body))]
    return {"object": "list", "data": data[::-1], "usage": {"total_tokens": TOKENS, "prompt_tokens": TOKENS}}


@asynccontextmanager
async def comparing(api: ScriptedApi, **settings: object) -> AsyncIterator[OpenService]:
    async with api.running() as url:
        entry = {"name": "close", "url": f"{url}/v1", "model": "m", "wait_s": 0.05, **settings}
        async with serving(RewardServiceConfig.model_validate({"embeddings": (entry,)})) as service:
            yield service


@pytest.mark.parametrize(
    ("completion", "similarity"),
    [("north", 1.0), ("east", 0.0), ("south", -1.0), ("northeast", math.sqrt(0.5)), ("<think>east</think>north", 1.0)],
)
async def test_the_reward_is_the_cosine(completion: str, similarity: float) -> None:
    async with comparing(ScriptedApi(well)) as service:
        result = await service.result(item_of("close", completion, references=["north"]))
    assert result.reward == pytest.approx(similarity, abs=1e-6)
    assert result.verifier_version.startswith("1+m+")
    assert service.counted("asked_tokens", verifier="close") == TOKENS


async def test_of_several_references_the_closest_counts_or_their_mean() -> None:
    async with comparing(ScriptedApi(well)) as service:
        best = await service.reward(item_of("close", "north", references=["south", "northeast", "east"]))
        mean = await service.reward(item_of("close", "north", references=["south", "northeast", "east"], pick="mean"))
    assert best == pytest.approx(math.sqrt(0.5))
    assert mean == pytest.approx((-1 + math.sqrt(0.5)) / 3)


async def test_texts_of_all_requests_go_in_one_request_each_once() -> None:
    api = ScriptedApi(well)
    async with comparing(api, wait_s=1.0, batch_texts=3) as service:
        items = [item_of("close", text, references=["north"]) for text in ("north", "east", "south")]
        await asyncio.gather(*map(service.reward, items))
        await asyncio.gather(*map(service.reward, items))
    assert [sorted(texts(body)) for body in api.bodies] == [["east", "north", "south"]]


async def test_an_empty_completion_is_close_to_nothing_and_says_so() -> None:
    api = ScriptedApi(well)
    async with comparing(api) as service:
        result = await service.result(item_of("close", "<think>north</think> \n", references=["north"]))
    assert (result.reward, components(result)) == (0.0, {"empty": 1.0})
    assert api.bodies == []


async def test_a_prefix_and_further_fields_are_sent() -> None:
    api = ScriptedApi(well)
    async with comparing(api, prefix="q: ", extra={"dimensions": 2}) as service:
        await service.reward(item_of("close", "north", references=["north"]))
    assert api.bodies == [{"model": "m", "input": ["q: north"], "dimensions": 2}]


def shortened(number: int, body: JsonObject) -> Answer:
    return {"data": [{"index": 0, "embedding": [1.0, 0.0]}]}


def uneven(number: int, body: JsonObject) -> Answer:
    return {"data": [{"index": at, "embedding": [1.0] * (at + 1)} for at, _ in enumerate(texts(body))]}


def twice(number: int, body: JsonObject) -> Answer:
    return {"data": [{"index": 0, "embedding": [1.0]} for _ in texts(body)]}


def zero(number: int, body: JsonObject) -> Answer:
    return {"data": [{"index": at, "embedding": [0.0, 0.0]} for at, _ in enumerate(texts(body))]}


def not_finite(number: int, body: JsonObject) -> Answer:
    return '{"data": [{"index": 0, "embedding": [NaN, 1]}, {"index": 1, "embedding": [1, 1]}]}'


def nonsense(number: int, body: JsonObject) -> Answer:
    return {"data": [{"index": 0, "embedding": "AAAA"}]}


@pytest.mark.parametrize("script", [shortened, uneven, twice, zero, not_finite, nonsense])
async def test_an_answer_that_holds_no_similarity_is_an_error_of_the_infrastructure_and_never_a_reward(
    script: object,
) -> None:
    assert callable(script)
    async with comparing(ScriptedApi(script), limits={"attempts": 1}) as service:
        kind, _ = await service.error(item_of("close", "north", references=["east"]))
    assert kind == "infrastructure"


async def test_a_text_that_is_refused_takes_no_other_item_along() -> None:
    api = ScriptedApi(lambda number, body: Refusal(400, "too long") if "east" in texts(body) else well(number, body))
    async with comparing(api, wait_s=1.0, batch_texts=3) as service:
        items = [item_of("close", text, references=["north"]) for text in ("tall north", "east")]
        good, bad = await service.results(items)
    assert good.reward == pytest.approx(1.0)
    assert bad.error is not None
    assert bad.error.kind == "data"


async def test_a_similarity_needs_references() -> None:
    async with comparing(ScriptedApi(well)) as service:
        for wrong in (
            item_of("close", "north"),
            item_of("close", "north", references=[]),
            item_of("close", "north", references=[""]),
            item_of("close", "north", reference="north"),
        ):
            assert (await service.error(wrong))[0] == "user"


async def test_a_text_without_a_direction_takes_no_others_along() -> None:
    def script(number: int, body: JsonObject) -> Answer:
        found = [[0.0, 0.0] if text == "east" else vector(text) for text in texts(body)]
        return {"data": [{"index": at, "embedding": embedding} for at, embedding in enumerate(found)]}

    async with comparing(ScriptedApi(script), wait_s=1.0, batch_texts=3) as service:
        items = [item_of("close", text, references=["north"]) for text in ("north", "east", "south")]
        good, bad, other = await service.results(items)
    assert good.reward == pytest.approx(1.0)
    assert other.reward == pytest.approx(-1.0)
    assert bad.error is not None
    assert "no direction" in bad.error.message
