"""What a run writes down while it goes on: `metrics.jsonl`, `samples.jsonl`, and the line of progress.

`metrics.jsonl` holds one object a line, told apart by `kind`: `step`, `replay` (a step that was trained again, from the
batch log, with the same fields), `publish`, `join` (a generator that caught up), `evaluation`, and `resume`, which says
up to which version the lines before it belong to the run. `lag_bound` is the bound under which the step's batch was
taken; `guard` lines tell when the guard moved it, after which step, and what was beyond its limit.
"""

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from learner.evaluation.results import EvaluationResult
from learner.guard import GuardChange
from learner.history.line_file import LineFile, ignore
from learner.reports.former import read_former
from learner.reports.step_record import StepRecord, versions_of
from learner.training.metrics import StepMetrics
from learner.weights.reports import JoinReport, PublishReport
from protocol.trajectories import Trajectory, TrajectoryGroup

log = logging.getLogger(__name__)

_PROGRESS_EVERY_S = 5.0
_SAMPLES_PER_STEP = 3


class Records:
    """The run's open files and the numbers of its steps; a context manager.

    A line that cannot be written is lost: the first one is said, `failed_write` is told the file's name for each.
    """

    def __init__(self, *, folder: Path, total_steps: int, failed_write: Callable[[str], None] = ignore) -> None:
        self._total_steps = total_steps
        self._metrics = LineFile(folder / "metrics.jsonl", failed=failed_write)
        self._samples = LineFile(folder / "samples.jsonl", failed=failed_write)
        self._folder = folder
        self._said_at = 0.0
        self._unsaid: list[StepRecord] = []
        self.steps: list[StepRecord] = []
        self.publishes: list[PublishReport] = []
        self.evaluations: list[EvaluationResult] = []
        self.former_s = 0.0
        """Seconds that the run's former lives trained."""
        self.former_steps = 0

    def __enter__(self) -> "Records":
        return self

    def __exit__(self, *_: object) -> None:
        self._metrics.close()
        self._samples.close()

    def take_up(self, *, version: int, incarnation: int) -> None:
        """Goes on with the records of former lives, of which those up to `version` belong to this run."""
        former = read_former(self._folder / "metrics.jsonl", version=version)
        self.steps = [former.steps[step] for step in sorted(former.steps)]
        self.publishes, self.evaluations = former.publishes, former.evaluations
        self.former_s, self.former_steps = former.wall_s, len(former.steps)
        self._metrics.write({"kind": "resume", "version": version, "incarnation": incarnation})

    def step(
        self,
        record: StepRecord,
        metrics: StepMetrics,
        groups: Sequence[TrajectoryGroup],
        *,
        lag_bound: int | None = None,
    ) -> None:
        """Notes a step: its numbers, and a few of its trajectories."""
        self.steps.append(record)
        self._write_step("step", record, metrics, lag_bound=lag_bound)
        for group in groups[:_SAMPLES_PER_STEP]:
            self._samples.write(_sample(group, step=record.step))
        self._unsaid.append(record)
        if time.monotonic() - self._said_at >= _PROGRESS_EVERY_S or record.step == self._total_steps:
            self._say_progress()

    def replay(self, record: StepRecord, metrics: StepMetrics, *, lag_bound: int | None = None) -> None:
        """Notes a step that was trained again, from the batch log. Its `time_s` and `wait_s` are 0."""
        if not self.steps or self.steps[-1].step < record.step:  # the life that logged it died before it noted it
            self.steps.append(record)
        self._write_step("replay", record, metrics, lag_bound=lag_bound)

    def _write_step(self, kind: str, record: StepRecord, metrics: StepMetrics, *, lag_bound: int | None) -> None:
        numbers = {**dataclasses.asdict(metrics), **dataclasses.asdict(record)}
        self._metrics.write({"kind": kind, **numbers, "lag_bound": lag_bound})

    def guard(self, change: GuardChange, *, step: int) -> None:
        """Notes and says what the guard did after a step."""
        log.log(logging.INFO if change.kind == "loosened" else logging.WARNING, "guard: step %d: %s", step, change.text)
        reading = change.reading
        self._metrics.write(
            {
                "kind": "guard",
                "step": step,
                "change": change.kind,
                "before": change.before,
                "after": change.after,
                "steps": change.steps,
                "measure": None if reading is None else reading.measure,
                "value": None if reading is None else reading.value,
                "limit": None if reading is None else reading.limit,
            }
        )

    def publish(self, report: PublishReport) -> None:
        """Notes a publish."""
        self.publishes.append(report)
        self._metrics.write({"kind": "publish", **dataclasses.asdict(report)})

    def join(self, report: JoinReport) -> None:
        """Notes a generator that caught up."""
        self._metrics.write({"kind": "join", **dataclasses.asdict(report)})

    def evaluation(self, result: EvaluationResult) -> None:
        """Notes and says an evaluation."""
        self.evaluations.append(result)
        self._metrics.write({"kind": "evaluation", **dataclasses.asdict(result)})
        log.info(
            "evaluation of version %d: accuracy %.3f (%.3f to %.3f) on %d held-out tasks%s%s",
            result.version,
            result.accuracy,
            result.accuracy_low,
            result.accuracy_high,
            result.tasks,
            "".join(f", pass@{k} {share:.3f}" for k, share in result.pass_at_k.items() if k > 1),
            _by_verifier(result.accuracy_by_verifier),
        )

    def _say_progress(self) -> None:
        recent, self._unsaid, self._said_at = self._unsaid, [], time.monotonic()
        last = recent[-1]
        trained_s = sum(record.wait_s + record.train_s + record.copy_s for record in recent)
        left_s = (self._total_steps - last.step) * trained_s / len(recent)
        log.info(
            "step %d/%d  reward %.3f%s  lag %.1f (max %d)  %.0f tokens/s  learner waits %.0f %%  ETA %s",
            last.step,
            self._total_steps,
            float(np.mean([record.reward_mean for record in recent])),
            _by_verifier(last.reward_by_verifier),
            float(np.mean([record.lag_mean for record in recent])),
            max(record.lag_max for record in recent),
            sum(record.sampled_tokens for record in recent) / max(trained_s, 1e-9),
            100 * sum(record.wait_s for record in recent) / max(trained_s, 1e-9),
            _clock(left_s),
        )


def _by_verifier(values: Mapping[str, float]) -> str:
    """As a line says it; nothing where one verifier judged all."""
    if len(values) < 2:
        return ""
    return f" ({', '.join(f'{verifier} {value:.3f}' for verifier, value in values.items())})"


def _sample(group: TrajectoryGroup, *, step: int) -> dict[str, object]:
    """The group's best and worst trajectory, as a person reads them."""
    ranked = sorted(group.trajectories, key=lambda trajectory: trajectory.reward.reward or 0.0)
    return {
        "step": step,
        "lease_id": group.lease_id,
        "environment": group.environment,
        "prompt": group.prompt_text,
        "completions": [_completion(trajectory) for trajectory in _ends(ranked)],
    }


def _ends(ranked: Sequence[Trajectory]) -> list[Trajectory]:
    return [ranked[0]] if len(ranked) == 1 else [ranked[0], ranked[-1]]


def _completion(trajectory: Trajectory) -> dict[str, object]:
    return {
        "text": trajectory.completion_text,
        "reward": trajectory.reward.reward,
        "tokens": int(trajectory.loss_mask.sum()),
        "finish_reason": trajectory.turns[-1].finish_reason,
        "versions": sorted(versions_of(trajectory)),
    }


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
