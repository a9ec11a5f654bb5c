"""The end of a run: `summary.json` for scripts, a table for people, and `curves.png`."""

import json
import logging
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from learner.evaluation.results import EvaluationResult
from learner.ledger import Books
from learner.reports.records import Records

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Summary:
    """The numbers of a run. Shares are of the time between the first and the last training step, times in seconds.

    Accuracies are those of the evaluations of version 0 and of the last step, which are there whole as well. What was
    not measured is None.
    `books` counts leases and attempts over the history of the final weights, so over all starts of the learner.
    `lag_histogram` counts trained trajectories by the lag of their oldest token, `token_lag_histogram` trained tokens.
    """

    accuracy_before: float | None
    accuracy_after: float | None
    evaluation_before: EvaluationResult | None
    evaluation_after: EvaluationResult | None
    reward_first: float
    reward_last: float
    steps: int
    train_wall_s: float
    completions_per_s: float
    tokens_per_s: float
    lag_histogram: dict[int, int]
    token_lag_histogram: dict[int, int]
    max_lag: int
    max_lag_seen: int
    learner_wait_share: float
    generator_idle_share: float | None
    publish_s_median: float | None
    publish_s_max: float | None
    pause_s_median: float | None
    train_step_s_median: float
    probe_gap_max: float | None
    truncated_share: float
    end_token_share: float
    groups_trained: int
    groups_dropped: int
    groups_filtered: int
    groups_dead_lettered: int
    mixed_version_share: float
    books: Books


def summarize(
    records: Records, *, books: Books, max_lag: int, train_wall_s: float, generator_idle_share: float | None
) -> Summary:
    """The summary of a run of at least one step."""
    steps = records.steps
    assert steps, "a run of no steps has no summary"
    trajectories = sum(step.trajectories for step in steps)
    tail = steps[-max(1, len(steps) // 20) :]
    head = steps[: len(tail)]
    publishes = records.publishes[1:] or records.publishes
    before, after = _evaluation(records, version=0), _evaluation(records, version=steps[-1].step)
    return Summary(
        accuracy_before=None if before is None else before.accuracy,
        accuracy_after=None if after is None else after.accuracy,
        evaluation_before=before,
        evaluation_after=after,
        reward_first=statistics.fmean(step.reward_mean for step in head),
        reward_last=statistics.fmean(step.reward_mean for step in tail),
        steps=len(steps),
        train_wall_s=train_wall_s,
        completions_per_s=trajectories / train_wall_s,
        tokens_per_s=sum(step.sampled_tokens for step in steps) / train_wall_s,
        lag_histogram=_added(step.lag_counts for step in steps),
        token_lag_histogram=_added(step.token_lag_counts for step in steps),
        max_lag=max_lag,
        max_lag_seen=max(step.lag_max for step in steps),
        learner_wait_share=sum(step.wait_s for step in steps) / train_wall_s,
        generator_idle_share=generator_idle_share,
        publish_s_median=_median([report.total_s for report in publishes]),
        publish_s_max=max((report.total_s for report in publishes), default=None),
        pause_s_median=_median([report.pause_s for report in publishes]),
        train_step_s_median=statistics.median(step.train_s for step in steps),
        probe_gap_max=max((report.probe_gap for report in records.publishes), default=None),
        truncated_share=statistics.fmean(step.truncated_share for step in steps),
        end_token_share=statistics.fmean(step.end_token_share for step in steps),
        groups_trained=sum(step.groups for step in steps),
        groups_dropped=books.dropped,
        groups_filtered=books.filtered,
        groups_dead_lettered=books.dead_lettered,
        mixed_version_share=statistics.fmean(step.mixed_version_share for step in steps),
        books=books,
    )


def _evaluation(records: Records, *, version: int) -> EvaluationResult | None:
    """The newest of that version; a resumed run has none of version 0."""
    return next((result for result in reversed(records.evaluations) if result.version == version), None)


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _ms(seconds: float | None) -> str:
    return "not measured" if seconds is None else f"{seconds * 1e3:.0f} ms"


def _added(counts: Iterable[Mapping[int, int]]) -> dict[int, int]:
    total: Counter[int] = Counter()
    for count in counts:
        total.update(count)
    return dict(sorted(total.items()))


def write_summary(summary: Summary, folder: Path) -> None:
    """Writes `summary.json`."""
    (folder / "summary.json").write_text(json.dumps(asdict(summary), indent=2) + "\n", encoding="utf-8")


def table(summary: Summary, *, folder: Path) -> str:
    """The summary as a person reads it."""
    s = summary
    publish = f"{_ms(s.publish_s_median)} median, {_ms(s.pause_s_median)} of it with serving paused"
    gap = "not measured" if s.probe_gap_max is None else f"{s.probe_gap_max:.1e} nats at most"
    ends = f"{s.end_token_share:.1%} with their end token, {s.truncated_share:.1%} truncated"
    rows = [
        ("held-out accuracy", f"{_share(s.accuracy_before)} before, {_share(s.accuracy_after)} after"),
        *_pass_rows(s.evaluation_before, s.evaluation_after),
        ("reward", f"{s.reward_first:.3f} in the first steps, {s.reward_last:.3f} in the last"),
        ("steps", f"{s.steps} in {s.train_wall_s:.0f} s, {s.train_step_s_median * 1e3:.0f} ms of training each"),
        ("throughput", f"{s.completions_per_s:.0f} completions/s, {s.tokens_per_s:.0f} tokens/s"),
        ("lag of trajectories", f"{_histogram(s.lag_histogram)}  (the bound is {s.max_lag})"),
        ("lag of tokens", _histogram(s.token_lag_histogram)),
        ("learner waited", f"{s.learner_wait_share:.0%} of the time"),
        ("generator idle", _share(s.generator_idle_share, of="of the time")),
        ("publish", publish),
        ("logprob gap at publish", gap),
        ("completions ended", ends),
        ("weights changed within", f"{s.mixed_version_share:.1%} of completions"),
        ("groups", f"{s.groups_trained} trained, {s.groups_dropped} dropped, {s.groups_dead_lettered} given up"),
        ("files", f"{folder}/: model/ metrics.jsonl samples.jsonl summary.json curves.png"),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {text}" for name, text in rows)


def _pass_rows(before: EvaluationResult | None, after: EvaluationResult | None) -> list[tuple[str, str]]:
    """A row for the largest k, if there is one above 1."""
    ks = [k for k in (after.pass_at_k if after else {}) if k > 1]
    if after is None or not ks:
        return []
    k = max(ks)
    earlier = before.pass_at_k.get(k) if before else None
    return [(f"held-out pass@{k}", f"{_share(earlier)} before, {_share(after.pass_at_k[k])} after")]


def _share(value: float | None, *, of: str = "") -> str:
    return "not measured" if value is None else f"{value:.1%} {of}".rstrip()


def _histogram(counts: dict[int, int]) -> str:
    total = sum(counts.values())
    return "  ".join(f"{lag}: {count / total:.0%}" for lag, count in counts.items())
