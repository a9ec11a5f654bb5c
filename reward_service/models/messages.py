"""What the service and the process of a model say to each other, one JSON object a line.

The process first says whether it has loaded, as every worker does; then it answers each `ModelBatch` with
`Rewards`, or each `Texts` with `Encoded`.
"""

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from protocol.model import WireModel
from protocol.rewards import RewardFormat, ScoreError, Tokenize
from reward_service.verifier.worker_pool import Reply


class _ToLoad(WireModel):
    """The model of a worker process. `fingerprint` is that of the files which it is expected to find."""

    path: str
    device: str
    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    threads: int = Field(ge=1)
    fingerprint: str


class RewardModelToLoad(_ToLoad):
    """A reward model; `batch_tokens` is the most in one forward pass."""

    kind: Literal["reward_model"] = "reward_model"
    batch_tokens: int = Field(ge=1)


class EncoderToLoad(_ToLoad):
    """An encoder; a text has at most `max_tokens`."""

    kind: Literal["encoder"] = "encoder"
    pooling: Literal["mean", "first", "last"]
    max_tokens: int = Field(ge=1)


ModelToLoad = RewardModelToLoad | EncoderToLoad

_TO_LOAD: TypeAdapter[ModelToLoad] = TypeAdapter(Annotated[ModelToLoad, Field(discriminator="kind")])


def read_model_to_load(text: str) -> ModelToLoad:
    """Of the command line of a worker process."""
    return _TO_LOAD.validate_json(text)


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


class ModelBatch(WireModel):
    """Inputs that are scored together."""

    jobs: tuple[ModelJob, ...]


class Rewards(WireModel):
    """A reply to each job, in order."""

    replies: tuple[Reply, ...]


class Texts(WireModel):
    """Texts that are encoded together."""

    texts: tuple[str, ...]


class Encoded(WireModel):
    """An embedding of each text, of length 1, in order, as base64 of float32; or why there is none of one of them."""

    vectors: tuple[str, ...] = ()
    error: ScoreError | None = None
