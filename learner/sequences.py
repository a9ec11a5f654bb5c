"""From groups of trajectories to what the trainer takes: tokens, masks, behavior logprobs, rewards and lags."""

from collections.abc import Iterator, Sequence

import numpy as np
import xxhash

from learner.algorithms.preset import Preset
from learner.training.batch import TrainSequence, TrainTurn
from protocol.trajectories import Trajectory, TrajectoryGroup, Turn


class LagBoundBroken(AssertionError):
    """A token older than `max_lag` was about to enter a loss."""


def sequences_of(
    groups: Sequence[TrajectoryGroup], *, version: int, max_lag: int, preset: Preset
) -> list[TrainSequence]:
    """One sequence for each trajectory that the preset selects of its group; of a pair the chosen one first.

    `version` is the learner's. Raises LagBoundBroken rather than letting a token with lag > max_lag through.
    """
    return [
        _sequence(trajectory, group=number, pair=number if preset.paired else -1, version=version, max_lag=max_lag)
        for number, group in enumerate(groups)
        for trajectory in _selected(group, preset)
    ]


def _selected(group: TrajectoryGroup, preset: Preset) -> Iterator[Trajectory]:
    rewards = [_reward(trajectory, group) for trajectory in group.trajectories]
    chosen = range(len(rewards)) if preset.select is None else preset.select(rewards)
    return (group.trajectories[index] for index in chosen)


def _reward(trajectory: Trajectory, group: TrajectoryGroup) -> float:
    reward = trajectory.reward.reward
    assert reward is not None, f"lease {group.lease_id}: a trajectory without a reward reached the batch"
    return reward


def _sequence(trajectory: Trajectory, *, group: int, pair: int, version: int, max_lag: int) -> TrainSequence:
    mask = trajectory.loss_mask.astype(np.bool_)
    lags = np.where(mask, version - trajectory.token_versions(), 0).astype(np.int32)
    if lags.max(initial=0) > max_lag or lags.min(initial=0) < 0:
        raise LagBoundBroken(f"lags {lags.min()} to {lags.max()} at version {version}; the bound is 0 to {max_lag}")
    return TrainSequence(
        token_ids=trajectory.token_ids,
        loss_mask=mask,
        behavior_logprobs=trajectory.behavior_logprobs,
        lags=lags,
        mixed_versions=len({span.version for span in trajectory.version_spans}) > 1,
        reward=trajectory.reward.reward or 0.0,
        group=group,
        pair=pair,
        truncated=trajectory.turns[-1].finish_reason == "length",
        turns=tuple(TrainTurn(start=turn.start, state=_state(trajectory, turn)) for turn in trajectory.turns),
    )


def _state(trajectory: Trajectory, turn: Turn) -> int:
    """What the policy was given in this turn, as a number: the same tokens, the same number."""
    given = np.ascontiguousarray(trajectory.token_ids[turn.start : turn.completion_start])
    digest: int = xxhash.xxh3_64_intdigest(given.tobytes())
    return digest - (1 << 63)
