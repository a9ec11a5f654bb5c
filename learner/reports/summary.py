"""The end of a run: `summary.json` for scripts, a table for people, and `curves.png`."""

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from learner.evaluation.results import EvaluationResult
from learner.journal.files import write_atomically
from learner.ledger import Books
from learner.reports.history import CURVES, FIGURES, HELD_OUT, CurveSpec, FigureSpec, Points, RunHistory, lines_in
from learner.reports.run_records import Records
from learner.reports.tally import Tally

if TYPE_CHECKING:  # of use at a run's end
    from matplotlib.axes import Axes

logger = logging.getLogger(__name__)

_FILE = "summary.json"
_MAX_STEPS = 2048
_COLORS = {
    "blue": "#1f6fb4", "orange": "#d95f02", "grey": "#8a8a8a", "green": "#1a7037", "violet": "#6b3fa0", "red": "#b3261e"
}  # fmt: skip


@dataclass(frozen=True)
class Summary:
    """The numbers of a run. Shares are of the time between the first and the last training step, times in seconds.

    Accuracies are those of the evaluations of version 0 and of the last step, which are there whole as well. What was
    not measured is None. Medians and rewards of a long run are those of an even selection of its steps and publishes.
    `books` counts leases and attempts over the history of the final weights, so over all starts of the learner.
    A held-out reward of at least `success_reward` counts as right. `max_lag_of_reused` is the bound of groups that were
    trained again, None where `max_lag` was theirs, too; where it is not, `max_lag_seen` is of new groups alone.
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
    max_lag_of_reused: int | None = None


def summarize(
    records: Records,
    *,
    books: Books,
    max_lag: int,
    train_wall_s: float,
    generator_idle_share: float | None,
    success_reward: float = 1.0,
    max_lag_of_reused: int | None = None,
) -> Summary:
    """The summary of a run of at least one step."""
    tally = records.tally
    assert tally.steps, "a run of no steps has no summary"
    reward_first, reward_last = tally.reward.ends()
    before, after = (tally.evaluations.of_version(version) for version in (0, tally.last_step))
    publish_s_median, publish_s_max, pause_s_median = tally.publish_times()
    return Summary(
        accuracy_before=None if before is None else before.accuracy,
        accuracy_after=None if after is None else after.accuracy,
        evaluation_before=before,
        evaluation_after=after,
        reward_first=reward_first,
        reward_last=reward_last,
        steps=tally.steps,
        train_wall_s=train_wall_s,
        completions_per_s=_per(tally.trajectories, train_wall_s),
        tokens_per_s=_per(tally.sampled_tokens, train_wall_s),
        lag_histogram=tally.lag_counts,
        token_lag_histogram=tally.token_lag_counts,
        max_lag=max_lag,
        max_lag_seen=tally.lag_max,
        learner_wait_share=_per(tally.wait_s, train_wall_s),
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
        max_lag_of_reused=max_lag_of_reused,
    )


def _per(amount: float, seconds: float) -> float:
    """0 of a run that took no time that anybody knows of."""
    return amount / seconds if seconds > 0 else 0.0


def _ms(seconds: float | None) -> str:
    return "not measured" if seconds is None else f"{seconds * 1e3:.0f} ms"


def write_summary(summary: Summary, folder: Path) -> None:
    """Writes `summary.json`, whole or not at all."""
    write_atomically(folder / _FILE, json.dumps(asdict(summary), indent=2) + "\n")


def still_holds(folder: Path, tally: Tally) -> bool:
    """True if `summary.json` is whole, and of all steps and of the last step's newest evaluation."""
    try:
        found = json.loads((folder / _FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    if not isinstance(found, dict) or found.get("steps") != tally.steps:
        return False
    after = tally.evaluations.of_version(tally.last_step)
    return after is None or bool(found.get("evaluation_after") == json.loads(json.dumps(asdict(after))))


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
        ("lag of trajectories", f"{_histogram(s.lag_histogram)}  ({_bounds(s)})"),
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


def _bounds(summary: Summary) -> str:
    others = summary.max_lag_of_reused
    return f"the bound is {summary.max_lag}{'' if others is None else f', {others} for groups trained again'}"


def _histogram(counts: dict[int, int]) -> str:
    total = sum(counts.values())
    return "  ".join(f"{lag}: {count / total:.0%}" for lag, count in counts.items())


def draw_curves(folder: Path, *, title: str) -> None:
    """Writes `curves.png`: a panel for each figure of which `metrics.jsonl` holds a value, of the present weights.

    A long run is thinned to a picture's worth.
    """
    from matplotlib.figure import Figure

    names = [curve.name for curve in CURVES]
    history = RunHistory(
        lambda entry: {name: entry.get(name) for name in names},
        lambda kind, entry: entry if kind == "evaluation" else None,
        max_steps=_MAX_STEPS,
    ).read(folder / "metrics.jsonl")
    panels = [
        (figure, lines)
        for figure in FIGURES
        if figure.drawn and (lines := lines_in(figure, history.steps.items(), history.events))
    ]
    picture = Figure(figsize=(10.0, 2.5 * (len(panels) + 2) / 2), layout="constrained")
    picture.suptitle(title)
    grid, place = picture.add_gridspec((len(panels) + 2) // 2, 2), 0
    for figure, lines in panels:
        width = 2 if figure.whole else 1
        _draw(picture.add_subplot(grid[place // 2, place % 2 : place % 2 + width]), figure, lines)
        place += width
    picture.savefig(folder / "curves.png", dpi=110)


def _draw(axes: "Axes", figure: FigureSpec, lines: Sequence[tuple[CurveSpec, Points]]) -> None:
    if figure.stacked:
        steps = sorted({step for _, points in lines for step, _ in points})
        rows = [[dict(points).get(step, 0.0) for step in steps] for _, points in lines]
        axes.stackplot(
            steps, rows, labels=[curve.title for curve, _ in lines], colors=[_COLORS[curve.color] for curve, _ in lines]
        )
    for curve, points in () if figure.stacked else lines:
        style, width = "o-" if curve in HELD_OUT else "-", 0.6 if curve.largest else 1.5
        axes.plot(
            *zip(*points, strict=True), style,
            color=_COLORS[curve.color], label=curve.title, linewidth=width, markersize=4,
        )  # fmt: skip
    if figure.zero:
        axes.set_ylim(bottom=min(0.0, *(y for _, points in lines for _, y in points)))
    axes.set_title(figure.heading, fontsize="small")
    axes.legend(loc="best", edgecolor="none", framealpha=0.7, fontsize="small")
    axes.spines[["top", "right"]].set_visible(False)
