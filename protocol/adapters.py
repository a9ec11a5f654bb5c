"""HTTP bodies of the generator's adapter routes: `POST /v1/adapters/sample` and `/v1/adapters/offer`.

An adapter is a low-rank addition to the weights that a generator serves. A target is what a sampling session samples
from: the base model, an adapter that never changes, or one that is replaced by newer versions while it is sampled from.
Generators fetch what they do not hold: `GET SOURCE/v1/adapters/NAME/FILE`, once for each of ADAPTER_FILES.
"""

import hashlib
from collections.abc import Sequence
from typing import Annotated

from pydantic import Field, ValidationInfo, field_validator

from protocol.generation import MAX_TOP_LOGPROBS, TokenId
from protocol.model import WireModel
from protocol.trajectories import FinishReason

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
"""Of an adapter, in peft's format."""
WHOLE_FILES = ("config.json", "model.safetensors")
"""Of all weights, in transformers' format, which take the place of the model's own."""
MAX_ADAPTER_BYTES = 1 << 32
MAX_LIKELIEST = 1 << 23
"""Likeliest tokens in all completions of a request: more are an answer beyond the 256 MiB that a learner takes, after
gigabytes in the generator.
"""

TargetId = Annotated[str, Field(min_length=1, max_length=512)]


def adapter_name(files: Sequence[bytes]) -> str:
    """Name of an adapter's bytes, those of ADAPTER_FILES (or WHOLE_FILES) in order: 64 hexadecimal digits."""
    digest = hashlib.sha256()
    for data in files:
        digest.update(len(data).to_bytes(8, "big"))
        digest.update(data)
    return digest.hexdigest()


class OfferedAdapter(WireModel):
    """Weights of a target. `version` grows over those of one target; `name` is the `adapter_name` of their files.

    `rank` bounds that of each of its layers; 0 is all weights. `is_replaced`: later versions take its place, within
    completions, too.
    """

    target_id: TargetId
    version: int = Field(ge=0, lt=1 << 62)
    name: str = Field(pattern="^[0-9a-f]{64}$")
    rank: int = Field(ge=0, le=512)
    is_replaced: bool = False


class AdapterSampleRequest(WireModel):
    """Tokens in: `n` completions of one prompt under a target's weights, those given or later ones of the same target.

    `namespace`: requests share keys and values within it alone. `stop_texts` and `stop_token_ids` end a completion, the
    model's own ends do unless `ignore_ends`. `top_k`: 0 is the whole vocabulary. `prompt_logprobs` and `top_of_prompt`
    ask for scores of the prompt, at temperature 1; `top_of_samples` for the likeliest tokens beside the sampled ones.
    """

    request_id: str = Field(min_length=1, max_length=512)
    adapter: OfferedAdapter | None = None
    namespace: str = Field(max_length=512)
    prompt_token_ids: tuple[TokenId, ...] = Field(min_length=1, max_length=1 << 20)
    n: int = Field(default=1, ge=1, le=4096)
    max_tokens: int = Field(ge=1, le=1 << 20)
    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0, lt=1 << 31)
    seed: int | None = Field(default=None, ge=0, lt=1 << 63)
    stop_token_ids: tuple[TokenId, ...] = Field(default=(), max_length=1024)
    stop_texts: tuple[Annotated[str, Field(min_length=1, max_length=4096)], ...] = Field(default=(), max_length=64)
    ignore_ends: bool = False
    prompt_logprobs: bool = False
    top_of_prompt: int = Field(default=0, ge=0, le=MAX_TOP_LOGPROBS)
    top_of_samples: int = Field(default=0, ge=0, le=MAX_TOP_LOGPROBS)

    @field_validator("top_of_samples")
    @classmethod
    def _answer_is_bounded(cls, top: int, info: ValidationInfo) -> int:
        n, most = info.data.get("n", 1), info.data.get("max_tokens", 1)
        if n * most * top > MAX_LIKELIEST:
            raise ValueError(
                f"{top} likeliest tokens for each of {most} (max_tokens) in {n} completions exceed {MAX_LIKELIEST}: "
                "ask for fewer of them, or in several requests"
            )
        return top


class AdapterSpan(WireModel):
    """Tokens [start, end) of a completion were sampled under `version` of the target's weights."""

    version: int = Field(ge=0)
    start: int = Field(ge=0)
    end: int = Field(ge=1)


class LikeliestTokens(WireModel):
    """Of n places the k likeliest tokens, the likeliest first, and their logprobs."""

    token_ids: tuple[tuple[TokenId, ...], ...]
    logprobs: tuple[tuple[float, ...], ...]


class AdapterSequence(WireModel):
    """A completion: its tokens, and the logprob that each was sampled with. `spans` cover it."""

    token_ids: tuple[TokenId, ...]
    logprobs: tuple[float, ...]
    spans: tuple[AdapterSpan, ...]
    finish_reason: FinishReason
    top: LikeliestTokens | None = None


class AdapterSampleAnswer(WireModel):
    """Tokens out: `n` completions; of the prompt the logprobs of tokens 1 to the last, and the likeliest there."""

    generator_id: str = Field(max_length=256)
    sequences: tuple[AdapterSequence, ...] = Field(min_length=1)
    prompt_logprobs: tuple[float, ...] = ()
    top_of_prompt: LikeliestTokens | None = None


class OfferAnswer(WireModel):
    """The outcome of an offer. `held`: the version that is served now; None if it is fetched when it is needed."""

    held: int | None
