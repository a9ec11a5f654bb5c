"""The service and the client library together, over a socket."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from protocol.rewards import ScoreItem
from protocol.status import Readiness
from reward_service.included import build_registry
from reward_service.requests.scoring import Scorer
from reward_service.service import build_app
from reward_service.verifier.config import WorkerConfig
from reward_service.verifier.lanes import make_metrics
from services.http.metrics import Metrics
from services.http.server import Listener, serve_http
from services.rewards.client import RewardClient
from services.rewards.settings import ClientSettings, HedgeSettings
from tests.reward_service.conftest import config_with_samples


@asynccontextmanager
async def served(*, max_pending_items: int = 1000) -> AsyncIterator[str]:
    """The address of a service with the sample verifiers."""
    config = config_with_samples(workers=WorkerConfig(count=1), max_pending_items=max_pending_items)
    registry, metrics = build_registry(config), Metrics("reward-service")
    scorer = Scorer(registry=registry, config=config, metrics=make_metrics(metrics), service_id="rewards-0")
    async with scorer:
        app = build_app(
            config=config,
            registry=registry,
            scorer=scorer,
            metrics=metrics,
            readiness=lambda: Readiness(ready=True),
            version="0",
        )
        with Listener(host="127.0.0.1", port=0) as listener:
            async with asyncio.TaskGroup() as tasks:
                server = tasks.create_task(serve_http(app, listener))
                yield listener.url
                server.cancel()


def item(text: str, verifier: str = "contains_async", **arguments: str) -> ScoreItem:
    return ScoreItem(id=text, verifier=verifier, completion=text, arguments={"word": "a", **arguments})


async def test_a_mixed_batch_has_each_item_judged_by_its_own_verifier() -> None:
    async with served() as url, RewardClient([url]) as client:
        results = await client.score(
            [
                item("has a", "contains_async"),
                ScoreItem(id="x", verifier="exact_match", completion="4", arguments={"answer": "4"}),
                item("no", "contains_async"),
                ScoreItem(id="y", verifier="nobody", completion="4"),
                ScoreItem(id="z", verifier="exact_match", completion="4", arguments={"anwser": "4"}),
            ]
        )

    assert [one.reward for one in results] == [1.0, 1.0, 0.0, None, None]
    assert [one.error and one.error.kind for one in results[3:]] == ["user", "user"]
    assert {one.service_id for one in results} == {"rewards-0"}
    assert results[0].components == {"length": 5.0}


async def test_calls_that_share_a_streamed_answer_get_each_their_own() -> None:
    settings = ClientSettings(batch_wait_s=0.01, hedging=HedgeSettings(after_s=60.0))
    async with served() as url, RewardClient([url], settings=settings) as client:
        calls = [client.score([item(f"{'a' * (number % 2)}{number}"), item("b")]) for number in range(50)]
        results = await asyncio.gather(*calls)

    assert [[one.reward for one in pair] for pair in results] == [[float(number % 2), 0.0] for number in range(50)]


async def test_more_than_the_service_takes_is_scored_all_the_same() -> None:
    settings = ClientSettings(batch_items=8, batch_wait_s=0.0)
    async with served(max_pending_items=16) as url, RewardClient([url], settings=settings) as client:
        results = await client.score([item(f"a{number}") for number in range(200)])

    assert [one.reward for one in results] == [1.0] * 200


async def test_batches_larger_than_the_service_takes_are_made_smaller() -> None:
    settings = ClientSettings(batch_items=64)
    async with served(max_pending_items=16) as url, RewardClient([url], settings=settings) as client:
        results = await client.score([item(f"a{number}") for number in range(64)])

    assert [one.reward for one in results] == [1.0] * 64
