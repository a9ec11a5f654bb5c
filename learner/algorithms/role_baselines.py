"""Baselines of roles: what the policy has got so far as each player of each environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from learner.algorithms.advantages import Grouping


@dataclass(frozen=True)
class RoleAdvantages:
    """`advantages` [S] of the trajectories, and the `baselines` of all roles so far, by role, for the next step."""

    advantages: Tensor
    baselines: Mapping[int, float]


def by_role(*, rewards: Tensor, roles: Tensor, baselines: Mapping[int, float], decay: float) -> RoleAdvantages:
    """R less the baseline that its role had before this step. `rewards` [S] float64, `roles` [S] int64.

    A role begins at 0. After a step in which it has n trajectories, whose mean reward is m, its baseline b is decay^n b
    + (1 - decay^n) m: what n updates decay b + (1 - decay) R, one by one, come to where all R are m, and the same in
    every order. The baseline of this step does not know its rewards, so that it biases no gradient. Roles that this
    step has not keep theirs. Source: role-conditioned advantage estimation of SPIRAL (arXiv 2506.24119), which updates
    game by game.
    """
    grouping = Grouping.of(roles)
    before = rewards.new_tensor([baselines.get(role, 0.0) for role in roles.tolist()])
    kept = torch.pow(decay, grouping.sizes.to(rewards.dtype))
    after = kept * before + (1.0 - kept) * grouping.means(rewards)
    return RoleAdvantages(
        advantages=rewards - before, baselines={**baselines, **dict(zip(roles.tolist(), after.tolist(), strict=True))}
    )
