"""The records of a run's former lives, read again from `metrics.jsonl` at a resume."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from learner.evaluation.results import EvaluationResult
from learner.reports.history import Entry, RunHistory, lines_of, objects_in
from learner.reports.tally import StepRecord
from learner.weights.published import PublishReport

logger = logging.getLogger(__name__)
T = TypeVar("T", StepRecord, PublishReport, EvaluationResult)
N = TypeVar("N", int, float)


@dataclass
class PastRecords:
    """The records that belong to the history of the weights. `wall_s`: seconds spent training, lost steps included."""

    steps: list[StepRecord]
    publishes: list[PublishReport]
    evaluations: list[EvaluationResult]
    wall_s: float


def read_past(
    path: Path, *, up_to_version: int, from_byte: int = 0, after_step: int = 0, last_time_s: float = 0.0
) -> PastRecords:
    """Records from `from_byte` on, without what a resume at `up_to_version` loses.

    Steps up to `after_step`, which ended at `last_time_s`, are counted already; unreadable lines are counted and
    skipped.
    """
    history, wall_s = RunHistory(_step, _event_record), 0.0
    counted_until_s: float | None = last_time_s
    timed = set[int]()
    for line in lines_of(path, at=from_byte):
        entry: Entry = history.add(line) or {}
        match entry:
            case {"kind": "step", "time_s": int() | float() as time_s}:
                counted_until_s = _began_at(entry) if counted_until_s is None else counted_until_s
                wall_s, counted_until_s = wall_s + max(0.0, time_s - counted_until_s), time_s
                timed.add(entry["step"])
            case {"kind": "replay", "step": int() as step} if step > after_step and step not in timed:
                wall_s += trained_again_s(entry)
                timed.add(step)
            case {"kind": "resume"}:
                counted_until_s = None  # until the next step begins nothing is trained
    if history.unread:
        logger.warning("%d lines of %s cannot be read: the summary leaves them out", history.unread, path)
    history.cut(up_to_version)
    records = [event["record"] for event in history.events if "record" in event]
    return PastRecords(
        steps=[record for step, record in history.steps.items() if step > after_step],
        publishes=[record for record in records if isinstance(record, PublishReport)],
        evaluations=[record for record in records if isinstance(record, EvaluationResult)],
        wall_s=wall_s,
    )


def trained_again_s(step: Mapping[str, Any]) -> float:
    """Seconds of a step that was trained from the log, where its first time is not known. An earlier release may have
    written less.
    """
    return float(step.get("train_s", 0.0) + step.get("copy_s", 0.0))


def _began_at(step: Entry) -> float:
    """The `time_s` at which a step began."""
    return float(step["time_s"] - sum(step[name] for name in ("wait_s", "train_s", "copy_s")))


def began_unix_s(path: Path) -> float | None:
    """When the first step of a run began, by its lines; None before that."""
    for entry in objects_in(path):
        match entry:
            case {"kind": "step", "unix_s": int() | float() as unix_s, "time_s": int() | float() as time_s}:
                return float(unix_s - time_s)
    return None


def _event_record(kind: str, entry: Entry) -> Entry | None:
    match kind:
        case "publish":
            return {"record": _from(PublishReport, entry)}
        case "evaluation":
            return {"record": _evaluation(entry)}
    return None


def _step(entry: Entry) -> StepRecord:
    counts = {name: _counts(entry[name]) for name in ("lag_counts", "token_lag_counts")}
    leases = {name: tuple(entry.get(name, ())) for name in ("lease_ids", "reused_lease_ids")}
    return _from(StepRecord, {**entry, **counts, **leases})


def _evaluation(entry: Entry) -> EvaluationResult:
    by_k = {name: _counts(entry.get(name, {})) for name in ("pass_at_k", "cons_at_k")}
    return _from(EvaluationResult, {**entry, **by_k})


def _counts(entry: Mapping[str, N]) -> dict[int, N]:
    """JSON has no keys but text."""
    return {int(key): value for key, value in entry.items()}


def _from(kind: type[T], entry: Entry) -> T:
    """An earlier release may have written less: what has a default may be missing. Raises TypeError for the rest."""
    return kind(**{each.name: entry[each.name] for each in fields(kind) if each.name in entry})
