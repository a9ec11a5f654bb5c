"""The HTTP routes of the reward service."""

from collections.abc import Callable
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Header, Request, Response

from protocol.http import ErrorBody, Readiness
from protocol.rewards import ScoreRequest, ScoreResponse, VerifierList
from reward_service.answering import Answering, Asked
from reward_service.config import RewardServiceConfig
from reward_service.idempotency import Repetitions
from reward_service.registry import Registry
from reward_service.sandbox.execution import Execution, execution_routes
from reward_service.scoring import Scorer
from reward_service.streaming import LINES
from services.http_app import create_app, json_answer, json_body
from services.metrics import Metrics

_KEPT = "names the request: a repetition with the same body gets the same answer, for as long as that is kept"
_Key = Annotated[str, Header(alias="Idempotency-Key", max_length=256, description=_KEPT)]


def build_app(
    *,
    config: RewardServiceConfig,
    registry: Registry,
    scorer: Scorer,
    metrics: Metrics,
    readiness: Callable[[], Readiness],
    version: str,
    execution: Execution | None = None,
) -> FastAPI:
    """The application: `POST /v1/score`, `GET /v1/verifiers` and `POST /v1/execute`.

    The scorer is open for as long as it serves, and `execution` too; without one, programs are refused.
    """
    app = create_app(
        service="reward-service",
        version=version,
        token=config.http.token,
        readiness=readiness,
        metrics=metrics,
        max_body_bytes=config.http.max_body_bytes,
        doors={"/v1/score": lambda size: scorer.admission.arriving(body_bytes=size)},
    )
    repetitions = Repetitions(config=config.idempotency, wait_s=config.max_deadline_s)
    answering = Answering(scorer=scorer, repetitions=repetitions, repeated=scorer.repeated_requests)
    _add_score(app, answering=answering)
    offered = VerifierList(verifiers=tuple(verifier.info() for verifier in registry.all()))

    @app.get("/v1/verifiers", responses={200: {"model": VerifierList}})
    async def verifiers() -> Response:
        """The verifiers that this service offers, with the JSON schema of their arguments."""
        return json_answer(offered)

    app.include_router(execution_routes(execution))
    return app


def _add_score(app: FastAPI, *, answering: Answering) -> None:
    @app.post("/v1/score", responses={200: _answer_forms(), 429: _busy()})
    async def score(
        request: Request,
        asked: Annotated[ScoreRequest, Depends(json_body(ScoreRequest))],
        idempotency_key: _Key = "",
    ) -> Response:
        """Score a batch: a reward or an error for each item.

        With `Accept: application/x-ndjson` the answer is a ScoreResult a line, in the order of finishing.
        """
        whole = Asked(request=asked, body=await request.body(), key=idempotency_key or None)
        streamed = LINES in request.headers.get("accept", "")
        return answering.streamed(whole) if streamed else await answering.whole(whole)


def _busy() -> dict[str, Any]:
    retry = {"description": "in how many seconds there may be room", "schema": {"type": "integer", "minimum": 1}}
    description = "There is no room for the items, or the bytes, now."
    return {"model": ErrorBody, "description": description, "headers": {"Retry-After": retry}}


def _answer_forms() -> dict[str, Any]:
    """The second form refers to a schema that the first brings along."""
    return {"model": ScoreResponse, "content": {LINES: {"schema": {"$ref": "#/components/schemas/ScoreResult"}}}}
