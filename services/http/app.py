"""The FastAPI application of a process: the gates before its routes (token, size of the body, room for the request),
health, readiness, metrics, clear refusals, and an OpenAPI document of bodies that handlers parse themselves.

A refusal is an answer with status 4xx whose body is a `protocol.status.ErrorBody`; each is counted by its kind.
"""

import asyncio
import difflib
import hmac
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Generic, TypeVar

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from prometheus_client import Counter, generate_latest
from pydantic import BaseModel, JsonValue, SecretStr, ValidationError
from pydantic.json_schema import models_json_schema
from pydantic_core import ErrorDetails
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from protocol.status import ErrorBody, ErrorDetail, Readiness
from services.http.local_callers import LocalCallers
from services.http.metrics import Metrics, one_label

_REF = "#/components/schemas/{model}"
OPEN_PATHS = frozenset({"/healthz", "/readyz", "/metrics"})
_BODY_S = 60.0
_REFUSALS = (
    "unauthorized", "body_too_large", "unknown_route", "wrong_method", "malformed_json", "invalid_field",
    "unknown_field", "slow_body", "client_left", "busy", "foreign_caller", "content_type",
)  # fmt: skip
M = TypeVar("M", bound=BaseModel)


class RequestRefused(HTTPException):
    """A request that cannot be served; answered with `status` and an ErrorBody, counted under `kind`.

    `retry_after_s`: in how many seconds it may be served, told in whole seconds in the header Retry-After.
    """

    def __init__(
        self,
        status: int,
        kind: str,
        message: str,
        *,
        field: str | None = None,
        expected: JsonValue = None,
        got: JsonValue = None,
        retry_after_s: float | None = None,
    ) -> None:
        headers = None if retry_after_s is None else {"Retry-After": str(max(1, math.ceil(retry_after_s)))}
        super().__init__(status, message, headers)
        self.problem = ErrorDetail(kind=kind, message=message, field=field, expected=expected, got=got)


def refused_answer(refusal: RequestRefused) -> Response:
    """The answer that tells it."""
    body = ErrorBody(error=refusal.problem).model_dump_json()
    return Response(body, refusal.status_code, refusal.headers, media_type="application/json")


def as_refusal(error: Exception, request: Request) -> RequestRefused:
    """The refusal that FastAPI or Starlette means by an error of theirs."""
    if isinstance(error, RequestRefused):
        return error
    if isinstance(error, RequestValidationError):
        return refusal_of(error.errors())
    assert isinstance(error, StarletteHTTPException), error
    kinds = {404: "unknown_route", 405: "wrong_method"}
    message = f"{request.method} {request.url.path}: {error.detail}"
    refusal = RequestRefused(error.status_code, kinds.get(error.status_code, "http"), message)
    refusal.headers = error.headers
    return refusal


def refusal_of(problems: Sequence[ErrorDetails], model: type[BaseModel] | None = None) -> RequestRefused:
    """The refusal for a body that does not fit; an unknown field, or else the first problem, is told in full."""
    first = next((problem for problem in problems if problem["type"] == "extra_forbidden"), problems[0])
    if first["type"] == "json_invalid":
        return RequestRefused(400, "malformed_json", f"the body is not JSON: {first['msg']}")
    parts = [str(part) for part in first["loc"]]
    name = ".".join(parts[1:] if parts[:1] == ["body"] else parts) or "body"
    expected = first["msg"].removeprefix("Value error, ").replace("Input should be ", "", 1)
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return RequestRefused(
        422,
        "unknown_field" if first["type"] == "extra_forbidden" else "invalid_field",
        f"{name}: {first['msg']}{_meant(first, model)}{more}",
        field=name, expected=expected, got=_excerpt(first["input"]),
    )  # fmt: skip


def _meant(problem: ErrorDetails, model: type[BaseModel] | None) -> str:
    schema = {} if problem["type"] != "extra_forbidden" or model is None else model.model_json_schema()
    fields = {name for part in (schema, *schema.get("$defs", {}).values()) for name in part.get("properties", ())}
    near = difflib.get_close_matches("".join(map(str, problem["loc"][-1:])), sorted(fields), n=1, cutoff=0.7)
    return f"; did you mean {near[0]}?" if near else ""


def _excerpt(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:197] + "..."


# Given the announced bytes of a body before it is read, it raises RequestRefused or lets the request in. What it
# returns is open until the body has been read, or nobody will read it.
Door = Callable[[int], AbstractContextManager[None]]


class BearerToken:
    """Refuses with 401 whoever does not show the token, but at the open paths, and below those that end in a slash;
    "/" is the one page and not what is below it.
    """

    def __init__(self, app: ASGIApp, *, token: str, open_paths: Collection[str], refused: Counter) -> None:
        self._app = app
        self._open_folders = tuple(path for path in open_paths if path.endswith("/") and path != "/")
        self._open_paths = open_paths
        self._expected = f"Bearer {token}".encode()
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or self._is_open(scope["path"]):
            await self._app(scope, receive, send)
            return
        shown = next((value for name, value in scope["headers"] if name == b"authorization"), None)
        if shown is not None and hmac.compare_digest(shown, self._expected):
            await self._app(scope, receive, send)
            return
        got = "none" if shown is None else "another"
        message = f"this service wants 'Authorization: Bearer <token>' with its configured token; got {got}"
        await _send_refusal(RequestRefused(401, "unauthorized", message), self._refused, scope, receive, send)

    def _is_open(self, path: str) -> bool:
        return path in self._open_paths or path.startswith(self._open_folders)


class Doors:
    """Refuses a request to a path with a door at once, which costs far less than to route it and to read it.

    The connection is kept: a client that is told to come again will.
    """

    def __init__(self, app: ASGIApp, *, doors: Mapping[str, Door], refused: Counter) -> None:
        self._app = app
        self._doors = doors
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        door = self._doors.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if door is None:
            await self._app(scope, receive, send)
            return
        with ExitStack() as arriving:
            try:
                arriving.enter_context(door(_announced_bytes(scope)))
            except RequestRefused as refusal:
                await _send_refusal(refusal, self._refused, scope, receive, send, close=False)
                return

            async def received() -> Message:
                message = await receive()
                if not message.get("more_body", False):
                    arriving.close()
                return message

            await self._app(scope, received, send)


def _announced_bytes(scope: Scope) -> int:
    announced = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
    return int(announced) if announced.isdigit() else 0


class BodyLimit:
    """Refuses with 413 a body over the limit, announced or not."""

    def __init__(self, app: ASGIApp, *, max_bytes: int, refused: Counter) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if (announced := _announced_bytes(scope)) > self._max_bytes:
            await _send_refusal(self._too_large(announced), self._refused, scope, receive, send)
            return
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._max_bytes:
                raise self._too_large(seen)
            return message

        await self._app(scope, counted, send)

    def _too_large(self, size: int) -> RequestRefused:
        message = f"a body of at least {size} bytes; at most {self._max_bytes} are taken"
        return RequestRefused(413, "body_too_large", message, expected=self._max_bytes, got=size)


async def _send_refusal(
    refusal: RequestRefused, refused: Counter, scope: Scope, receive: Receive, send: Send, *, close: bool = True
) -> None:
    refused.labels(reason=refusal.problem.kind).inc()
    response = refused_answer(refusal)
    if refusal.status_code == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    if close:
        response.headers["Connection"] = "close"
    await response(scope, receive, send)


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


def create_app(
    *,
    service: str,
    version: str,
    token: SecretStr | None,
    readiness: Callable[[], Readiness],
    metrics: Metrics,
    max_body_bytes: int = 64 << 20,
    doors: Mapping[str, Door] | None = None,
    open_paths: frozenset[str] = OPEN_PATHS,
    known_as: Collection[str] = (),
) -> FastAPI:
    """An application with `/healthz`, `/readyz` and `/metrics`, to which a process adds its routes.

    Every other route wants `Authorization: Bearer <token>` if there is a token; else LocalCallers look at it.
    Handlers take their body with `json_body`, and refuse by raising RequestRefused. `/openapi.json` describes all of
    it. `doors` are by path.
    `open_paths` want no token; one that ends in a slash stands for all below it, whose handlers have keys of their own.
    `known_as`: more names of the host.
    """
    app = DescribedApp(
        title=service,
        version=version,
        docs_url=None,
        redoc_url=None,
        responses={"4XX": {"model": ErrorBody}, "5XX": {"model": ErrorBody}},
    )
    app.open_paths = open_paths
    app.wants_token = token is not None
    refused = metrics.counter(
        "refused_requests", "Requests that were refused, by reason.", labels=("reason",), known=one_label(*_REFUSALS)
    )
    _add_health_routes(app, service=service, readiness=readiness, metrics=metrics)
    _add_error_handlers(app, refused)
    app.add_middleware(Doors, doors=doors or {}, refused=refused)
    app.add_middleware(BodyLimit, max_bytes=max_body_bytes, refused=refused)
    if token is not None:
        app.add_middleware(BearerToken, token=token.get_secret_value(), open_paths=open_paths, refused=refused)
        return app

    async def refuse(status: int, kind: str, message: str, scope: Scope, receive: Receive, send: Send) -> None:
        await _send_refusal(RequestRefused(status, kind, message), refused, scope, receive, send)

    app.add_middleware(LocalCallers, open_paths=OPEN_PATHS, known_as=known_as, refuse=refuse)
    return app


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
            raise refusal_of(error.errors(include_url=False, include_context=False), self._model) from error


def json_body(model: type[M], *, deadline_s: float = _BODY_S) -> JsonBody[M]:
    """A FastAPI dependency that reads the body as `model`: `body: Annotated[Ask, Depends(json_body(Ask))]`.

    Parses the bytes directly, which is faster than FastAPI's way over Python objects, and lets strict models
    take JSON's arrays as tuples. Refuses with 400 what is not JSON, and with 422 what is not the model.
    """
    return JsonBody(model, deadline_s=deadline_s)


def json_answer(body: BaseModel, *, status: int = 200) -> Response:
    """A model as a JSON answer, without FastAPI's second validation."""
    return Response(body.model_dump_json(), status_code=status, media_type="application/json")


def streamed_answer(parts: AsyncIterator[BaseModel | tuple[BaseModel, ...]]) -> Response:
    """Models as a streamed answer, one JSON object a line; those of a tuple are written in one piece.

    The status is sent before the first part, so a RequestRefused that `parts` raises later becomes a last line with an
    ErrorBody. Any other error breaks the connection. A generator is closed when the client goes away.
    """
    return _StreamedAnswer(parts)


class _StreamedAnswer(StreamingResponse):
    """Closes its generators itself: one that was cut off between two parts would wait for the garbage collector."""

    def __init__(self, parts: AsyncIterator[BaseModel | tuple[BaseModel, ...]]) -> None:
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


async def _lines(parts: AsyncIterator[BaseModel | tuple[BaseModel, ...]]) -> AsyncGenerator[bytes, None]:
    try:
        async for some in parts:
            together = some if isinstance(some, tuple) else (some,)
            yield "".join([part.model_dump_json() + "\n" for part in together]).encode()
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
