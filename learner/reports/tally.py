"""Numbers of training steps: those of one, worked out from its groups, and what a run remembers of all.

It remembers steps, publishes and evaluations: as much after a million of them as after a thousand.
"""

import dataclasses
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from learner.evaluation.results import EvaluationResult
from learner.weights.published import PublishReport
from protocol.trajectories import Trajectory, TrajectoryGroup

_WEIGHT = 0.02
_MAX_SERVICES = 32
_MAX_VALUES = 2048
_MAX_NAMES = 32


@dataclass(frozen=True)
class StepRecord:
    """A training step. Times in seconds, `time_s` since the run's first step began, with the time in which no learner
    ran; lengths count sampled tokens, those too that were too old for a loss.

    `lag_counts` counts trajectories by lag, `token_lag_counts` sampled tokens by lag; `lease_ids` are those of the
    groups, in training order. `reward_by_verifier` is the mean reward of the trajectories that each verifier judged,
    `reward_by_environment` that of each environment's; `reward_by_component` the mean of each component where it is
    given. All but the numbers of lag are of the groups that were trained for the first time: `reused_lease_ids` are
    those of the others, `reused_share` is their part of all groups, and `reused_lag_mean` the mean lag of their
    trajectories; None where nothing is reused. Where these others may lag more than `max_lag`, `lag_max` is of the new
    ones alone, `reused_lag_max` of the others, `reused_lag_bound` the bound that they had, and `tokens_beyond_max_lag`
    the number of their tokens that lag more; None elsewhere.
    """

    step: int
    lease_ids: tuple[int, ...]
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
    cpu_s: float | None = None
    early_s: float | None = None
    reward_by_verifier: Mapping[str, float] = field(default_factory=dict)
    reward_by_environment: Mapping[str, float] = field(default_factory=dict)
    reward_by_component: Mapping[str, float] = field(default_factory=dict)
    reused_lease_ids: tuple[int, ...] = ()
    reused_share: float | None = None
    reused_lag_mean: float | None = None
    reused_lag_max: int | None = None
    reused_lag_bound: int | None = None
    tokens_beyond_max_lag: int | None = None


@dataclass(frozen=True)
class LagBounds:
    """Bounds on the lag in a run that has two: `max_lag`, and `reused`, that of a step's groups that were trained
    before.
    """

    max_lag: int
    reused: int


class RewardsSeen:
    """Reward services that judged what was trained, how fast, and for which step at last. Any thread may read."""

    def __init__(self) -> None:
        self._seen: dict[str, dict[str, Any]] = {}

    def saw(self, groups: Sequence[TrajectoryGroup], *, step: int) -> None:
        """Notes who judged the trajectories of a step's groups."""
        seen = dict(self._seen)
        for reward in (one.reward for group in groups for one in group.trajectories):
            name = reward.service_id or reward.endpoint or reward.verifier
            known = seen.pop(name, {"latency_s": reward.latency_s})
            latency_s = known["latency_s"] + _WEIGHT * (reward.latency_s - known["latency_s"])
            seen[name] = {"name": name, "url": reward.endpoint, "latency_s": latency_s, "step": step}
        self._seen = dict(list(seen.items())[-_MAX_SERVICES:])

    def shown(self) -> list[dict[str, Any]]:
        """By name; latencies are a moving mean, in seconds."""
        return [one for _, one in sorted(self._seen.items())]


@dataclass(frozen=True)
class Timing:
    """Seconds of a step, by what they went into; `cpu_s` are those in which the trainer's thread computed, from one
    step's record to the next. `early_s` are those of `train_s` in which the batch was not complete yet, None where no
    step begins before it is.
    """

    time_s: float
    wait_s: float
    train_s: float
    copy_s: float
    cpu_s: float | None = None
    early_s: float | None = None


def step_record(
    groups: Sequence[TrajectoryGroup],
    *,
    version: int,
    timing: Timing,
    success_reward: float,
    reused: Sequence[TrajectoryGroup] | None = None,
    bounds: LagBounds | None = None,
) -> StepRecord:
    """The record of the step that trained these groups at `version`, and beside them `reused` ones, None in a run that
    reuses nothing. `bounds` where those have a bound on their lag of their own.
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    rewards = np.array([t.reward.reward for t in trajectories], dtype=np.float64)
    lengths = np.array([sum(span.end - span.start for span in t.version_spans) for t in trajectories])
    finishes = Counter(t.turns[-1].finish_reason for t in trajectories)
    used = [trajectory for group in reused or () for trajectory in group.trajectories]
    reused_lags = _lags(used, version=version)
    new_lags = _lags(trajectories, version=version)
    lags = new_lags + reused_lags
    uniform = sum(
        len({(t.player, t.reward.reward) for t in group.trajectories}) == len(group.by_player) for group in groups
    )
    return StepRecord(
        step=version + 1,
        lease_ids=tuple(group.lease_id for group in groups),
        groups=len(groups),
        trajectories=len(trajectories),
        sampled_tokens=sum(t.sampled_tokens for t in trajectories),
        reward_mean=float(rewards.mean()),
        reward_std=float(rewards.std()),
        solved_share=float((rewards >= success_reward).mean()),
        uniform_groups_share=uniform / len(groups),
        length_mean=float(lengths.mean()),
        truncated_share=sum(t.truncated for t in trajectories) / len(trajectories),
        end_token_share=finishes["stop"] / len(trajectories),
        lag_mean=float(np.mean(lags)),
        lag_max=max(lags if bounds is None else new_lags),
        lag_counts=dict(sorted(Counter(lags).items())),
        token_lag_counts=_token_lags([*trajectories, *used], version=version),
        mixed_version_share=sum(len(t.versions) > 1 for t in trajectories) / len(trajectories),
        reward_by_verifier=_means((t.reward.verifier, t.reward.reward) for t in trajectories),
        reward_by_environment=_means((g.environment, t.reward.reward) for g in groups for t in g.trajectories),
        reward_by_component=_means(pair for t in trajectories for pair in t.reward.components.items()),
        reused_lease_ids=tuple(group.lease_id for group in reused or ()),
        reused_share=None if reused is None else len(reused) / (len(groups) + len(reused)),
        reused_lag_mean=float(np.mean(reused_lags)) if reused_lags else None,
        **({} if bounds is None else _apart(used, reused_lags, bounds, version=version)),
        **dataclasses.asdict(timing),
    )


def _apart(used: Sequence[Trajectory], lags: Sequence[int], bounds: LagBounds, *, version: int) -> dict[str, Any]:
    counts = _token_lags(used, version=version)
    return {
        "reused_lag_max": max(lags, default=None),
        "reused_lag_bound": bounds.reused,
        "tokens_beyond_max_lag": sum(count for lag, count in counts.items() if lag > bounds.max_lag),
    }


def _lags(trajectories: Sequence[Trajectory], *, version: int) -> list[int]:
    return [version - oldest for t in trajectories if (oldest := t.oldest_version) is not None]


def _means(pairs: Iterable[tuple[str, float | None]]) -> dict[str, float]:
    """The mean of each name's values, by name; of the first names alone, should a verifier make up new ones."""
    found: dict[str, list[float]] = {}
    for name, value in pairs:
        if value is not None and (name in found or len(found) < _MAX_NAMES):
            found.setdefault(name, []).append(value)
    return {name: statistics.fmean(values) for name, values in sorted(found.items())}


def _token_lags(trajectories: Sequence[Trajectory], *, version: int) -> dict[int, int]:
    counts: Counter[int] = Counter()
    for trajectory in trajectories:
        versions = trajectory.token_versions()[trajectory.loss_mask == 1]
        for number, count in zip(*np.unique(version - versions, return_counts=True), strict=True):
            counts[int(number)] += int(count)
    return dict(sorted(counts.items()))


class _SavedPart(BaseModel):
    """A part of what a checkpoint keeps, as JSON. What an earlier version kept besides is not read."""

    model_config = ConfigDict(extra="ignore")


class ThinnedRow(_SavedPart):
    """Every `stride`-th value of a row, and of all of them the number and the largest."""

    count: int = 0
    stride: int = 1
    largest: float | None = None
    values: list[float] = Field(default_factory=list)

    def add(self, value: float) -> None:
        """Takes the next value of the row."""
        if self.count % self.stride == 0:
            self.values.append(value)
        self.count += 1
        self.largest = value if self.largest is None else max(self.largest, value)
        if len(self.values) > _MAX_VALUES:
            self.values, self.stride = self.values[::2], 2 * self.stride

    def ends(self) -> tuple[float, float]:
        """The means of the first and of the last twentieth of the values that are kept; there is one at least."""
        edge = max(1, len(self.values) // 20)
        return statistics.fmean(self.values[:edge]), statistics.fmean(self.values[-edge:])

    def median(self) -> float | None:
        """Of the values that are kept; None of an empty row."""
        return statistics.median(self.values) if self.values else None


class Evaluations(_SavedPart):
    """The newest evaluation of version 0, and the newest of all."""

    before: EvaluationResult | None = None
    newest: EvaluationResult | None = None

    def add(self, result: EvaluationResult) -> None:
        """Takes the next one."""
        self.newest = result
        if result.version == 0:
            self.before = result

    def of_version(self, version: int) -> EvaluationResult | None:
        """The newest of version 0, or of the version that was evaluated last."""
        found = self.before if version == 0 else self.newest
        return found if found is not None and found.version == version else None


class Tally(_SavedPart):
    """Sums over the steps of the history of the present weights. Shares are summed over steps, times in seconds.

    `wall_s`: the time in which they were trained, over all lives of the learner, and `life_s` the `time_s` up to which
    that is counted. `began_unix_s`: when the run's first step began.
    """

    steps: int = 0
    last_step: int = 0
    groups: int = 0
    trajectories: int = 0
    sampled_tokens: int = 0
    wait_s: float = 0.0
    truncated_share: float = 0.0
    end_token_share: float = 0.0
    mixed_version_share: float = 0.0
    lag_max: int = 0
    lag_counts: dict[int, int] = Field(default_factory=dict)
    token_lag_counts: dict[int, int] = Field(default_factory=dict)
    train_s: ThinnedRow = Field(default_factory=ThinnedRow)
    reward: ThinnedRow = Field(default_factory=ThinnedRow)
    publish_s: ThinnedRow = Field(default_factory=ThinnedRow)
    pause_s: ThinnedRow = Field(default_factory=ThinnedRow)
    probe_gap: ThinnedRow = Field(default_factory=ThinnedRow)
    first_publish: tuple[float, float] | None = None
    evaluations: Evaluations = Field(default_factory=Evaluations)
    wall_s: float = 0.0
    life_s: float = 0.0
    began_unix_s: float | None = None

    def step(self, record: StepRecord) -> None:
        """Takes the next step."""
        self.steps += 1
        self.last_step = record.step
        self.groups += record.groups
        self.trajectories += record.trajectories
        self.sampled_tokens += record.sampled_tokens
        self.wait_s += record.wait_s
        self.truncated_share += record.truncated_share
        self.end_token_share += record.end_token_share
        self.mixed_version_share += record.mixed_version_share
        self.lag_max = max(self.lag_max, record.lag_max)
        self.lag_counts = _added(self.lag_counts, record.lag_counts)
        self.token_lag_counts = _added(self.token_lag_counts, record.token_lag_counts)
        self.train_s.add(record.train_s)
        self.reward.add(record.reward_mean)

    def timed(self, time_s: float) -> None:
        """A step ended so long after the run's first one began."""
        self.wall_s += max(0.0, time_s - self.life_s)
        self.life_s = time_s

    def publish(self, report: PublishReport) -> None:
        """Takes a publish. The first one, for which nobody is ready yet, counts only if it stays the only one."""
        self.probe_gap.add(report.probe_gap)
        if self.first_publish is None:
            self.first_publish = report.total_s, report.pause_s
            return
        self.publish_s.add(report.total_s)
        self.pause_s.add(report.pause_s)

    def publish_times(self) -> tuple[float | None, float | None, float | None]:
        """Median and longest publish, median pause."""
        if self.publish_s.count or self.first_publish is None:
            return self.publish_s.median(), self.publish_s.largest, self.pause_s.median()
        total_s, pause_s = self.first_publish
        return total_s, total_s, pause_s


def _added(counts: Mapping[int, int], more: Mapping[int, int]) -> dict[int, int]:
    return dict(sorted((Counter(counts) + Counter(more)).items()))
