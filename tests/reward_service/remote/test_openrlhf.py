"""A scripted reward server of OpenRLHF's shape, over a real socket."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from reward_service.config import RewardServiceConfig
from tests.reward_service.scripted_api import BREAK, Answer, JsonObject, Refusal, ScriptedApi
from tests.reward_service.serving import OpenService, components, item_of, serving


@asynccontextmanager
async def asking(api: ScriptedApi, **settings: object) -> AsyncIterator[OpenService]:
    async with api.running() as url:
        entry = {"name": "rm", "kind": "openrlhf", "url": f"{url}/get_reward", "wait_s": 0.05, **settings}
        async with serving(RewardServiceConfig.model_validate({"remotes": (entry,)})) as service:
            yield service


def lengths(body: JsonObject) -> list[float]:
    assert isinstance(body["query"], list)
    return [float(len(query)) for query in body["query"]]


def old(number: int, body: JsonObject) -> Answer:
    return {"rewards": lengths(body)}


def new(number: int, body: JsonObject) -> Answer:
    found = lengths(body)
    logs = {"dummy_scores": found, "names": ["a"] * len(found), "mean": 0.5}
    return {"rewards": found, "scores": [length / 10 for length in found], "extra_logs": logs}


async def test_items_of_all_requests_are_sent_together_in_the_servers_shape() -> None:
    api = ScriptedApi(old)
    async with asking(api, batch_items=2, wait_s=1.0) as service:
        items = (item_of("rm", "b", prompt="a", label="b"), item_of("rm", "cc", prompt="c"))
        assert await asyncio.gather(*map(service.reward, items)) == [2.0, 3.0]
    assert api.paths == ["/get_reward"]
    assert api.bodies == [{"query": ["ab", "ccc"], "prompts": ["a", "c"], "labels": ["b", ""]}]


async def test_scores_and_logged_numbers_become_components() -> None:
    async with asking(ScriptedApi(new)) as service:
        result = await service.result(item_of("rm", "bcd", prompt="a"))
    assert result.reward == 4.0
    assert components(result) == {"score": 0.4, "dummy_scores": 4.0}


@pytest.mark.parametrize("rewards", [3.0, [3.0], [[3.0]], 3])
async def test_other_forms_of_a_reward_are_understood(rewards: object) -> None:
    async with asking(ScriptedApi(lambda number, body: {"rewards": rewards})) as service:
        assert await service.reward(item_of("rm", "b")) == 3.0


@pytest.mark.parametrize("rewards", [[], [1.0, 2.0]])
async def test_a_wrong_number_of_rewards_is_an_error_of_the_infrastructure(rewards: object) -> None:
    async with asking(ScriptedApi(lambda number, body: {"rewards": rewards})) as service:
        kind, message = await service.error(item_of("rm", "b"))
    assert kind == "infrastructure"
    assert f"gave {len(list(rewards if isinstance(rewards, list) else []))} rewards for 1 queries" in message


@pytest.mark.parametrize("reward", ["NaN", "Infinity", "-Infinity"])
async def test_a_reward_that_is_not_finite_is_an_error_of_the_data(reward: str) -> None:
    async with asking(ScriptedApi(lambda number, body: f'{{"rewards": [{reward}]}}')) as service:
        kind, message = await service.error(item_of("rm", "b"))
    assert kind == "data"
    assert "not finite" in message


@pytest.mark.parametrize(
    "answer", [{"rewards": ["high"]}, {"rewards": None}, {"score": [1]}, "<html>", {"rewards": {}}]
)
async def test_nonsense_is_asked_for_again_and_never_a_reward(answer: Answer) -> None:
    api = ScriptedApi(lambda number, body: answer)
    async with asking(api, limits={"attempts": 2}) as service:
        kind, message = await service.error(item_of("rm", "b"))
    assert (kind, len(api.bodies)) == ("infrastructure", 2)
    assert message.startswith("2 attempts failed")


@pytest.mark.parametrize("trouble", [Refusal(500), BREAK, "", Refusal(429)])
async def test_what_may_pass_is_sent_again(trouble: Answer) -> None:
    api = ScriptedApi(lambda number, body: trouble if number == 0 else old(number, body))
    async with asking(api) as service:
        assert await service.reward(item_of("rm", "b")) == 1.0


async def test_an_item_that_gets_null_takes_no_others_along() -> None:
    def script(number: int, body: JsonObject) -> Answer:
        return {"rewards": [None if found == 3 else found for found in lengths(body)]}

    async with asking(ScriptedApi(script), wait_s=1.0, batch_items=3) as service:
        good, bad, other = await service.results([item_of("rm", text) for text in ("a", "bbb", "cc")])
    assert (good.reward, bad.reward, other.reward) == (1.0, None, 2.0)
    assert bad.error is not None
    assert bad.error.kind == "data"
    assert "gave null" in bad.error.message


async def test_a_refused_item_takes_no_others_along() -> None:
    def script(number: int, body: JsonObject) -> Answer:
        assert isinstance(body["query"], list)
        return Refusal(422, "too long") if "bbb" in body["query"] else old(number, body)

    async with asking(ScriptedApi(script), wait_s=1.0, batch_items=3) as service:
        good, bad, other = await service.results([item_of("rm", text) for text in ("a", "bbb", "cc")])
    assert (good.reward, other.reward) == (1.0, 2.0)
    assert bad.error is not None
    assert bad.error.kind == "data"
