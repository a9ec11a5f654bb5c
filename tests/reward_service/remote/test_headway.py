"""A verifier of another reward service, over a real socket."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import pytest_asyncio

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
