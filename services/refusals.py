"""Refusals: answers with status 4xx whose body is a `protocol.http.ErrorBody`."""

import math
from collections.abc import Sequence

from fastapi import HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import JsonValue
from pydantic_core import ErrorDetails
from starlette.exceptions import HTTPException as StarletteHTTPException

from protocol.http import ErrorBody, ErrorDetail


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
