"""The FastAPI application of a process: health, readiness, metrics, clear refusals, and an OpenAPI document of bodies
that handlers parse themselves.

A refusal is an answer with status 4xx whose body is a `protocol.status.ErrorBody`; each is counted by its kind.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterator, Mapping
from typing import Any, Generic, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from prometheus_client import Counter, generate_latest
from pydantic import BaseModel, SecretStr, ValidationError
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from protocol.status import ErrorBody, ErrorDetail, Readiness
from services.http.gates import (
    BearerToken,
    BodyLimit,
    Door,
    Doors,
    RequestRefused,
    as_refusal,
    refusal_of,
    refused_answer,
)
from services.http.metrics import Metrics

_REF = "#/components/schemas/{model}"


class ReadsBody:
    """A FastAPI dependency that reads a request's body as `model`."""

    def __init__(self, model: type[BaseModel]) -> None:
        self.model = model


class DescribedApp(FastAPI):
    """An application whose `/openapi.json` also holds the bodies of `ReadsBody`, and whether a token is wanted."""

    wants_token = False
    open_paths: frozenset[str] = frozenset()

    def openapi(self) -> dict[str, Any]:
        """The document; made once, when all routes are there."""
        if self.openapi_schema is None:
            self.openapi_schema = _with_bodies(super().openapi(), bodies=dict(self._bodies()))
            if self.wants_token:
                _with_token(self.openapi_schema, open_paths=self.open_paths)
        return self.openapi_schema

    def _bodies(self) -> Iterator[tuple[str, type[BaseModel]]]:
        for route in (route for route in self.routes if isinstance(route, APIRoute)):
            for dependency in route.dependant.dependencies:
                if isinstance(dependency.call, ReadsBody):
                    yield route.path, dependency.call.model


def _with_bodies(document: dict[str, Any], *, bodies: Mapping[str, type[BaseModel]]) -> dict[str, Any]:
    """FastAPI's document, to which is added the JSON body of each path whose handler reads one."""
    _, definitions = models_json_schema([(model, "validation") for model in bodies.values()], ref_template=_REF)
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for name, schema in definitions.get("$defs", {}).items():
        schemas.setdefault(name, schema)
    for path, model in bodies.items():
        for operation in document["paths"].get(path, {}).values():
            content = {"application/json": {"schema": {"$ref": _REF.format(model=model.__name__)}}}
            operation["requestBody"] = {"required": True, "content": content}
    return document


def _with_token(document: dict[str, Any], *, open_paths: Collection[str]) -> None:
    """Add that all but the open paths want a bearer token."""
    document["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{"token": []}]
    for path in open_paths:
        for operation in document["paths"].get(path, {}).values():
            operation["security"] = []


OPEN_PATHS = frozenset({"/healthz", "/readyz", "/metrics"})

_BODY_S = 60.0

M = TypeVar("M", bound=BaseModel)


def create_app(
    *,
    service: str,
    version: str,
    token: SecretStr | None,
    readiness: Callable[[], Readiness],
    metrics: Metrics,
    max_body_bytes: int = 64 << 20,
    doors: Mapping[str, Door] | None = None,
) -> FastAPI:
    """An application with `/healthz`, `/readyz` and `/metrics`, to which a process adds its routes.

    Every other route wants `Authorization: Bearer <token>` if there is a token. Handlers take their body with
    `json_body`, and refuse by raising RequestRefused. `/openapi.json` describes all of it. `doors` are by path.
    """
    app = DescribedApp(
        title=service,
        version=version,
        docs_url=None,
        redoc_url=None,
        responses={"4XX": {"model": ErrorBody}, "5XX": {"model": ErrorBody}},
    )
    app.open_paths = OPEN_PATHS
    app.wants_token = token is not None
    install_shell(
        app,
        service=service,
        token=token,
        readiness=readiness,
        metrics=metrics,
        max_body_bytes=max_body_bytes,
        doors=doors,
    )
    return app


def install_shell(
    app: FastAPI,
    *,
    service: str,
    token: SecretStr | None,
    readiness: Callable[[], Readiness],
    metrics: Metrics,
    max_body_bytes: int = 64 << 20,
    doors: Mapping[str, Door] | None = None,
) -> None:
    """Add to an application of somebody else's what `create_app` gives its own."""
    refused = metrics.counter("refused_requests", "Requests that were refused, by reason.", labels=("reason",))
    _add_health_routes(app, service=service, readiness=readiness, metrics=metrics)
    _add_error_handlers(app, refused)
    app.add_middleware(Doors, doors=doors or {}, refused=refused)
    app.add_middleware(BodyLimit, max_bytes=max_body_bytes, refused=refused)
    if token is not None:
        app.add_middleware(BearerToken, token=token.get_secret_value(), open_paths=OPEN_PATHS, refused=refused)


class JsonBody(ReadsBody, Generic[M]):
    """A FastAPI dependency, made by `json_body`. `/openapi.json` names its model as the body of the request."""

    def __init__(self, model: type[M], *, deadline_s: float = _BODY_S) -> None:
        super().__init__(model)
        self._model = model
        self._deadline_s = deadline_s

    async def __call__(self, request: Request) -> M:
        """The body. Raises RequestRefused."""
        try:
            async with asyncio.timeout(self._deadline_s):
                raw = await request.body()
        except TimeoutError as error:
            sender = "the client" if request.client is None else f"{request.client.host}:{request.client.port}"
            message = f"{sender} did not send its body in {self._deadline_s:g} s"
            raise RequestRefused(408, "slow_body", message) from error
        except ClientDisconnect as error:
            raise RequestRefused(499, "client_left", "the client left before it had sent its body") from error
        try:
            return self._model.model_validate_json(raw)
        except ValidationError as error:
            raise refusal_of(error.errors(include_url=False, include_context=False)) from error


def json_body(model: type[M], *, deadline_s: float = _BODY_S) -> JsonBody[M]:
    """A FastAPI dependency that reads the body as `model`: `body: Annotated[Ask, Depends(json_body(Ask))]`.

    Parses the bytes directly, which is faster than FastAPI's way over Python objects, and lets strict models
    take JSON's arrays as tuples. Refuses with 400 what is not JSON, and with 422 what is not the model.
    """
    return JsonBody(model, deadline_s=deadline_s)


def json_answer(body: BaseModel, *, status: int = 200) -> Response:
    """A model as a JSON answer, without FastAPI's second validation."""
    return Response(body.model_dump_json(), status_code=status, media_type="application/json")


def streamed_answer(parts: AsyncIterator[BaseModel]) -> Response:
    """Models as a streamed answer, one JSON object a line.

    The status is sent before the first part, so a RequestRefused that `parts` raises later becomes a last line with an
    ErrorBody. Any other error breaks the connection. A generator is closed when the client goes away.
    """
    return _StreamedAnswer(parts)


class _StreamedAnswer(StreamingResponse):
    """Closes its generators itself: one that was cut off between two parts would wait for the garbage collector."""

    def __init__(self, parts: AsyncIterator[BaseModel]) -> None:
        self._parts = parts
        self._lines = _lines(parts)
        super().__init__(self._lines, media_type="application/x-ndjson")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._lines.aclose()
            if isinstance(self._parts, AsyncGenerator):
                await self._parts.aclose()


async def _lines(parts: AsyncIterator[BaseModel]) -> AsyncGenerator[bytes, None]:
    try:
        async for part in parts:
            yield part.model_dump_json().encode() + b"\n"
            # Writing to a client that left suspends nothing: without this, nobody could stop a ready producer.
            await asyncio.sleep(0)
    except RequestRefused as refusal:
        yield ErrorBody(error=refusal.problem).model_dump_json().encode() + b"\n"


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
