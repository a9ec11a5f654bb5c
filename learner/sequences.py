"""From groups of trajectories to what the trainer takes: tokens, masks, behavior logprobs, advantages and lags."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from learner.training.batch import TrainSequence
from protocol.trajectories import Trajectory, TrajectoryGroup

Advantages = Callable[[torch.Tensor], torch.Tensor]


class LagBoundBroken(AssertionError):
    """A token older than `max_lag` was about to enter a loss."""


def sequences_of(
    groups: Sequence[TrajectoryGroup], *, version: int, max_lag: int, advantages: Advantages
) -> list[TrainSequence]:
    """One sequence for each trajectory, in order. `advantages` maps a group's rewards [G] to advantages [G].

    `version` is the learner's. Raises LagBoundBroken rather than letting a token with lag > max_lag through.
    """
    return [
        _sequence(trajectory, advantage=advantage, version=version, max_lag=max_lag)
        for group in groups
        for trajectory, advantage in zip(group.trajectories, _group_advantages(group, advantages), strict=True)
    ]


def _group_advantages(group: TrajectoryGroup, advantages: Advantages) -> list[float]:
    rewards = [trajectory.reward.reward for trajectory in group.trajectories]
    assert None not in rewards, f"lease {group.lease_id}: a trajectory without a reward reached the batch"
    values: list[float] = advantages(torch.tensor(rewards, dtype=torch.float64)).tolist()
    return values


def _sequence(trajectory: Trajectory, *, advantage: float, version: int, max_lag: int) -> TrainSequence:
    mask = trajectory.loss_mask.astype(np.bool_)
    lags = np.where(mask, version - trajectory.token_versions(), 0).astype(np.int32)
    if lags.max(initial=0) > max_lag or lags.min(initial=0) < 0:
        raise LagBoundBroken(f"lags {lags.min()} to {lags.max()} at version {version}; the bound is 0 to {max_lag}")
    return TrainSequence(
        token_ids=trajectory.token_ids,
        loss_mask=mask,
        behavior_logprobs=trajectory.behavior_logprobs,
        advantages=np.where(mask, advantage, 0.0).astype(np.float32),
        lags=lags,
        mixed_versions=len({span.version for span in trajectory.version_spans}) > 1,
    )
