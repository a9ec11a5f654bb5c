"""The rows of the benchmark of the algorithms, and the report that is made of them."""

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from benchmarks.algorithm_runs import HELD_OUT_TASKS, PRESETS, STALENESS, AlgorithmRun
from benchmarks.warm_system import FinishedRun

KEPT_WITHIN = 0.03
_SAME_START = 0.1


class Numbers(BaseModel):
    """Results of a run that ended well. Intervals are of 95 %; lags are of trajectories, by their oldest token."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    accuracy_before: float
    accuracy_before_high: float
    accuracy_after: float
    accuracy_after_low: float
    train_s: float
    completions_per_s: float
    lag_mean: float
    lag_max: int
    guard_moves: int
    effective_sample_share: float | None

    @property
    def learned(self) -> bool:
        """True if the intervals of accuracy before and after are apart, and in the right order."""
        return self.accuracy_after_low > self.accuracy_before_high


class Row(BaseModel):
    """A run and its outcome: `numbers`, or else `failure`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    table: Literal["presets", "staleness"]
    variant: str
    algo: str
    max_lag: int
    seed: int
    steps: int
    settings: str
    measured_at: str
    numbers: Numbers | None = None
    failure: str | None = None

    @staticmethod
    def of(
        run: AlgorithmRun, *, began: float, finished: FinishedRun | None = None, failure: str | None = None
    ) -> "Row":
        """The row of a run that began at that time of the clock."""
        return Row(
            name=run.name,
            table=run.table,
            variant=run.variant,
            algo=run.algo,
            max_lag=run.max_lag,
            seed=run.seed,
            steps=run.steps,
            settings=run.settings,
            measured_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(began)),
            numbers=None if finished is None else _numbers(finished),
            failure=failure,
        )

    @property
    def told(self) -> str:
        """The row on one line, for who waits for it."""
        if self.numbers is None:
            return f"{self.name}: failed, {self.failure}"
        n = self.numbers
        return (
            f"{self.name}: accuracy {n.accuracy_before:.3f} to {n.accuracy_after:.3f}, {n.train_s:.0f} s, "
            f"{n.completions_per_s:.0f} completions/s, lag {n.lag_mean:.1f} (at most {n.lag_max})"
        )


def _numbers(finished: FinishedRun) -> Numbers:
    summary = finished.summary
    return Numbers(
        accuracy_before=summary.evaluation_before.accuracy,
        accuracy_before_high=summary.evaluation_before.accuracy_high,
        accuracy_after=summary.evaluation_after.accuracy,
        accuracy_after_low=summary.evaluation_after.accuracy_low,
        train_s=summary.train_wall_s,
        completions_per_s=summary.completions_per_s,
        lag_mean=summary.lag_mean,
        lag_max=summary.max_lag_seen,
        guard_moves=finished.guard_moves,
        effective_sample_share=finished.step_mean("effective_sample_share"),
    )


def read_rows(path: Path) -> list[Row]:
    """The newest row of each run, in the order in which runs were first measured; none if there is no file."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    rows = [Row.model_validate_json(line) for line in text.splitlines()]
    return list({row.name: row for row in rows}.values())


def another_start(row: Row, others: Sequence[Row]) -> str | None:
    """An error if a run began with another accuracy than the others of its table, which it cannot be compared with."""
    begun = [other.numbers.accuracy_before for other in others if other.table == row.table and other.numbers]
    if row.numbers is None or not begun:
        return None
    before, usual = row.numbers.accuracy_before, statistics.median(begun)
    if abs(before - usual) <= _SAME_START:
        return None
    return (
        f"{row.name} is not kept: it began at an accuracy of {before:.3f}, and the other runs of its table at "
        f"{usual:.3f}: take the model that they began with, or another file for --results"
    )


def report(rows: Sequence[Row]) -> str:
    """Both tables."""
    planned = [run.name for run in (*PRESETS, *STALENESS)]
    missing = sorted(set(planned) - {row.name for row in rows}, key=planned.index)
    ordered = sorted((row for row in rows if row.name in planned), key=lambda row: planned.index(row.name))
    lines = [
        "# Every algorithm on the addition demo",
        "",
        f"`benchmarks/algorithms.py`. Accuracy on {HELD_OUT_TASKS:,}",
    ]
    lines[-1] += " held-out tasks, sampled at temperature 1. One warm generator, reward-service and env-service."
    if missing:
        lines += ["", f"**Partial**: {len(missing)} of {len(planned)} runs are missing: {', '.join(missing)}."]
    lines += _presets([row for row in ordered if row.table == "presets"])
    lines += _staleness([row for row in ordered if row.table == "staleness"])
    return "\n".join([*lines, ""])


def _presets(rows: Sequence[Row]) -> list[str]:
    if not rows:
        return []
    return [
        "",
        "## Presets",
        "",
        "Each run starts from the same model, and has as many steps of 32 groups of 8 as fit into about three minutes. "
        "The learning rate falls linearly to a tenth; it and what else was set is in the last column. Learned: the "
        "95 % intervals of accuracy before and after are apart. Lag: of trajectories, by their oldest token. s: of "
        "training alone, in seconds. opd learns from the model that grpo's first run left.",
        "",
        "| preset | max_lag | seed | steps | before | after | learned | s | completions/s | mean lag | max lag | set |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
        *(_preset_line(row) for row in rows),
    ]


def _preset_line(row: Row) -> str:
    start = f"| {row.variant} | {row.max_lag} | {row.seed} | {row.steps} |"
    if row.numbers is None:
        return f"{start} | **failed**: {_cell(row.failure)} | **no** | | | | | {row.settings} |"
    n = row.numbers
    guard = f", guard moved the bound {n.guard_moves} times" if n.guard_moves else ""
    return (
        f"{start} {n.accuracy_before:.3f} | **{n.accuracy_after:.3f}** | {'yes' if n.learned else '**no**'} "
        f"| {n.train_s:.0f} | {n.completions_per_s:.0f} | {n.lag_mean:.1f} | {n.lag_max} | {row.settings}{guard} |"
    )


def _staleness(rows: Sequence[Row]) -> list[str]:
    if not rows:
        return []
    variants = list(dict.fromkeys(row.variant for row in rows))
    by_variant = {name: [row for row in rows if row.variant == name] for name in variants}
    return [
        "",
        "## Stale tokens",
        "",
        "grpo unless another loss is named, the guard disabled. Synchronous: max_lag 0 and one update a step. All "
        "others: max_lag 8 and four updates a step; corrected is the default correction, and what the others set is "
        "listed below. Effective sample: share of trained tokens, mean over steps.",
        "",
        "| variant | seed | steps | before | after | s | completions/s | mean lag | max lag | effective sample |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *(_staleness_line(row) for row in rows),
        "",
        "| variant | accuracy after, mean | lowest to highest | runs | less than synchronous by |",
        "|---|---|---|---|---|",
        *(_variant_line(name, by_variant) for name in variants),
        "",
        f"Kept means by at most {KEPT_WITHIN} less than synchronous training. Settings:",
        "",
        *(f"- {name}: {by_variant[name][0].settings}" for name in variants),
    ]


def _staleness_line(row: Row) -> str:
    start = f"| {row.variant} | {row.seed} | {row.steps} |"
    if row.numbers is None:
        return f"{start} | **failed**: {_cell(row.failure)} | | | | | |"
    n = row.numbers
    share = "not measured" if n.effective_sample_share is None else f"{n.effective_sample_share:.3f}"
    return (
        f"{start} {n.accuracy_before:.3f} | **{n.accuracy_after:.3f}** | {n.train_s:.0f} | {n.completions_per_s:.0f} "
        f"| {n.lag_mean:.1f} | {n.lag_max} | {share} |"
    )


def _variant_line(name: str, by_variant: dict[str, list[Row]]) -> str:
    found = _accuracies(by_variant[name])
    if not found:
        return f"| {name} | all failed | | 0 of {len(by_variant[name])} | |"
    mean, synchronous = statistics.fmean(found), _accuracies(by_variant.get("synchronous", []))
    gap = "" if name == "synchronous" or not synchronous else _gap(statistics.fmean(synchronous) - mean)
    runs = f"{len(found)} of {len(by_variant[name])}"
    return f"| {name} | **{mean:.3f}** | {min(found):.3f} to {max(found):.3f} | {runs} | {gap} |"


def _accuracies(rows: Sequence[Row]) -> list[float]:
    return [row.numbers.accuracy_after for row in rows if row.numbers is not None]


def _gap(less: float) -> str:
    return f"{less:.3f}: {'kept' if less <= KEPT_WITHIN else '**not kept**'}"


def _cell(text: str | None) -> str:
    return (text or "").replace("|", "\\|").replace("\n", " ")
