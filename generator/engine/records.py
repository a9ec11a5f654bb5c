"""Records that an engine hands out. Nothing here imports vllm or torch."""

from dataclasses import dataclass

from protocol.fleet import SliceLayout


@dataclass(frozen=True, kw_only=True)
class CommitReport:
    """A version that is served now.

    `pause_s` is how long no token was sampled, `load_s` the slowest worker's loading time in it. Of that it waited for
    `wait_s` until buckets had arrived and were verified, if they were not staged before. `slices` as in a CommitResult.
    """

    version: str
    load_s: float
    pause_s: float
    wait_s: float = 0.0
    slices: SliceLayout | None = None


@dataclass(frozen=True, kw_only=True)
class ScoredSequence:
    """Logprobs of tokens 1 to T - 1 of a sequence, and for each of them the likeliest tokens, if they were asked for.

    `version` is that of the weights; None if they changed while the sequence was under way.
    """

    logprobs: tuple[float, ...]
    top_token_ids: tuple[tuple[int, ...], ...]
    top_logprobs: tuple[tuple[float, ...], ...]
    version: str | None


@dataclass(frozen=True, kw_only=True)
class EngineCounters:
    """Counts of an engine at one moment. Requests are completions: one request with n completions counts n times.

    `waiting` have no token yet. Totals count since the start; `cached_tokens_total` are prompt tokens of finished
    completions that the prefix cache held, of the `cache_queries_total` that were looked up there: sequences that are
    scored never are. `idle_s` is the time in which there was no request, of `uptime_s`.
    """

    running: int
    waiting: int
    tokens_total: int
    completions_total: int
    cached_tokens_total: int
    cache_queries_total: int
    idle_s: float
    uptime_s: float
