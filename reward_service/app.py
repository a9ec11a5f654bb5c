"""The HTTP routes of the reward service."""

from collections.abc import Callable
from typing import Annotated

from fastapi import Depends, FastAPI, Response

from protocol.http import Readiness
from protocol.rewards import ScoreRequest, VerifierList
from reward_service.config import RewardServiceConfig
from reward_service.registry import Registry
from reward_service.scoring import Scorer
from services.http_app import create_app, json_answer, json_body
from services.metrics import Metrics


def build_app(
    *,
    config: RewardServiceConfig,
    registry: Registry,
    scorer: Scorer,
    metrics: Metrics,
    readiness: Callable[[], Readiness],
    version: str,
) -> FastAPI:
    """The application: `POST /v1/score` and `GET /v1/verifiers`. The scorer is open for as long as it serves."""
    app = create_app(
        service="reward-service",
        version=version,
        token=config.http.token,
        readiness=readiness,
        metrics=metrics,
        max_body_bytes=config.http.max_body_bytes,
    )
    offered = VerifierList(verifiers=tuple(verifier.info() for verifier in registry.all()))

    @app.post("/v1/score")
    async def score(request: Annotated[ScoreRequest, Depends(json_body(ScoreRequest))]) -> Response:
        return json_answer(await scorer.score(request))

    @app.get("/v1/verifiers")
    async def verifiers() -> Response:
        return json_answer(offered)

    return app
