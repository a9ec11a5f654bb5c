"""Rates of a recorded run, for `headway plan --calibrate`: what its steps, publishes and generators took.

metrics.jsonl: step ──▶ seconds of a token in training; publish ──▶ its times; load ──▶ what an engine's step takes,
                                                        with few sequences and with many
"""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.report import ReportedRun, read_run
from learner.reports.history import is_number
from services.config.sources import ConfigError

_LEAST_BUSY = 0.05
_SPREAD = 1.3


@dataclass(frozen=True)
class MeasuredRates:
    """Rates of a run with the same model on the same devices; None where it does not tell.

    An engine's step takes `token_s` and `sequence_s` for each sequence that it runs; `train_s` is that of a sampled
    token on one rank.
    """

    run: str
    token_s: float | None = None
    sequence_s: float | None = None
    train_s: float | None = None
    publish_s: float | None = None
    pause_s: float | None = None


def measured_rates(folder: Path) -> MeasuredRates:
    """Of the run in a folder. Raises ConfigError for one that is none, or that has not trained a step."""
    run = read_run(folder)
    steps = [step for step in run.steps if step.get("kind") == "step" and step.get("sampled_tokens")]
    steps = steps[len(steps) // 4 :]
    if not steps:
        raise ConfigError([f"{folder} holds no step: expected a run that has trained some, such as runs/addition"])
    ranks = _number(run.made.get("settings", {}), "ranks", 1)
    trained = sum(step["train_s"] + step["copy_s"] for step in steps)
    token_s, sequence_s = engine_step(run)
    publishes = run.publishes[len(run.publishes) // 4 :]
    return MeasuredRates(
        run=run.name,
        token_s=token_s,
        sequence_s=sequence_s,
        train_s=ranks * trained / sum(step["sampled_tokens"] for step in steps),
        publish_s=statistics.fmean(one["total_s"] for one in publishes) if publishes else None,
        pause_s=statistics.fmean(one["pause_s"] for one in publishes) if publishes else None,
    )


def engine_step(run: ReportedRun) -> tuple[float | None, float | None]:
    """Seconds of an engine's step without a sequence, and of each sequence, by least squares over the run's loads.

    Where all have about as many sequences, all of the time is theirs if they are many, and none if it is one.
    """
    points = [point for load in run.loads if (point := _point(load)) is not None]
    if not points:
        return None, None
    running = [at for at, _ in points]
    mean, mean_s = statistics.fmean(running), statistics.fmean(step_s for _, step_s in points)
    if max(running) < _SPREAD * min(running) or len(points) < 3:
        return 0.0, mean_s / mean
    over = sum((at - mean) ** 2 for at in running)
    slope = max(0.0, sum((at - mean) * (step_s - mean_s) for at, step_s in points) / over)
    return max(0.0, mean_s - slope * mean), min(slope, mean_s / mean)


def _point(load: Mapping[str, Any]) -> tuple[float, float] | None:
    """Sequences that an engine runs while it works, and the seconds of its step then."""
    count, running, per_s, busy = (
        _number(load, name, 0.0) for name in ("generators", "running", "tokens_per_s", "busy")
    )
    if not count or not running or per_s <= 0 or busy < _LEAST_BUSY:
        return None
    at_work = running / count / busy
    return at_work, at_work / (per_s / count / busy)


def _number(told: Mapping[str, Any], name: str, default: float) -> float:
    value: Any = told.get(name)
    return float(value) if is_number(value) and value else default
