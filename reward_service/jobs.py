"""What the service and its worker processes say to each other: one JSON object a line."""

from pydantic import Field, JsonValue

from protocol.model import WireModel
from protocol.rewards import ScoreError

MAX_LINE_BYTES = 1 << 22


class Job(WireModel):
    """One submission to be judged, with the verifier's arguments as they came."""

    completion: str
    prompt: str
    arguments: dict[str, JsonValue]


class Reply(WireModel):
    """A worker's answer to a job; its first line, without a reward, says that it is ready or why it cannot be."""

    reward: float | None = None
    components: dict[str, float] = Field(default_factory=dict)
    error: ScoreError | None = None
