"""The reward service from its configuration to its end: verifiers, workers, HTTP routes and status."""

import asyncio
import gc
import importlib.metadata
import logging
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Annotated, Any, TypeVar

from fastapi import Depends, FastAPI, Header, Request, Response

from protocol.rewards import ScoreRequest, ScoreResponse, VerifierList
from protocol.status import ErrorBody, QueueStatus, Readiness, Report
from reward_service.config import RewardServiceConfig
from reward_service.endpoints.remote import GetRewardQuestion, GetRewardReply
from reward_service.execution.execution import Execution, execution_routes, open_execution
from reward_service.included import build_registry
from reward_service.requests.answering import LINES, Repetitions, RequestHandler, ScoreCall
from reward_service.requests.scoring import Scorer
from reward_service.sandbox.pool import open_sandboxes
from reward_service.verifier.lanes import Registry, Verifier, make_metrics
from reward_service.verifier.submission import UserError
from services.http.app import create_app
from services.http.bodies import json_answer, json_body
from services.http.gpu_metrics import GpuMetrics
from services.http.metrics import Metrics
from services.http.refusals import RequestRefused
from services.http.server import Listener, serve_http
from services.http.status import add_status_route, recent_failures
from services.http.waiting import Waiting
from services.load import LoadSample, LoadWindow
from services.process import Stop, WrongSettings, run_loops
from services.tracing import exporting_traces

logger = logging.getLogger(__name__)

_KEPT = "names the request: a repetition with the same body gets the same answer, for as long as that is kept"
_Key = Annotated[str, Header(alias="Idempotency-Key", max_length=256, description=_KEPT)]
PROCESS = "reward-service"
T = TypeVar("T")


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
    answering = RequestHandler(scorer=scorer, repetitions=repetitions, repeated=scorer.repeated_requests)
    _add_score(app, answering=answering)
    offered = VerifierList(verifiers=tuple(verifier.info() for verifier in registry.all()))

    _add_get_reward(app, scorer=scorer, offered={verifier.name for verifier in offered.verifiers})

    @app.get("/v1/verifiers", responses={200: {"model": VerifierList}})
    async def verifiers() -> Response:
        """The verifiers that this service offers, with the JSON schema of their arguments."""
        return json_answer(offered)

    app.include_router(execution_routes(execution))
    return app


def _add_score(app: FastAPI, *, answering: RequestHandler) -> None:
    @app.post("/v1/score", responses={200: _answer_forms(), 429: _busy()})
    async def score(
        request: Request,
        asked: Annotated[ScoreRequest, Depends(json_body(ScoreRequest))],
        idempotency_key: _Key = "",
    ) -> Response:
        """Score a batch: a reward or an error for each item.

        With `Accept: application/x-ndjson` the answer is a ScoreResult a line, in the order of finishing.
        """
        refuse_twins(asked)
        whole = ScoreCall(request=asked, body=await request.body(), key=idempotency_key or None)
        streamed = LINES in request.headers.get("accept", "")
        return answering.streamed(whole) if streamed else await answering.whole(whole)


def refuse_twins(asked: ScoreRequest) -> None:
    """Raises RequestRefused for ids that several items have: nobody could tell their results apart."""
    ids = Counter(item.id for item in asked.items)
    if twins := [name for name, count in ids.items() if count > 1]:
        shown = ", ".join(repr(name[:80]) for name in twins[:5]) + (" and others" if len(twins) > 5 else "")
        raise RequestRefused(422, "duplicate_id", f"items: the id {shown} is given more than once; give each its own")


def _add_get_reward(app: FastAPI, *, scorer: Scorer, offered: Collection[str]) -> None:
    answers: dict[int | str, dict[str, Any]] = {200: {"model": GetRewardReply}, **_refusals(404, 422)}

    @app.post("/get_reward/{verifier}", responses=answers)
    async def get_reward(
        verifier: str, asked: Annotated[GetRewardQuestion, Depends(json_body(GetRewardQuestion))]
    ) -> Response:
        """Score as a reward server of OpenRLHF is asked, by the verifier that the path names: `remote_rm_url`.

        A label is the verifier's `answer`; one that is a JSON object is its arguments. That shape knows no errors: if
        one item has no reward, none has, and the answer is 422 or, if it might work at another time, 503.
        """
        if verifier not in offered:
            message = f"unknown verifier {verifier!r}; this service offers: {', '.join(sorted(offered))}"
            raise RequestRefused(404, "unknown_verifier", message)
        request = ScoreRequest(items=tuple(asked.items(verifier)))
        with scorer.admission.held(body_bytes=sum(map(len, asked.query)), items=len(request.items)):
            response = await scorer.score(request)
        for result in response.results:
            if result.error is not None:
                status = 503 if result.error.kind == "infrastructure" else 422
                raise RequestRefused(status, "no_reward", f"item {result.id}: {result.error.message}")
        rewards = tuple(result.reward for result in response.results if result.reward is not None)
        return json_answer(GetRewardReply(rewards=rewards, scores=rewards))


def _refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": ErrorBody} for status in statuses}


def _busy() -> dict[str, Any]:
    retry = {"description": "in how many seconds there may be room", "schema": {"type": "integer", "minimum": 1}}
    description = "There is no room for the items, or the bytes, now."
    return {"model": ErrorBody, "description": description, "headers": {"Retry-After": retry}}


def _answer_forms() -> dict[str, Any]:
    """The second form refers to a schema that the first brings along."""
    return {"model": ScoreResponse, "content": {LINES: {"schema": {"$ref": "#/components/schemas/ScoreResult"}}}}


class RewardServiceStatus:
    """Reads the scorer."""

    def __init__(self, *, name: str, scorer: Scorer, most_pending: int) -> None:
        self._name = name
        self._scorer = scorer
        self._most_pending = most_pending
        self.load = LoadWindow(self._look, limit=lambda: None)

    def _look(self) -> LoadSample:
        """Items in workers; where none is in any, all at hand: their verifiers judge at once, or ask others."""
        return LoadSample(done=self._scorer.scored, running=self._scorer.workers()[0] or self._scorer.pending)

    def report(self) -> Report:
        """The reward service's part of its status."""
        busy, workers = self._scorer.workers()
        return Report(
            id=self._name,
            load=self.load.status(),
            usage=self.load.usage,
            queues=(
                QueueStatus(name="items", depth=self._scorer.pending, limit=self._most_pending),
                QueueStatus(name="busy workers", depth=busy, limit=workers),
            ),
        )


def _registry(config: RewardServiceConfig, more: Iterable[Verifier]) -> Registry:
    try:
        return Registry([*build_registry(config).all(), *more])
    except UserError as error:
        raise WrongSettings(str(error)) from error


@asynccontextmanager
async def _as_set(opening: AbstractAsyncContextManager[T]) -> AsyncIterator[T]:
    """Enters `opening`. Raises WrongSettings in place of a UserError by which that fails."""
    async with AsyncExitStack() as stack:
        try:
            opened = await stack.enter_async_context(opening)
        except UserError as error:
            raise WrongSettings(str(error)) from error
        except ExceptionGroup as failed:  # it came through the task groups of what had been opened by then
            if (first := _first_of(failed)) is None:
                raise
            raise WrongSettings(str(first)) from failed
        yield opened


def _first_of(failed: ExceptionGroup[Exception]) -> UserError | None:
    """The first error of a group that holds nothing but errors of the user."""
    known, others = failed.split(UserError)
    if known is None or others is not None:
        return None
    error: Exception = known
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error if isinstance(error, UserError) else None


async def serve(
    config: RewardServiceConfig,
    stop: Stop,
    *,
    more: Iterable[Verifier] = (),
    listening: Callable[[str], None] | None = None,
) -> None:
    """Serve until a stop is requested, then finish what runs. `more` verifiers are those of a caller in this process,
    which is told the address that it is `listening` at.

    Raises WrongSettings for verifiers and reward models that cannot be loaded, for lanes that cannot be opened as they
    are set and for a sandbox that cannot be had, AddressInUse for a taken port.
    """
    metrics, waiting = Metrics(PROCESS, run=config.run.name), Waiting()
    registry = _registry(config, more)
    with (
        exporting_traces(PROCESS, **config.run.traces),
        Listener(host=config.http.host, port=config.http.port, tls=config.http.tls) as listener,
        recent_failures() as failures,
    ):
        service_id = config.id or f"{socket.gethostname()}:{listener.port}"
        async with (
            _as_set(open_sandboxes(kind=config.sandbox, config=config.execution)) as sandboxes,
            open_execution(sandboxes, config.execution) as execution,
            _as_set(Scorer(
                registry=registry, config=config, metrics=make_metrics(metrics), service_id=service_id,
                sandbox=None if sandboxes is None else sandboxes.programs,
            )) as scorer,
        ):  # fmt: skip
            app = build_app(
                config=config,
                registry=registry,
                scorer=scorer,
                metrics=metrics,
                readiness=waiting.readiness,
                version=importlib.metadata.version("headway"),
                execution=execution,
            )
            status = RewardServiceStatus(name=listener.url, scorer=scorer, most_pending=config.max_pending_items)
            add_status_route(
                app, service="reward-service", version=importlib.metadata.version("headway"), waits=waiting,
                failures=failures, stopping=lambda: stop.requested, provider=status.report,
            )  # fmt: skip
            # What is loaded by now stays: without this, each full collection looks at all of it and holds up requests.
            gc.freeze()
            async with asyncio.TaskGroup() as tasks:
                serving = run_loops(http=serve_http(app, listener), load=status.load.run(gpus=GpuMetrics(metrics).show))
                http = tasks.create_task(serving, name="http")
                loading = tasks.create_task(_load(scorer, waiting), name="loading")
                if listening is not None:
                    listening(listener.url)
                await stop.wait()
                loading.cancel()
                with waiting.wait("its last items to be scored", quiet_s=0.5):
                    if not await scorer.drain(timeout_s=config.drain_s):
                        logger.warning("some items were not scored within %g s and are given up", config.drain_s)
                http.cancel()


async def _load(scorer: Scorer, waiting: Waiting) -> None:
    with waiting.wait("its reward models to be loaded", quiet_s=0.5):
        try:
            await scorer.loaded()
        except UserError as error:
            raise WrongSettings(str(error)) from error
    waiting.started()
