"""What the service and the process of a reward model say to each other, one JSON object a line.

The process first says `Reply`, without a reward, as every worker does; then it answers each `Batch` with `Rewards`.
"""

from typing import Literal

from pydantic import Field

from protocol.model import WireModel
from protocol.reward_models import RewardFormat, Tokenize
from reward_service.jobs import Reply


class ModelToLoad(WireModel):
    """The model of a worker process. `fingerprint` is that of the files which it is expected to find."""

    path: str
    device: str
    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    threads: int = Field(ge=1)
    batch_tokens: int = Field(ge=1)
    fingerprint: str


class Message(WireModel):
    """A turn of a conversation."""

    role: str
    content: str


class ModelJob(WireModel):
    """One input: `messages` before the completion if `format` is chat, `prompt` if it is plain."""

    format: RewardFormat
    tokenize: Tokenize
    max_tokens: int | None
    messages: tuple[Message, ...]
    prompt: str
    completion: str


class Batch(WireModel):
    """Inputs that are scored together."""

    jobs: tuple[ModelJob, ...]


class Rewards(WireModel):
    """A reply to each job, in order."""

    replies: tuple[Reply, ...]
