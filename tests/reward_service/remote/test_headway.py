"""A verifier of another reward service, over a real socket."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import pytest_asyncio

from protocol.rewards import ScoreItem
from reward_service.config import RewardServiceConfig
from tests.reward_service.scripted_api import HANG, Answer, JsonObject, Refusal, ScriptedApi
from tests.reward_service.serving import OpenService, components, item_of, reachable, serving

TOKEN = "let-me-in"


@pytest.fixture
def there() -> RewardServiceConfig:
    sample = {"name": "contains", "function": "sample_verifiers:contains_async", "version": "7"}
    return RewardServiceConfig.model_validate(
        {"http": {"port": 0, "token": TOKEN}, "verifiers": (sample,), "id": "rewards-1"}
    )


@asynccontextmanager
async def passing_on(url: str, **settings: object) -> AsyncIterator[OpenService]:
    entry = {"name": "far", "url": url, **settings}
    async with serving(RewardServiceConfig.model_validate({"remotes": (entry,)})) as service:
        yield service


@pytest_asyncio.fixture
async def far(there: RewardServiceConfig, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[OpenService]:
    monkeypatch.setenv("FAR_TOKEN", TOKEN)
    async with (
        reachable(there) as url,
        passing_on(url, verifier="contains", api_key_env="FAR_TOKEN", wait_s=0.05) as here,
    ):
        yield here


async def test_a_reward_from_elsewhere_keeps_the_version_of_the_verifier_there(far: OpenService) -> None:
    result = await far.result(item_of("far", "a fox", word="fox"))
    assert (result.reward, result.verifier, result.verifier_version) == (1.0, "far", "7")


async def test_each_item_has_its_own_result_in_order(far: OpenService) -> None:
    items = [item_of("far", text, word="fox") for text in ("a fox", "a dog", "the fox")]
    results = await far.results([one.model_copy(update={"id": f"{at}"}) for at, one in enumerate(items)])
    assert [(result.id, result.reward) for result in results] == [("0", 1.0), ("1", 0.0), ("2", 1.0)]


async def test_errors_keep_their_kind_and_say_where_they_are_from(far: OpenService) -> None:
    kind, message = await far.error(item_of("far", "a fox", other="fox"))
    assert kind == "user"
    assert message.startswith("http://127.0.0.1")
    assert "word" in message


async def test_items_of_several_requests_go_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    api = ScriptedApi(scored)
    async with api.running() as url, passing_on(url, wait_s=0.5, batch_items=3) as here:
        rewards = await asyncio.gather(*(here.reward(item_of("far", text)) for text in ("a", "bb", "ccc")))
    assert rewards == [1.0, 2.0, 3.0]
    assert len(api.bodies) == 1


def of_group(size: int, *, here: int | None = None, verifier: str = "far", name: str = "g") -> list[ScoreItem]:
    """Completions of 1, 2, ... characters, of which `here` are in the request."""
    return [
        item_of(verifier, "x" * number, answer=number).model_copy(
            update={"id": f"{number}", "group": name, "group_size": size}
        )
        for number in range(1, (here or size) + 1)
    ]


@asynccontextmanager
async def comparing(**settings: object) -> AsyncIterator[OpenService]:
    """Passes on to a verifier that compares the completions of a group."""
    best = {"name": "best", "function": "sample_verifiers:best_of_group_async"}
    there = RewardServiceConfig.model_validate({"http": {"port": 0}, "verifiers": (best,)})
    async with reachable(there) as url, passing_on(url, verifier="best", **settings) as here:
        yield here


async def test_a_group_is_compared_elsewhere_as_a_whole() -> None:
    """As it would not be by requests that are filled up item by item: three alone and one of the group first."""
    async with comparing(batch_items=4) as here:
        alone = [item_of("far", "x", answer=0).model_copy(update={"id": f"alone {at}"}) for at in range(3)]
        results = (await here.results([*alone, *of_group(4)]))[3:]
    assert [(result.reward, components(result)) for result in results] == [
        (0.0, {"completions": 4.0}),
        (0.0, {"completions": 4.0}),
        (0.0, {"completions": 4.0}),
        (1.0, {"completions": 4.0}),
    ]


async def test_groups_of_one_name_are_told_apart_and_a_part_of_one_is_refused_there() -> None:
    async with comparing(wait_s=0.2) as here:
        one, other, (lone,) = await asyncio.gather(
            here.results(of_group(2)), here.results(of_group(3)), here.results(of_group(2, here=1))
        )
    assert [[result.reward for result in results] for results in (one, other)] == [[0.0, 1.0], [0.0, 0.0, 1.0]]
    assert lone.error is not None
    assert "holds 1 of them" in lone.error.message


async def test_a_part_of_a_group_is_judged_where_nothing_is_compared() -> None:
    async with ScriptedApi(scored).running() as url, passing_on(url) as here:
        assert [result.reward for result in await here.results(of_group(5, here=2))] == [1.0, 2.0]


def scored(number: int, body: JsonObject) -> Answer:
    """The length of each completion."""
    assert isinstance(body["items"], list)
    results = [
        {"id": item["id"], "verifier": item["verifier"], "reward": len(item["completion"]), "latency_s": 0,
         "verifier_version": "9", "components": {"x": 1}}
        for item in body["items"]
    ]  # fmt: skip
    return {"service_id": "scripted", "results": results}


async def test_components_come_along_and_failed_requests_are_sent_again() -> None:
    api = ScriptedApi(lambda number, body: Refusal(503) if number == 0 else scored(number, body))
    async with api.running() as url, passing_on(url) as here:
        result = await here.result(item_of("far", "abc"))
    assert (result.reward, components(result), result.attempts) == (3.0, {"x": 1.0}, 2)


async def test_an_answer_of_other_items_is_no_reward() -> None:
    def script(number: int, body: JsonObject) -> Answer:
        return {"service_id": "scripted", "results": []}

    api = ScriptedApi(script)
    async with api.running() as url, passing_on(url, limits={"attempts": 2}) as here:
        kind, _ = await here.error(item_of("far", "abc"))
    assert kind == "infrastructure"


async def test_a_service_that_hangs_is_an_error_at_the_deadline() -> None:
    api = ScriptedApi(lambda number, body: HANG)
    async with api.running() as url, passing_on(url) as here:
        kind, message = await here.error(item_of("far", "abc"), deadline_s=0.5)
    assert (kind, message.partition(":")[0]) == ("infrastructure", "deadline")


def test_settings_without_effect_are_refused() -> None:
    entry = {"name": "far", "url": "http://host"}
    for settings, named in (
        ({"limits": {"most_tokens": 5}}, "limits.most_tokens has no effect on kind headway"),
        ({"kind": "openrlhf", "verifier": "x"}, "verifier has no effect on kind openrlhf"),
        ({"limits": {"request_timeout_s": 7200}}, "request_timeout_s is 7200; .* at most 3600 seconds"),
    ):
        with pytest.raises(ValueError, match=named):
            RewardServiceConfig.model_validate({"remotes": ({**entry, **settings},)})
