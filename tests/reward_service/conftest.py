"""Fixtures: sample verifiers that workers can import, and an open scorer."""

import importlib.metadata
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from protocol.status import Readiness
from reward_service.config import RewardServiceConfig
from reward_service.included import build_registry
from reward_service.requests.scoring import Scorer
from reward_service.service import build_app
from reward_service.verifier.config import CustomVerifier, WorkerConfig
from reward_service.verifier.lanes import make_metrics
from reward_service.verifier.program import SandboxKind
from services.config.models import HttpConfig
from services.http.metrics import Metrics

SAMPLES = (
    "contains",
    "contains_async",
    "hang_on_request",
    "hang_async",
    "cancels_async",
    "cancels_sync",
    "exits_async",
    "exits_sync",
    "blocks_async",
    "knows_its_thread",
    "best_of_group_async",
    "read_pipe",
    "raise_error",
    "reject",
    "not_a_number",
    "returns_text",
    "half_a_character",
    "half_a_name",
    "chatty",
    "die",
    "die_once",
    "too_much_memory",
    "sees_variable",
    "process_id",
)


def config_with_samples(
    *, workers: WorkerConfig, token: str | None = None, max_pending_items: int = 1000, sandbox: SandboxKind = "required"
) -> RewardServiceConfig:
    """A configuration that names every sample verifier."""
    samples = tuple(CustomVerifier(name=name, function=f"sample_verifiers:{name}", version="7") for name in SAMPLES)
    http = HttpConfig.model_validate({"port": 0, "token": token, "max_body_bytes": 100_000})
    return RewardServiceConfig(
        http=http, verifiers=samples, workers=workers, max_pending_items=max_pending_items, sandbox=sandbox
    )


@pytest.fixture(autouse=True)
def importable_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers inherit the service's import path."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


@pytest_asyncio.fixture
async def open_scorer() -> AsyncIterator[Callable[..., Awaitable[Scorer]]]:
    """Opens scorers with the sample verifiers, and closes them after the test."""
    async with AsyncExitStack() as stack:

        async def opened(
            *, workers: WorkerConfig | None = None, max_pending_items: int = 1000, sandbox: SandboxKind = "required"
        ) -> Scorer:
            config = config_with_samples(
                workers=workers or WorkerConfig(count=1), max_pending_items=max_pending_items, sandbox=sandbox
            )
            registry = build_registry(config)
            scorer = Scorer(
                registry=registry,
                config=config,
                metrics=make_metrics(Metrics("reward-service")),
                service_id="rewards-0",
            )
            return await stack.enter_async_context(scorer)

        yield opened


@pytest_asyncio.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    """A client of the real application, which wants the token `secret`."""
    config = config_with_samples(workers=WorkerConfig(count=1), token="secret")
    registry = build_registry(config)
    metrics = Metrics("reward-service")
    async with Scorer(
        registry=registry, config=config, metrics=make_metrics(metrics), service_id="rewards-0"
    ) as scorer:
        app = build_app(
            config=config,
            registry=registry,
            scorer=scorer,
            metrics=metrics,
            readiness=lambda: Readiness(ready=True),
            version=importlib.metadata.version("headway"),
        )
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        headers = {"Authorization": "Bearer secret"}
        async with httpx.AsyncClient(transport=transport, base_url="http://rewards", headers=headers) as opened:
            yield opened
