"""What the service and the process of an encoder say to each other, one JSON object a line.

The process first says `Reply`, without a reward, as every worker does; then it answers each `Texts` with `Encoded`.
"""

from typing import Literal

from pydantic import Field

from protocol.model import WireModel
from protocol.rewards import ScoreError


class EncoderToLoad(WireModel):
    """The model of a worker process. `fingerprint` is that of the files which it is expected to find."""

    path: str
    device: str
    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    pooling: Literal["mean", "first", "last"]
    max_tokens: int = Field(ge=1)
    threads: int = Field(ge=1)
    fingerprint: str


class Texts(WireModel):
    """Texts that are encoded together."""

    texts: tuple[str, ...]


class Encoded(WireModel):
    """An embedding of each text, of length 1, in order, as base64 of float32; or why there is none of one of them."""

    vectors: tuple[str, ...] = ()
    error: ScoreError | None = None
