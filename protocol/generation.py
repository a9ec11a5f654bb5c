"""HTTP bodies of the generator's token routes, `POST /v1/generate` and `POST /v1/logprobs`."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from protocol.model import VersionText, WireModel
from protocol.routed_experts import RoutedExperts
from protocol.trajectories import FinishReason, Purpose, VersionSpan

TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]


LOWEST_TEMPERATURE = 0.01
"""Engines sample greedily at 0, and at this temperature for anything between."""
MAX_SCORED_TOKENS = 1 << 20
"""Of all sequences of one request together; with `top`, of tokens times `top`: it bounds the answer to some 50 MB."""
MAX_TOP_LOGPROBS = 128


class Sampling(WireModel):
    """Parameters of sampling. All below `stop_token_ids` is for evaluation only: training refuses it, because the
    learner's softmax over the whole vocabulary would be another distribution.
    """

    temperature: float = Field(default=1.0, ge=0, le=2)
    max_tokens: int = Field(ge=1, le=1 << 20)
    stop_token_ids: tuple[TokenId, ...] = Field(default=(), max_length=64)
    seed: int | None = Field(default=None, ge=0, lt=1 << 63)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0, lt=1 << 31, description="0 keeps the whole vocabulary")
    min_p: float = Field(default=0.0, ge=0, le=1)
    repetition_penalty: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    min_tokens: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _room_for_min_tokens(self) -> Self:
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} exceeds max_tokens {self.max_tokens}")
        return self

    def forbidden_in_training(self) -> list[str]:
        """The fields by which the sampled distribution would differ from the learner's softmax."""
        plain = Sampling(max_tokens=self.max_tokens)
        shaping = (
            "top_p",
            "top_k",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
            "min_tokens",
        )
        changed = [name for name in shaping if getattr(self, name) != getattr(plain, name)]
        return [*changed, "temperature"] if self.temperature < LOWEST_TEMPERATURE else changed


class GenerateRequest(WireModel):
    """Tokens in: `n` completions of one prompt. `routed_experts` asks for the experts of its tokens, where the
    generator can tell them: of those from the prompt's token `routed_experts_from` on, as of others they are known.
    """

    request_id: str = Field(min_length=1, max_length=256)
    prompt_token_ids: tuple[TokenId, ...] = Field(min_length=1, max_length=1 << 20)
    n: int = Field(default=1, ge=1, le=4096)
    purpose: Purpose = "train"
    sampling: Sampling
    routed_experts: bool = Field(default=False, exclude_if=lambda asked: not asked)
    routed_experts_from: int = Field(default=0, ge=0, le=1 << 21, exclude_if=lambda first: not first)


class GeneratePart(WireModel):
    """Tokens out: new tokens of completion `index`, one line of the answer's NDJSON.

    `version_spans` count from the completion's first token and cover all of it so far. `finish_reason` is set on a
    completion's last part. An answer that fails midway ends with a line that holds an ErrorBody instead.
    `routed_experts` are those of tokens that no part before has told, and count from the prompt's first token: up to
    the last token but one of the completion so far.
    """

    index: int = Field(ge=0)
    token_ids: tuple[TokenId, ...] = ()
    behavior_logprobs: tuple[float, ...] = ()
    version_spans: tuple[VersionSpan, ...] = ()
    finish_reason: FinishReason | None = None
    routed_experts: RoutedExperts | None = Field(default=None, exclude_if=lambda told: told is None)

    def signed(self, instance: str, *, oldest_cache: str) -> Self:
        """The same, its stamps signed by a process of a generator, as of a prompt none of whose keys and values are
        older than version `oldest_cache`, or than any of its tokens if that is empty.
        """
        spans = tuple(
            span.model_copy(
                update={"instance": instance, "cache": None if oldest_cache in ("", span.version) else oldest_cache}
            )
            for span in self.version_spans
        )
        return self.model_copy(update={"version_spans": spans})


TokenSequence = Annotated[tuple[TokenId, ...], Field(min_length=2, max_length=MAX_SCORED_TOKENS)]
Logprob = Annotated[float, Field(allow_inf_nan=False)]


class LogprobsRequest(WireModel):
    """Tokens in: the logprob of each token given those before it, for each of several sequences.

    With `top`, the `top` likeliest tokens of each position are wanted, too.
    """

    request_id: str = Field(min_length=1, max_length=256)
    sequences: tuple[TokenSequence, ...] = Field(min_length=1, max_length=256)
    top: int = Field(default=0, ge=0, le=MAX_TOP_LOGPROBS)

    @model_validator(mode="after")
    def _answer_is_bounded(self) -> Self:
        tokens = sum(map(len, self.sequences))
        if tokens * max(1, self.top) > MAX_SCORED_TOKENS:
            times = f" times top {self.top}" if self.top > 1 else ""
            raise ValueError(f"{tokens} tokens{times} exceed {MAX_SCORED_TOKENS}: ask for them in several requests")
        return self


class SequenceLogprobs(WireModel):
    """Of a sequence of T tokens: `logprobs` of tokens 1 to T - 1, float32, in nats, of the softmax over the whole
    vocabulary at temperature 1.

    `top_token_ids` and `top_logprobs` hold a row for each of the same positions, the likeliest token first; they are
    empty if none were asked for.
    """

    logprobs: tuple[Logprob, ...] = Field(min_length=1)
    top_token_ids: tuple[tuple[TokenId, ...], ...] = ()
    top_logprobs: tuple[tuple[Logprob, ...], ...] = ()

    @model_validator(mode="after")
    def _one_row_for_each_position(self) -> Self:
        widths = {len(row) for row in (*self.top_token_ids, *self.top_logprobs)}
        rows = {len(self.top_token_ids), len(self.top_logprobs)}
        if len(widths) > 1 or not (rows == {0} or rows == {len(self.logprobs)}):
            raise ValueError(f"top tokens of {sorted(rows)} positions for {len(self.logprobs)} logprobs")
        return self


class LogprobsAnswer(WireModel):
    """Tokens' logprobs out: of all sequences, in order, all under the weights of `policy_version`.

    `tokenizer` is the fingerprint of the tokenizer beside the model: token ids mean the same under equal ones only.
    `instance` is the generator's process, as in the spans of what it samples.
    """

    generator_id: str = Field(max_length=256)
    instance: str = Field(default="", max_length=64)
    policy_version: VersionText
    tokenizer: str = Field(max_length=64)
    sequences: tuple[SequenceLogprobs, ...] = Field(min_length=1, max_length=256)


class GeneratorState(WireModel):
    """`GET /v1/state`: what a generator serves and what it has done."""

    generator_id: str
    serving: bool
    policy_version: VersionText | None
    running: int = Field(ge=0)
    waiting: int = Field(default=0, ge=0)
    """Of the running ones those that have no token yet: they wait for a place in the engine, or are read in."""
    tokens_generated: int = Field(ge=0)
    idle_s: float = Field(ge=0)
    """Seconds without any running request, since the first commit."""
    uptime_s: float = Field(ge=0)
