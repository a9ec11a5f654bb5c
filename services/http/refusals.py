"""Refusals of requests: an answer with status 4xx or 503 whose body is a `protocol.status.ErrorBody`."""

import difflib
import math
import reprlib
from collections.abc import Sequence
from itertools import islice

from fastapi import HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from prometheus_client import Counter
from pydantic import BaseModel, JsonValue
from pydantic_core import ErrorDetails
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.types import Receive, Scope, Send

from protocol.status import ErrorBody, ErrorDetail

_EXCERPT_CHARS = 200
_CLOSE = 0.7
"""Likeness, of 1, from which a field is taken to be meant."""


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
    """The answer with the refusal's status, headers and ErrorBody."""
    body = ErrorBody(error=refusal.problem).model_dump_json()
    return Response(body, refusal.status_code, refusal.headers, media_type="application/json")


async def send_refusal(
    refusal: RequestRefused, refused: Counter, scope: Scope, receive: Receive, send: Send, *, close: bool = True
) -> None:
    """Answers a request that reaches no route, and counts it in `refused`; with `close` its connection ends."""
    refused.labels(reason=refusal.problem.kind).inc()
    response = refused_answer(refusal)
    if refusal.status_code == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    if close:
        response.headers["Connection"] = "close"
    await response(scope, receive, send)


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
    """The words that name the field that an unknown one is most like, of the model or of a part of it; or none."""
    if model is None or problem["type"] != "extra_forbidden":
        return ""
    schema = model.model_json_schema()
    known = {field for part in (schema, *schema.get("$defs", {}).values()) for field in part.get("properties", ())}
    near = difflib.get_close_matches(str(problem["loc"][-1]), sorted(known), n=1, cutoff=_CLOSE)
    return f"; did you mean {near[0]}?" if near else ""


class _Preview(reprlib.Repr):
    """The beginning of a value's repr, made in a time that does not grow with the value: it may be a whole body."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = _EXCERPT_CHARS

    def repr_dict(self, x: dict[object, object], level: int) -> str:
        """As reprlib has it, of the first items: that would sort all of them."""
        some = super().repr_dict(dict(islice(x.items(), self.maxdict)), level)
        return some if len(x) <= self.maxdict else f"{some[:-1]}, ...}}"


def _excerpt(value: object) -> str:
    text = _Preview().repr(value)
    return text if len(text) <= _EXCERPT_CHARS else text[: _EXCERPT_CHARS - 3] + "..."
