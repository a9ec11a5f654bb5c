"""Reward services of a configuration, in the test's own process."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from protocol.rewards import ScoreItem, ScoreRequest, ScoreResult
from protocol.status import Readiness
from reward_service.config import RewardServiceConfig
from reward_service.included import build_registry
from reward_service.requests.scoring import Scorer
from reward_service.service import build_app
from reward_service.verifier.lanes import Registry, make_metrics
from services.http.metrics import Metrics
from services.http.server import Listener, serve_http


def item_of(verifier: str, completion: str, *, prompt: str = "", **arguments: object) -> ScoreItem:
    return ScoreItem.model_validate(
        {"id": "0", "verifier": verifier, "completion": completion, "prompt": prompt, "arguments": arguments}
    )


def components(result: ScoreResult) -> dict[str, float]:
    assert result.reward is not None, result.error
    return result.components


@dataclass(frozen=True)
class OpenService:
    """An open reward service."""

    config: RewardServiceConfig
    registry: Registry
    scorer: Scorer
    metrics: Metrics

    async def results(self, items: Sequence[ScoreItem], *, deadline_s: float = 60.0) -> tuple[ScoreResult, ...]:
        return (await self.scorer.score(ScoreRequest(items=tuple(items), deadline_s=deadline_s))).results

    async def result(self, item: ScoreItem, *, deadline_s: float = 60.0) -> ScoreResult:
        (result,) = await self.results([item], deadline_s=deadline_s)
        return result

    async def reward(self, item: ScoreItem) -> float:
        result = await self.result(item)
        assert result.reward is not None, result.error
        return result.reward

    async def error(self, item: ScoreItem, *, deadline_s: float = 60.0) -> tuple[str, str]:
        result = await self.result(item, deadline_s=deadline_s)
        assert result.reward is None, "a failed score has no reward"
        assert result.error is not None
        return result.error.kind, result.error.message

    def counted(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"headway_reward_service_{name}_total", labels) or 0.0


@asynccontextmanager
async def serving(config: RewardServiceConfig) -> AsyncIterator[OpenService]:
    """The service of a configuration, without HTTP."""
    metrics = Metrics("reward-service")
    registry = build_registry(config)
    scorer = Scorer(registry=registry, config=config, metrics=make_metrics(metrics), service_id="rewards-0")
    async with scorer:
        yield OpenService(config, registry, scorer, metrics)


@asynccontextmanager
async def reachable(config: RewardServiceConfig) -> AsyncIterator[str]:
    """The address of a service on a real socket."""
    async with serving(config) as service:
        app = build_app(
            config=config,
            registry=service.registry,
            scorer=service.scorer,
            metrics=service.metrics,
            readiness=lambda: Readiness(ready=True),
            version="1",
        )
        with Listener(host="127.0.0.1", port=0) as listener:
            server = asyncio.create_task(serve_http(app, listener, finish_s=0))
            try:
                yield listener.url
            finally:
                server.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await server
