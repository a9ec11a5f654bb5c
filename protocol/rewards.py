"""HTTP bodies of the reward service: `POST /v1/score` and `GET /v1/verifiers`."""

from typing import Self

from pydantic import Field, JsonValue, model_validator

from protocol.model import WireModel
from protocol.trajectories import ErrorKind


class ScoreItem(WireModel):
    """One completion to be scored by a named verifier. `arguments` are the verifier's own (the answer, say).

    `deadline_s`, if given, is the item's own limit in seconds; the request's holds all the same.
    """

    id: str = Field(max_length=256)
    verifier: str = Field(min_length=1, max_length=256)
    completion: str = Field(max_length=1 << 20)
    prompt: str = Field(default="", max_length=1 << 20)
    arguments: dict[str, JsonValue] = Field(default_factory=dict, max_length=64)
    deadline_s: float | None = Field(default=None, gt=0, le=3600)


class ScoreRequest(WireModel):
    """A batch. Each item is answered within `deadline_s` seconds, with a reward or with an error.

    With the header `Accept: application/x-ndjson` the answer is a `ScoreResult` a line, in the order of finishing. With
    the header `Idempotency-Key` a repetition is answered as the first request was.
    """

    items: tuple[ScoreItem, ...] = Field(min_length=1, max_length=4096)
    deadline_s: float = Field(default=30.0, gt=0, le=3600)


class ScoreError(WireModel):
    """Why there is no reward. `user`: the request is wrong; `data`: the verifier cannot judge this input;
    `infrastructure`: it might work at another time or place.
    """

    kind: ErrorKind
    message: str = Field(max_length=4096)


class ScoreResult(WireModel):
    """A reward or an error, never a reward of 0 in place of an error.

    `latency_s` counts from the item's arrival; `attempts` are those of the service's own workers; `service_id` names
    the instance. `cached`: the verifier had judged the same before.
    """

    id: str
    verifier: str
    verifier_version: str = ""
    reward: float | None = Field(default=None, allow_inf_nan=False)
    components: dict[str, float] = Field(default_factory=dict)
    latency_s: float = Field(ge=0)
    attempts: int = Field(default=1, ge=1)
    error: ScoreError | None = None
    service_id: str = Field(default="", max_length=256)
    cached: bool = False

    @model_validator(mode="after")
    def _reward_or_error(self) -> Self:
        if (self.reward is None) == (self.error is None):
            raise ValueError("a score result holds either a reward or an error, got both or neither")
        return self


class ScoreResponse(WireModel):
    """Results in the order of the request's items, and the instance that made them."""

    service_id: str = Field(min_length=1, max_length=256)
    results: tuple[ScoreResult, ...]


class VerifierInfo(WireModel):
    """A verifier that the service offers; `arguments_schema` is the JSON schema of its arguments."""

    name: str
    version: str
    description: str
    arguments_schema: dict[str, JsonValue]


class VerifierList(WireModel):
    """`GET /v1/verifiers`."""

    verifiers: tuple[VerifierInfo, ...]
