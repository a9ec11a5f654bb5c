"""Gates before the routes of an application: token, size of the body, and room for the request.

Refusals: answers with status 4xx whose body is a `protocol.status.ErrorBody`.
"""

import hmac
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack

from fastapi import HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from prometheus_client import Counter
from pydantic import JsonValue
from pydantic_core import ErrorDetails
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from protocol.status import ErrorBody, ErrorDetail


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
    response = Response(body, status_code=refusal.status_code, media_type="application/json")
    response.headers.update(refusal.headers or {})
    return response


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


def refusal_of(problems: Sequence[ErrorDetails]) -> RequestRefused:
    """The refusal for a body that does not fit; the first problem is told in full, others are counted."""
    first = problems[0]
    if first["type"] == "json_invalid":
        return RequestRefused(400, "malformed_json", f"the body is not JSON: {first['msg']}")
    parts = [str(part) for part in first["loc"]]
    name = ".".join(parts[1:] if parts[:1] == ["body"] else parts) or "body"
    expected = first["msg"].removeprefix("Value error, ").replace("Input should be ", "", 1)
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return RequestRefused(
        422,
        "unknown_field" if first["type"] == "extra_forbidden" else "invalid_field",
        f"{name}: {first['msg']}{more}",
        field=name,
        expected=expected,
        got=_excerpt(first["input"]),
    )


def _excerpt(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:197] + "..."


# Given the announced bytes of a body before it is read, it raises RequestRefused or lets the request in. What it
# returns is open until the body has been read, or nobody will read it.
Door = Callable[[int], AbstractContextManager[None]]


class BearerToken:
    """Refuses with 401 whoever does not show the token, but at the open paths."""

    def __init__(self, app: ASGIApp, *, token: str, open_paths: Collection[str], refused: Counter) -> None:
        self._app = app
        self._open_paths = open_paths
        self._expected = f"Bearer {token}".encode()
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or scope["path"] in self._open_paths:
            await self._app(scope, receive, send)
            return
        shown = next((value for name, value in scope["headers"] if name == b"authorization"), None)
        if shown is not None and hmac.compare_digest(shown, self._expected):
            await self._app(scope, receive, send)
            return
        got = "none" if shown is None else "another"
        message = f"this service wants 'Authorization: Bearer <token>' with its configured token; got {got}"
        await _send_refusal(RequestRefused(401, "unauthorized", message), self._refused, scope, receive, send)


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
