"""The numbers of one training step, worked out from its groups."""

import dataclasses
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from protocol.trajectories import Trajectory, TrajectoryGroup


@dataclass(frozen=True)
class StepRecord:
    """One training step. Times in seconds, `time_s` since the first step began; lengths count sampled tokens.

    `lag_counts` counts trajectories by lag, `token_lag_counts` sampled tokens by lag; `lease_ids` are those of the
    groups, in training order. `reward_by_verifier` is the mean reward of the trajectories that each verifier judged.
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
    reward_by_verifier: Mapping[str, float] = field(default_factory=dict)


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
    uniform = sum(
        len({(t.player, t.reward.reward) for t in group.trajectories}) == len(group.by_player) for group in groups
    )
    return StepRecord(
        step=version + 1,
        lease_ids=tuple(group.lease_id for group in groups),
        groups=len(groups),
        trajectories=len(trajectories),
        sampled_tokens=int(lengths.sum()),
        reward_mean=float(rewards.mean()),
        reward_std=float(rewards.std()),
        solved_share=float((rewards >= success_reward).mean()),
        uniform_groups_share=uniform / len(groups),
        length_mean=float(lengths.mean()),
        truncated_share=sum(t.truncated for t in trajectories) / len(trajectories),
        end_token_share=finishes["stop"] / len(trajectories),
        lag_mean=float(np.mean(lags)),
        lag_max=max(lags),
        lag_counts=dict(sorted(Counter(lags).items())),
        token_lag_counts=_token_lags(trajectories, version=version),
        mixed_version_share=sum(len(versions_of(t)) > 1 for t in trajectories) / len(trajectories),
        reward_by_verifier=_by_verifier(trajectories, rewards.tolist()),
        **dataclasses.asdict(timing),
    )


def _by_verifier(trajectories: Sequence[Trajectory], rewards: Sequence[float]) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for trajectory, reward in zip(trajectories, rewards, strict=True):
        found.setdefault(trajectory.reward.verifier, []).append(reward)
    return {verifier: statistics.fmean(given) for verifier, given in sorted(found.items())}


def _token_lags(trajectories: Sequence[Trajectory], *, version: int) -> dict[int, int]:
    counts: Counter[int] = Counter()
    for trajectory in trajectories:
        versions = trajectory.token_versions()[trajectory.loss_mask == 1]
        for number, count in zip(*np.unique(version - versions, return_counts=True), strict=True):
            counts[int(number)] += int(count)
    return dict(sorted(counts.items()))


def versions_of(trajectory: Trajectory) -> set[str]:
    """The policy versions that sampled its tokens."""
    return {span.version for span in trajectory.version_spans}
