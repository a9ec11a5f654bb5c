"""What is asked of an engine, and what it answers: records without vllm or torch."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How tokens are drawn. `behavior_logprobs` of a completion are those of the distribution that these make.

    `top_k` 0 and `top_p` 1 leave the softmax whole, as training needs it. With `n` completions and a `seed`, the
    completion of index i draws with `seed + i`.
    """

    temperature: float = 1.0
    max_tokens: int = 256
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    ignore_eos: bool = False


@dataclass(frozen=True, kw_only=True)
class VersionSpan:
    """Output tokens `start` (included) to `end` (excluded) were sampled under `version`."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class CompletionPart:
    """New tokens of one completion of a request.

    `index` is the completion's number, 0 to n-1. `token_ids` and `behavior_logprobs` are those since the last part.
    `spans` cover all output tokens of the completion so far, without gaps. `finish_reason` is set on its last part:
    `stop`, `length` or `abort`.
    """

    index: int
    token_ids: tuple[int, ...]
    behavior_logprobs: tuple[float, ...]
    spans: tuple[VersionSpan, ...]
    finish_reason: str | None


@dataclass(frozen=True, kw_only=True)
class CommitReport:
    """A version that is served now.

    `fingerprint` is over the loaded parameters of all workers. `load_s` is the slowest worker's loading time; `pause_s`
    is how long no token was sampled.
    """

    version: str
    fingerprint: str
    load_s: float
    pause_s: float


@dataclass(frozen=True, kw_only=True)
class EngineCounters:
    """A snapshot. Requests are completions: one request with n completions counts n times.

    `waiting` have no token yet. Totals count since the start; `cached_tokens_total` are prompt tokens of finished
    completions that the prefix cache held. `idle_s` is the time in which there was no request, of `uptime_s`.
    """

    running: int
    waiting: int
    tokens_total: int
    completions_total: int
    cached_tokens_total: int
    idle_s: float
    uptime_s: float
