"""What a run's former lives wrote into `metrics.jsonl`, read back so that the summary covers the whole run."""

import json
import logging
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from learner.evaluation.results import EvaluationResult
from learner.reports.step_record import StepRecord
from learner.weights.reports import PublishReport

log = logging.getLogger(__name__)
T = TypeVar("T", StepRecord, PublishReport, EvaluationResult)
N = TypeVar("N", int, float)


@dataclass
class Former:
    """The records that belong to the history of the weights; `wall_s` is the time in which the steps were trained."""

    steps: dict[int, StepRecord] = field(default_factory=dict)
    publishes: list[PublishReport] = field(default_factory=list)
    evaluations: list[EvaluationResult] = field(default_factory=list)
    wall_s: float = 0.0
    _life_s: float = 0.0

    def add(self, entry: dict[str, Any]) -> None:
        """Takes one line. Raises KeyError or TypeError for one of another form."""
        match entry["kind"]:
            case "step":
                self._add_step(entry)
            case "replay":
                self.steps.setdefault(int(entry["step"]), _step(entry))
            case "publish":
                self.publishes.append(_from(PublishReport, entry))
            case "evaluation":
                self.evaluations.append(_evaluation(entry))
            case "resume":
                self.cut(version=int(entry["version"]))

    def _add_step(self, entry: dict[str, Any]) -> None:
        record = _step(entry)
        self.steps[record.step] = record
        self.wall_s += max(0.0, record.time_s - self._life_s)
        self._life_s = record.time_s

    def cut(self, *, version: int) -> None:
        """A life ended, and the next one began at `version`: what came after that version is lost."""
        self.steps = {step: record for step, record in self.steps.items() if step <= version}
        self.publishes = [report for report in self.publishes if report.version <= version]
        self.evaluations = [result for result in self.evaluations if result.version <= version]
        self._life_s = 0.0


def read_former(path: Path, *, version: int) -> Former:
    """The records up to `version`. Lines that cannot be read are left out, and counted in the log."""
    former, unread = Former(), 0
    with path.open("rb") as file:
        for line in file:
            try:
                former.add(json.loads(line))
            except (ValueError, KeyError, TypeError):
                unread += 1
    if unread:
        log.warning("%d lines of %s cannot be read: the summary leaves them out", unread, path)
    former.cut(version=version)
    return former


def _step(entry: dict[str, Any]) -> StepRecord:
    counts = {name: _counts(entry[name]) for name in ("lag_counts", "token_lag_counts")}
    return _from(StepRecord, {**entry, **counts, "lease_ids": tuple(entry["lease_ids"])})


def _evaluation(entry: dict[str, Any]) -> EvaluationResult:
    by_k = {name: _counts(entry.get(name, {})) for name in ("pass_at_k", "cons_at_k")}
    return _from(EvaluationResult, {**entry, **by_k})


def _counts(entry: dict[str, N]) -> dict[int, N]:
    """JSON has no keys but text."""
    return {int(key): value for key, value in entry.items()}


def _from(kind: type[T], entry: dict[str, Any]) -> T:
    """An earlier release may have written less: what has a default may be missing. Raises TypeError for the rest."""
    return kind(**{each.name: entry[each.name] for each in fields(kind) if each.name in entry})
