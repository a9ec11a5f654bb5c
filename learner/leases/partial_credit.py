"""Partial credit for a group that outlived the bound on its lag: what is too old leaves the loss, its rewards stay.

A token is trained by itself: its importance ratio rests on its own logprobs, whatever was sampled before it. So of a
rollout that took longer than `max_lag` versions the later turns can be trained within the bound, with the reward that
all of it earned. A trajectory that has no such token left is in no loss, and still one of those that the others of its
group are compared with: to leave it out would compare the long ones with each other alone.
"""

from dataclasses import dataclass

import numpy as np

from protocol.trajectories import Trajectory, TrajectoryGroup


@dataclass(frozen=True)
class CreditedGroup:
    """A group of which `tokens` left the loss; `trajectories` of it have no token in a loss any more."""

    group: TrajectoryGroup
    tokens: int = 0
    trajectories: int = 0


def credited_from(group: TrajectoryGroup, *, version: int) -> CreditedGroup:
    """The group without tokens that are older than policy version `version` in its loss.

    It is as it was where there are none, and where nothing would be left.
    """
    parts = [_credited_from(one, version) for one in group.trajectories]
    left = [_trained(one) for one in parts]
    tokens = sum(map(_trained, group.trajectories)) - sum(left)
    if not tokens or not any(left):
        return CreditedGroup(group)
    kept = group.model_copy(update={"trajectories": tuple(parts)})
    return CreditedGroup(kept, tokens=tokens, trajectories=left.count(0))


def without_loss(group: TrajectoryGroup) -> TrajectoryGroup:
    """The group of which no token is trained. Its trajectories are still compared with each other."""
    masks = [np.zeros_like(one.loss_mask) for one in group.trajectories]
    untrained = zip(group.trajectories, masks, strict=True)
    return group.model_copy(
        update={"trajectories": tuple(one.model_copy(update={"loss_mask": mask}) for one, mask in untrained)}
    )


def _trained(trajectory: Trajectory) -> int:
    return int(trajectory.loss_mask.sum())


def _credited_from(trajectory: Trajectory, version: int) -> Trajectory:
    old = (trajectory.loss_mask == 1) & (trajectory.token_versions() < version)
    if not old.any():
        return trajectory
    mask = np.where(old, 0, trajectory.loss_mask).astype(trajectory.loss_mask.dtype)
    return trajectory.model_copy(update={"loss_mask": mask})
