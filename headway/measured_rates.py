"""Rates of a recorded run, for `headway plan --calibrate`: what its steps, publishes and generators took.

metrics.jsonl: step ──▶ seconds of a token in training; publish ──▶ its times; load ──▶ what an engine's step takes,
                                                        with few sequences and with many
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from headway.report import ReportedRun, read_run
from learner.reports.history import is_number
from services.config.sources import ConfigError

_LEAST_BUSY = 0.05
"""Share of the time: loads of generators that worked less say little of how fast they work."""
_SPREAD = 1.3
"""Factor between the most and the fewest sequences from which on a line can be fitted through the loads."""
_ALONE = 2.0
"""An engine that runs fewer sequences than this has mostly one."""

T = TypeVar("T")


@dataclass(frozen=True)
class MeasuredRates:
    """Rates of a run with the same model on the same devices; None where it does not tell.

    An engine's step with n sequences takes `token_s` + n * `sequence_s`. `train_s`: rank-seconds per sampled token,
    weight copy included. `publish_s`, `pause_s`: means per publish.
    """

    run: str
    token_s: float | None = None
    sequence_s: float | None = None
    train_s: float | None = None
    publish_s: float | None = None
    pause_s: float | None = None


def warm(records: Sequence[T]) -> Sequence[T]:
    """The records after the first quarter, in which nothing was ahead of the learner yet."""
    return records[len(records) // 4 :]


def measured_rates(folder: Path) -> MeasuredRates:
    """Rates of the run in a folder, of the records that have their numbers.

    Raises ConfigError for a folder that is none of a run, or of one that has not trained a step.
    """
    run = read_run(folder)
    trained = _with_numbers(run.steps, "train_s", "copy_s", "sampled_tokens")
    steps = warm([step for step in trained if step.get("kind") == "step" and step["sampled_tokens"]])
    if not steps:
        expected = "expected a run that has trained some, such as runs/addition"
        raise ConfigError([f"{folder} holds no step that sampled tokens: {expected}"])
    # An earlier release wrote the setting alone, which is 1 under torchrun.
    ranks = _number(run.made, "rank_count", _number(run.made.get("settings", {}), "ranks", 1))
    train_s = sum(step["train_s"] + step["copy_s"] for step in steps)
    token_s, sequence_s = _engine_step(run)
    publishes = warm(_with_numbers(run.publishes, "total_s", "pause_s"))
    return MeasuredRates(
        run=run.name,
        token_s=token_s,
        sequence_s=sequence_s,
        train_s=ranks * train_s / sum(step["sampled_tokens"] for step in steps),
        publish_s=statistics.fmean(publish["total_s"] for publish in publishes) if publishes else None,
        pause_s=statistics.fmean(publish["pause_s"] for publish in publishes) if publishes else None,
    )


def _engine_step(run: ReportedRun) -> tuple[float | None, float | None]:
    """Seconds of an engine's step without a sequence, and of each sequence, by least squares over the run's loads.

    Where all have about as many sequences, all of the time is theirs if they are many, and none if it is one. The
    first loads count, too: a step takes no longer before the generators are ahead, and has few sequences then.
    """
    points = [point for load in run.loads if (point := _point(load)) is not None]
    if not points:
        return None, None
    running, steps_s = [sequences for sequences, _ in points], [step_s for _, step_s in points]
    mean, mean_s = statistics.fmean(running), statistics.fmean(steps_s)
    if max(running) < _ALONE:
        return mean_s, 0.0
    if max(running) < _SPREAD * min(running) or len(points) < 3:
        return 0.0, mean_s / mean
    # A line that falls, or that begins below 0, comes of noise: the nearest one that does neither.
    slope = max(0.0, statistics.linear_regression(running, steps_s).slope)
    return max(0.0, mean_s - slope * mean), min(slope, mean_s / mean)


def _point(load: Mapping[str, Any]) -> tuple[float, float] | None:
    """Sequences that an engine runs while it works, and the seconds of its step then."""
    count, running, per_s, busy = (
        _number(load, name, 0.0) for name in ("generators", "running", "tokens_per_s", "busy")
    )
    if not count or not running or per_s <= 0 or busy < _LEAST_BUSY:
        return None
    return running / count / busy, running / per_s  # each step makes one token per sequence


def _with_numbers(records: Sequence[Mapping[str, Any]], *names: str) -> list[Mapping[str, Any]]:
    return [record for record in records if all(is_number(record.get(name)) for name in names)]


def _number(record: Mapping[str, Any], name: str, default: float) -> float:
    value: Any = record.get(name)
    return float(value) if is_number(value) else default
