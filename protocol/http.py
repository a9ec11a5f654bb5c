"""HTTP bodies that every service shares."""

from pydantic import Field, JsonValue

from protocol.model import WireModel


class ErrorDetail(WireModel):
    """What was wrong, where, what was expected and what arrived."""

    kind: str
    message: str
    field: str | None = None
    expected: JsonValue = None
    got: JsonValue = None


class ErrorBody(WireModel):
    """The body of every answer with status 4xx or 5xx."""

    error: ErrorDetail


class Readiness(WireModel):
    """`/readyz`: ready, or whom the process waits for, and since how many seconds."""

    ready: bool
    waiting_for: tuple[str, ...] = ()
    waiting_s: float = Field(default=0.0, ge=0)
