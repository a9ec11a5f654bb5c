"""The end of a run: `summary.json` for scripts, a table for people, and `curves.png` (reward, accuracy, lag, time)."""

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from learner.evaluation.results import EvaluationResult
from learner.ledger import Books
from learner.reports.history import CURVES, RunHistory, curves_in, points_of, words_of
from learner.reports.run_records import Records

log = logging.getLogger(__name__)

_MAX_STEPS = 2048
_BLUE, _ORANGE, _GREY = "#1f6fb4", "#d95f02", "#8a8a8a"
_COLORS = {"blue": _BLUE, "orange": _ORANGE, "grey": _GREY}


@dataclass(frozen=True)
class Summary:
    """The numbers of a run. Shares are of the time between the first and the last training step, times in seconds.

    Accuracies are those of the evaluations of version 0 and of the last step, which are there whole as well. What was
    not measured is None. The medians of a long run are those of an even selection of its steps and publishes.
    `books` counts leases and attempts over the history of the final weights, so over all starts of the learner.
    A held-out reward of at least `success_reward` counts as right.
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
    success_reward: float = 1.0


def summarize(
    records: Records,
    *,
    books: Books,
    max_lag: int,
    train_wall_s: float,
    generator_idle_share: float | None,
    success_reward: float = 1.0,
) -> Summary:
    """The summary of a run of at least one step."""
    tally = records.tally
    assert tally.steps, "a run of no steps has no summary"
    edge = max(1, tally.steps // 20)
    before, after = (tally.evaluations.of_version(version) for version in (0, tally.last_step))
    publish_s_median, publish_s_max, pause_s_median = tally.publish_times()
    return Summary(
        accuracy_before=None if before is None else before.accuracy,
        accuracy_after=None if after is None else after.accuracy,
        evaluation_before=before,
        evaluation_after=after,
        reward_first=tally.curve.reward_of_first(edge),
        reward_last=tally.curve.reward_of_last(edge),
        steps=tally.steps,
        train_wall_s=train_wall_s,
        completions_per_s=tally.trajectories / train_wall_s,
        tokens_per_s=tally.sampled_tokens / train_wall_s,
        lag_histogram=tally.lag_counts,
        token_lag_histogram=tally.token_lag_counts,
        max_lag=max_lag,
        max_lag_seen=tally.lag_max,
        learner_wait_share=tally.wait_s / train_wall_s,
        generator_idle_share=generator_idle_share,
        publish_s_median=publish_s_median,
        publish_s_max=publish_s_max,
        pause_s_median=pause_s_median,
        train_step_s_median=tally.train_s.median() or 0.0,
        probe_gap_max=tally.probe_gap.largest,
        truncated_share=tally.truncated_share / tally.steps,
        end_token_share=tally.end_token_share / tally.steps,
        groups_trained=tally.groups,
        groups_dropped=books.dropped,
        groups_filtered=books.filtered,
        groups_dead_lettered=books.dead_lettered,
        mixed_version_share=tally.mixed_version_share / tally.steps,
        books=books,
        success_reward=success_reward,
    )


def _ms(seconds: float | None) -> str:
    return "not measured" if seconds is None else f"{seconds * 1e3:.0f} ms"


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
        ("held-out accuracy", f"{_share(s.accuracy_before)} before, {_share(s.accuracy_after)} after  ({_right(s)})"),
        *_pass_rows(s.evaluation_before, s.evaluation_after),
        *_held_out_reward_rows(s.evaluation_before, s.evaluation_after),
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


def _right(summary: Summary) -> str:
    """Tells what counts as right, and what to do if nothing was, though rewards were given."""
    said = f"right: a reward of at least {summary.success_reward:g}"
    measured = [each for each in (summary.evaluation_before, summary.evaluation_after) if each is not None]
    if any(each.accuracy for each in measured) or not any(each.reward > 0 for each in measured):
        return said
    return f"{said}, which none had: if a good answer is worth less, lower learner.evaluation.success_reward"


def _pass_rows(before: EvaluationResult | None, after: EvaluationResult | None) -> list[tuple[str, str]]:
    """A row for the largest k, if there is one above 1."""
    ks = [k for k in (after.pass_at_k if after else {}) if k > 1]
    if after is None or not ks:
        return []
    k = max(ks)
    earlier = before.pass_at_k.get(k) if before else None
    return [(f"held-out pass@{k}", f"{_share(earlier)} before, {_share(after.pass_at_k[k])} after")]


def _held_out_reward_rows(before: EvaluationResult | None, after: EvaluationResult | None) -> list[tuple[str, str]]:
    """It moves before anything is solved. Where it is the accuracy it is not said twice."""
    known = [each for each in (before, after) if each is not None]
    if all(each.reward == each.accuracy for each in known):
        return []
    texts = ["not measured" if each is None else f"{each.reward:.3f}" for each in (before, after)]
    return [("held-out reward", f"{texts[0]} before, {texts[1]} after")]


def _share(value: float | None, *, of: str = "") -> str:
    return "not measured" if value is None else f"{value:.1%} {of}".rstrip()


def _histogram(counts: dict[int, int]) -> str:
    total = sum(counts.values())
    return "  ".join(f"{lag}: {count / total:.0%}" for lag, count in counts.items())


def health_of(metrics: Path) -> dict[str, list[tuple[int, float]]]:
    """Each curve that is pictured by step, of the history of the present weights, thinned to a picture's worth."""
    names = [curve.name for curve in CURVES if curve.picture]
    history = RunHistory(lambda entry: {name: entry.get(name) for name in names}, max_steps=_MAX_STEPS).read(metrics)
    return {name: points_of(history.steps.items(), name) for name in names}


def draw_curves(records: Records, *, title: str, path: Path) -> None:
    """Writes a PNG: reward, held-out accuracy, lag and time of the steps, and below what shows why nothing is learned.

    The lower panels are of `metrics.jsonl` in the same folder; one without a measured value is left empty.
    """
    points = records.tally.curve.points
    steps = np.array([point.last for point in points])
    figure = Figure(figsize=(9.0, 11.0), layout="constrained")
    figure.suptitle(title)
    upper, lower = np.asarray(figure.subfigures(2, 1, height_ratios=(7.0, 4.0))).ravel()
    panels = upper.subplots(3, 1, sharex=True, height_ratios=(3, 1.4, 1.4))
    _draw_reward(panels[0], records, steps)
    _draw_lag(panels[1], records, steps)
    _draw_times(panels[2], records, steps)
    health = health_of(path.parent / "metrics.jsonl")
    small = lower.subplots(2, 3, sharex=True).ravel()
    for axes, curve in zip(small, (curve for curve in CURVES if curve.picture), strict=True):
        rows = health[curve.name]
        axes.plot([step for step, _ in rows], _smoothed([value for _, value in rows]) if rows else [], color=_BLUE)
        axes.set_title(words_of(curve), fontsize="small")
    for axes in (*panels, *small):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def _draw_reward(axes: Axes, records: Records, steps: npt.NDArray[np.int64]) -> None:
    points = records.tally.curve.points
    reward = np.array([point.reward for point in points]) / np.array([point.steps for point in points])
    axes.plot(steps, reward, color=_BLUE, alpha=0.25, linewidth=0.8)
    axes.plot(steps, _smoothed(reward), color=_BLUE, label="reward of training rollouts (smoothed)")
    evaluations = records.tally.evaluations
    seen = [*reward]
    if evaluations.rewards != evaluations.points:
        axes.plot(*_columns(evaluations.rewards), "s--", color=_GREY, markersize=4, label="held-out reward")
        seen += [value for _, value in evaluations.rewards]
    axes.plot(*_columns(evaluations.points), "o-", color=_ORANGE, markersize=4, label="held-out accuracy")
    axes.set_ylabel("reward, accuracy")
    axes.legend(loc="best", frameon=False)
    axes.set_ylim(min(0.0, *seen), max(1.0, *seen))


def _columns(points: Sequence[tuple[int, float]]) -> tuple[list[int], list[float]]:
    return [version for version, _ in points], [value for _, value in points]


def _draw_lag(axes: Axes, records: Records, steps: npt.NDArray[np.int64]) -> None:
    points = records.tally.curve.points
    counts = np.array([point.steps for point in points])
    axes.fill_between(steps, [point.lag_max for point in points], color=_GREY, alpha=0.3, label="largest", step="mid")
    axes.plot(steps, _smoothed(np.array([point.lag for point in points]) / counts), color=_BLUE, label="mean")
    axes.set_ylabel("lag (versions)")
    axes.legend(loc="upper left", frameon=False, ncols=2)
    axes.set_ylim(0, 1.4 * max(1, max(point.lag_max for point in points)))


def _draw_times(axes: Axes, records: Records, steps: npt.NDArray[np.int64]) -> None:
    points = records.tally.curve.points
    counts = np.array([point.steps for point in points])
    parts = curves_in("time")
    axes.stackplot(
        steps,
        [_smoothed(np.array([getattr(point, part.name) for point in points]) / counts) for part in parts],
        labels=[part.title for part in parts], colors=[_COLORS[part.color] for part in parts], alpha=0.7,
    )  # fmt: skip
    axes.set_ylabel("seconds per step")
    axes.set_xlabel("step")
    axes.legend(loc="upper right", frameon=False, ncols=3)
    axes.set_ylim(0, 1.25 * axes.get_ylim()[1])  # the legend has room above


def _smoothed(values: npt.NDArray[np.float64] | Sequence[float]) -> npt.NDArray[np.float64]:
    """A centred moving mean over a twentieth of the run, shorter at its ends."""
    row = np.asarray(values, dtype=np.float64)
    window = max(1, len(row) // 20)
    kernel = np.ones(window)
    return np.convolve(row, kernel, "same") / np.convolve(np.ones_like(row), kernel, "same")
