"""The FastAPI application of a process: gates before its routes, health, readiness, metrics, clear refusals, and an
OpenAPI document.

A refusal is an answer with status 4xx or 503 whose body is a `protocol.status.ErrorBody`; each is counted by its kind.
"""

from collections.abc import Callable, Collection, Mapping

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from prometheus_client import Counter, generate_latest
from pydantic import SecretStr
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.responses import PlainTextResponse

from protocol.status import ErrorBody, ErrorDetail, Readiness
from services.http.bodies import json_answer
from services.http.gates import BearerToken, BodyLimit, Door, Doors
from services.http.local_callers import LocalCallers
from services.http.metrics import Metrics, one_label
from services.http.openapi import DescribedApp
from services.http.refusals import as_refusal, refused_answer

OPEN_PATHS = frozenset({"/healthz", "/readyz", "/metrics"})
_SHOWN_KINDS = (
    "unauthorized", "body_too_large", "unknown_route", "wrong_method", "malformed_json", "invalid_field",
    "unknown_field", "slow_body", "client_left", "busy", "foreign_caller", "content_type",
)  # fmt: skip
"""Kinds of refusals that the counter shows from the start, as 0; others appear with their first."""


def create_app(
    *,
    service: str,
    version: str,
    token: SecretStr | None,
    readiness: Callable[[], Readiness],
    metrics: Metrics,
    max_body_bytes: int = 64 << 20,
    doors: Mapping[str, Door] | None = None,
    readers: Mapping[str, SecretStr] | None = None,
    open_paths: frozenset[str] = OPEN_PATHS,
    known_as: Collection[str] = (),
) -> FastAPI:
    """An application with `/healthz`, `/readyz` and `/metrics`, to which a process adds its routes.

    Every other route wants `Authorization: Bearer <token>` if there is a token; else LocalCallers look at it.
    Handlers take their body with `json_body`, and refuse by raising RequestRefused. `/openapi.json` describes all of
    it. `doors` are by path. `readers` are tokens that open a folder alone, by its path with a slash behind it, to GET.
    `open_paths` want no token; one that ends in a slash stands for all below it, whose handlers have keys of their own.
    `known_as`: more names of the host.
    """
    app = DescribedApp(
        title=service,
        version=version,
        docs_url=None,
        redoc_url=None,
        responses={"4XX": {"model": ErrorBody}, "5XX": {"model": ErrorBody}},
        wants_token=token is not None,
        open_paths=open_paths,
    )
    refused = metrics.counter(
        "refused_requests", "Requests that were refused, by reason.", labels=("reason",), known=one_label(*_SHOWN_KINDS)
    )
    _add_health_routes(app, service=service, readiness=readiness, metrics=metrics)
    _add_error_handlers(app, refused)
    app.add_middleware(Doors, doors=doors or {}, refused=refused)
    app.add_middleware(BodyLimit, max_bytes=max_body_bytes, refused=refused)
    if token is not None:
        app.add_middleware(BearerToken, token=token, readers=readers or {}, open_paths=open_paths, refused=refused)
    else:
        # Not `open_paths`: pages of the web must not reach the open folders either.
        app.add_middleware(LocalCallers, open_paths=OPEN_PATHS, known_as=known_as, refused=refused)
    return app


def _add_health_routes(app: FastAPI, *, service: str, readiness: Callable[[], Readiness], metrics: Metrics) -> None:
    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        """Answers as long as the process lives."""
        return {"service": service, "status": "alive"}

    @app.get("/readyz", responses={200: {"model": Readiness}, 503: {"model": Readiness}})
    async def readyz() -> Response:
        """200 when the process can work; 503 with whom it waits for, and since when."""
        state = readiness()
        return json_answer(state, status=200 if state.ready else 503)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def prometheus() -> Response:
        """The metrics in the format of Prometheus."""
        return Response(generate_latest(metrics.registry), media_type="text/plain; version=0.0.4; charset=utf-8")


def _add_error_handlers(app: FastAPI, refused: Counter) -> None:
    async def answer(request: Request, error: Exception) -> Response:
        refusal = as_refusal(error, request)
        refused.labels(reason=refusal.problem.kind).inc()
        return refused_answer(refusal)

    async def fail(request: Request, error: Exception) -> Response:
        detail = ErrorDetail(kind="internal", message=f"{type(error).__name__} in the service; its log says more")
        return json_answer(ErrorBody(error=detail), status=500)

    for kind in (RequestValidationError, StarletteHTTPException):
        app.add_exception_handler(kind, answer)
    app.add_exception_handler(Exception, fail)
