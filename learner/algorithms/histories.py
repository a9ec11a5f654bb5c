"""Turns compared with those that began alike: the same state, and the same states before it."""

from __future__ import annotations

import torch
from torch import Tensor

from learner.algorithms.advantages import Grouping, acted_turns, group
from learner.algorithms.knobs import AdvantageScale


def by_history(
    *,
    rewards: Tensor,
    groups: Tensor,
    sequences: Tensor,
    turns: Tensor,
    turn_states: Tensor,
    gamma_step: float,
    history: int,
    power: float,
    scale: AdvantageScale,
    turn_rewards: Tensor | None = None,
) -> Tensor:
    """The mean of a turn's advantages among turns of the group that share its newest k states, k from 1 to `history` +
    1, each weighed by (k + 1)^power, [M].

    States are those of the turn and of the ones before it in its trajectory, which has k of them or is not in groups
    of k. Only advantages other than 0 count: of a turn that nothing can be compared with, or no otherwise than by
    equal returns, there is none, and the token has 0. Arguments and returns as in `advantages.step_group`; there is no
    advantage of the whole trajectory. Source: HGPO (arXiv 2602.22817), with the weights of its authors' code.
    """
    found = acted_turns(
        rewards=rewards, sequences=sequences, turns=turns, turn_rewards=turn_rewards, gamma_step=gamma_step
    )
    states = Grouping.of(torch.stack([groups[found.owners], turn_states[found.turns]], dim=1)).index
    follows = torch.zeros_like(found.owners, dtype=torch.bool)
    follows[1:] = found.owners[1:] == found.owners[:-1]
    histories, known = states, torch.ones_like(follows)
    total, weights = (torch.zeros_like(found.returns) for _ in range(2))
    for shared in range(1, history + 2):
        made = torch.zeros_like(found.returns)
        made[known] = group(rewards=found.returns[known], groups=histories[known], scale=scale)
        weight = (made != 0) * float((shared + 1) ** power)
        total, weights = total + weight * made, weights + weight
        # The newest k + 1 states are the newest k of the turn before, and this one's.
        histories = Grouping.of(torch.stack([histories.roll(1), states], dim=1)).index
        known = follows & known.roll(1)
    return torch.where(weights > 0, total / weights.clamp(min=1.0), 0.0)[found.of_token]
