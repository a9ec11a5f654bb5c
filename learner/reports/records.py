"""What a run writes down while it goes on: `metrics.jsonl`, `samples.jsonl`, and the line of progress.

`metrics.jsonl` holds one object a line, told apart by `kind`: `step`, `replay`, `publish`, `join` and
`evaluation`.
"""

import dataclasses
import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import numpy as np

from learner.intake.evaluation import EvaluationResult
from learner.training.metrics import StepMetrics
from learner.weights.reports import JoinReport, PublishReport
from protocol.trajectories import Trajectory, TrajectoryGroup

log = logging.getLogger(__name__)

_PROGRESS_EVERY_S = 5.0
_SAMPLES_PER_STEP = 3


@dataclass(frozen=True)
class StepRecord:
    """One training step. Times in seconds, `time_s` since the first step began; lengths count sampled
    tokens.

    `lag_counts` counts trajectories by lag, `token_lag_counts` sampled tokens by lag.
    """

    step: int
    time_s: float
    groups: int
    trajectories: int
    sampled_tokens: int
    reward_mean: float
    reward_std: float
    solved_share: float
    uniform_groups_share: float
    length_mean: float
    truncated_share: float
    end_token_share: float
    lag_mean: float
    lag_max: int
    lag_counts: Mapping[int, int]
    token_lag_counts: Mapping[int, int]
    mixed_version_share: float
    wait_s: float
    train_s: float
    copy_s: float


@dataclass(frozen=True)
class Timing:
    """Where a step's time went, in seconds."""

    time_s: float
    wait_s: float
    train_s: float
    copy_s: float


def step_record(
    groups: Sequence[TrajectoryGroup], *, version: int, timing: Timing, success_reward: float
) -> StepRecord:
    """The record of the step that trained these groups at `version`."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    rewards = np.array([t.reward.reward for t in trajectories], dtype=np.float64)
    lengths = np.array([int(t.loss_mask.sum()) for t in trajectories])
    finishes = Counter(t.turns[-1].finish_reason for t in trajectories)
    lags = [version - oldest for t in trajectories if (oldest := t.oldest_version) is not None]
    uniform = sum(len({t.reward.reward for t in group.trajectories}) == 1 for group in groups)
    return StepRecord(
        step=version + 1,
        groups=len(groups),
        trajectories=len(trajectories),
        sampled_tokens=int(lengths.sum()),
        reward_mean=float(rewards.mean()),
        reward_std=float(rewards.std()),
        solved_share=float((rewards >= success_reward).mean()),
        uniform_groups_share=uniform / len(groups),
        length_mean=float(lengths.mean()),
        truncated_share=finishes["length"] / len(trajectories),
        end_token_share=finishes["stop"] / len(trajectories),
        lag_mean=float(np.mean(lags)),
        lag_max=max(lags),
        lag_counts=dict(sorted(Counter(lags).items())),
        token_lag_counts=_token_lags(trajectories, version=version),
        mixed_version_share=sum(len(_versions(t)) > 1 for t in trajectories) / len(trajectories),
        **dataclasses.asdict(timing),
    )


def _token_lags(trajectories: Sequence[Trajectory], *, version: int) -> dict[int, int]:
    counts: Counter[int] = Counter()
    for trajectory in trajectories:
        versions = trajectory.token_versions()[trajectory.loss_mask == 1]
        for number, count in zip(*np.unique(version - versions, return_counts=True), strict=True):
            counts[int(number)] += int(count)
    return dict(sorted(counts.items()))


def _versions(trajectory: Trajectory) -> set[str]:
    return {span.version for span in trajectory.version_spans}


class Records:
    """The run's open files and the numbers of its last steps; a context manager."""

    def __init__(self, *, folder: Path, total_steps: int) -> None:
        self._total_steps = total_steps
        self._metrics: TextIO = (folder / "metrics.jsonl").open("a", encoding="utf-8")
        self._samples: TextIO = (folder / "samples.jsonl").open("a", encoding="utf-8")
        self._lock = threading.Lock()
        self._said_at = 0.0
        self._unsaid: list[StepRecord] = []
        self.steps: list[StepRecord] = []
        self.publishes: list[PublishReport] = []
        self.evaluations: list[EvaluationResult] = []

    def __enter__(self) -> "Records":
        return self

    def __exit__(self, *_: object) -> None:
        self._metrics.close()
        self._samples.close()

    def step(self, record: StepRecord, metrics: StepMetrics, groups: Sequence[TrajectoryGroup]) -> None:
        """Notes a step: its numbers, and a few of its trajectories."""
        self.steps.append(record)
        self._write({"kind": "step", **dataclasses.asdict(metrics), **dataclasses.asdict(record)})
        for group in groups[:_SAMPLES_PER_STEP]:
            self._samples.write(json.dumps(_sample(group, step=record.step), ensure_ascii=False) + "\n")
        self._samples.flush()
        self._unsaid.append(record)
        if time.monotonic() - self._said_at >= _PROGRESS_EVERY_S or record.step == self._total_steps:
            self._say_progress()

    def replay(self, step: int, metrics: StepMetrics) -> None:
        """Notes a step that was trained again, from the batch log."""
        self._write({"kind": "replay", **dataclasses.asdict(metrics), "step": step})

    def publish(self, report: PublishReport) -> None:
        """Notes a publish."""
        self.publishes.append(report)
        self._write({"kind": "publish", **dataclasses.asdict(report)})

    def join(self, report: JoinReport) -> None:
        """Notes a generator that caught up."""
        self._write({"kind": "join", **dataclasses.asdict(report)})

    def evaluation(self, result: EvaluationResult) -> None:
        """Notes and says an evaluation."""
        self.evaluations.append(result)
        self._write({"kind": "evaluation", **dataclasses.asdict(result)})
        log.info(
            "evaluation of version %d: accuracy %.3f on %d held-out tasks",
            result.version,
            result.accuracy,
            result.tasks,
        )

    def _write(self, entry: Mapping[str, object]) -> None:
        with self._lock:  # steps come from the trainer's thread, publishes and evaluations from the event loop
            self._metrics.write(json.dumps(entry) + "\n")
            self._metrics.flush()

    def _say_progress(self) -> None:
        recent, self._unsaid, self._said_at = self._unsaid, [], time.monotonic()
        last = recent[-1]
        trained_s = sum(record.wait_s + record.train_s + record.copy_s for record in recent)
        left_s = (self._total_steps - last.step) * trained_s / len(recent)
        log.info(
            "step %d/%d  reward %.3f  lag %.1f (max %d)  %.0f tokens/s  learner waits %.0f %%  ETA %s",
            last.step,
            self._total_steps,
            float(np.mean([record.reward_mean for record in recent])),
            float(np.mean([record.lag_mean for record in recent])),
            max(record.lag_max for record in recent),
            sum(record.sampled_tokens for record in recent) / max(trained_s, 1e-9),
            100 * sum(record.wait_s for record in recent) / max(trained_s, 1e-9),
            _clock(left_s),
        )


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
        "versions": sorted(_versions(trajectory)),
    }


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
