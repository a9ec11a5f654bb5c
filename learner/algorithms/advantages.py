"""Advantages, from the rewards of a step. No result depends on the order of the trajectories.

Shapes. S trajectories: `rewards` [S] float64 and `groups` [S] int64, equal for the trajectories of one task; a group
may have any size and lie anywhere. M trained tokens: `sequences` [M] int64 is the trajectory (0 to S - 1) of each,
those of one trajectory next to each other and in order. What the environment said is not among the tokens. Results have
the dtype of the rewards and no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from learner.algorithms.grouping import Grouping
from learner.algorithms.knobs import AdvantageScale
from learner.algorithms.token_runs import at_end, discounted_sums, has_next

EPSILON = 1e-6


def group(*, rewards: Tensor, groups: Tensor, scale: AdvantageScale) -> Tensor:
    """(R - mean) / (d + 1e-6) within each group, d the unbiased standard deviation, the mean, or (`none`) nothing. [S].

    A group without spread, or of one, has advantages of exactly 0. With `scale = "mean"` so has a group whose mean is
    not above 1e-6: dividing by it would turn signs around or blow a rounding error up. Adding a number to all rewards
    of a group changes nothing under `std` and `none`. Sources: arXiv 2402.03300 (std), 2503.20783 (none), 2602.02710
    (mean, which supposes rewards that are not negative).
    """
    grouping = Grouping.of(groups)
    centred = _centred(rewards, grouping)
    if scale == "none":
        return centred
    if scale == "std":
        return centred / (grouping.deviations(rewards) + EPSILON)
    means = grouping.means(rewards)
    return torch.where(means > EPSILON, centred / (means.clamp(min=0.0) + EPSILON), 0.0)


def leave_one_out(*, rewards: Tensor, groups: Tensor) -> Tensor:
    """R minus the mean reward of the others of its group, [S]; 0 for a group of one, which has no others.

    Adding a number to all rewards of a group changes nothing. Source: RLOO, arXiv 2402.14740.
    """
    grouping = Grouping.of(groups)
    # R - (sum - R) / (n - 1) = n / (n - 1) x (R - mean), and centring keeps equal rewards at exactly 0.
    return _centred(rewards, grouping) * grouping.sizes / (grouping.sizes - 1).clamp(min=1)


def batch(
    *,
    rewards: Tensor,
    groups: Tensor,
    sequences: Tensor,
    subtract_group_mean: bool,
    token_rewards: Tensor | None = None,
) -> Tensor:
    """Rewards-to-go, standardised over all trained tokens of the step, [M].

    A token's reward-to-go is its trajectory's reward, less the mean of the group if `subtract_group_mean`, plus the
    `token_rewards` [M] (a KL penalty, say) from that token to the trajectory's end, undiscounted. Adding a number to
    all rewards changes nothing. Source: REINFORCE++ and its baseline variant, arXiv 2501.03262.
    """
    outcomes = _centred(rewards, Grouping.of(groups)) if subtract_group_mean else rewards
    to_go = outcomes[sequences]
    if token_rewards is not None:
        to_go = to_go + discounted_sums(token_rewards, owners=sequences, discount=1.0)
    return standardise(to_go)


@dataclass(frozen=True)
class Gae:
    """`advantages` [M] of the tokens; `returns` [M], what the critic should have said."""

    advantages: Tensor
    returns: Tensor


def gae(
    *,
    rewards: Tensor,
    values: Tensor,
    sequences: Tensor,
    gamma: float,
    policy_lambda: float | Tensor,
    value_lambda: float | Tensor,
    whiten: bool = False,
) -> Gae:
    """Generalised advantage estimation over the trained tokens: A_t = sum_k (gamma lambda)^k delta_{t+k}, with
    delta_t = r_t + gamma V_{t+1} - V_t and V = 0 after a trajectory's last token.

    `rewards` and `values` are per token, [M]; V_t is the critic's value of what token t was sampled from. The returns
    are A + V under `value_lambda`; the advantages are A under `policy_lambda` (each a number or [M]), standardised
    over all tokens if `whiten`. Sources: arXiv 1506.02438; two lambdas: VC-PPO, arXiv 2503.01491.
    """
    follows = has_next(sequences)
    next_values = torch.where(follows, values.roll(-1), 0.0)
    deltas = rewards + gamma * next_values - values
    advantages = discounted_sums(deltas, owners=sequences, discount=gamma * policy_lambda)
    returns = values + discounted_sums(deltas, owners=sequences, discount=gamma * value_lambda)
    return Gae(advantages=standardise(advantages) if whiten else advantages, returns=returns)


def length_adaptive_lambda(*, sequences: Tensor, alpha: float) -> Tensor:
    """1 - 1 / (alpha l) for each token of a trajectory of l trained tokens, at least 0. [M] float64.

    The sum of the GAE weights is then alpha l: the horizon grows with the trajectory. Source: VAPO, arXiv 2504.05118,
    which uses alpha = 0.05 for the policy and a lambda of 1 for the value targets.
    """
    lengths = Grouping.of(sequences).sizes.to(torch.float64)
    return (1.0 - 1.0 / (alpha * lengths)).clamp(min=0.0)


def step_group(
    *,
    rewards: Tensor,
    groups: Tensor,
    sequences: Tensor,
    turns: Tensor,
    turn_states: Tensor,
    gamma_step: float,
    omega: float,
    scale: AdvantageScale,
) -> Tensor:
    """The trajectory's advantage in its group plus omega times the turn's among equal states of the group, [M].

    `turns` [M] int64 is the turn of each token, ascending within a trajectory, and no turn is of two trajectories;
    `turn_states` [T] int64, equal where the policy was given the same. A turn's return is the trajectory's reward times
    gamma_step for each later turn; turns without trained tokens do not count. A state met once in its group adds 0.
    Source: GiGPO, arXiv 2505.10978.
    """
    acted, turn_of_token = torch.unique(turns, return_inverse=True)  # [A] turns with trained tokens, [M]
    owners = torch.zeros_like(acted).scatter_(0, turn_of_token, sequences)
    returns = discounted_sums(at_end(rewards, owners=owners), owners=owners, discount=gamma_step)
    states = Grouping.of(torch.stack([groups[owners], turn_states[acted]], dim=1)).index
    of_trajectory = group(rewards=rewards, groups=groups, scale=scale)
    of_turn = group(rewards=returns, groups=states, scale=scale)
    return of_trajectory[sequences] + omega * of_turn[turn_of_token]


def per_component(
    *, components: Tensor, groups: Tensor, weights: Sequence[float], counted: Tensor | None = None
) -> Tensor:
    """Each reward component normalised in its group (`std`), then weighted, summed and standardised over the step, [S].

    `components` is [S, C], `weights` has C numbers. `counted` bool [S] marks the trajectories whose tokens are trained;
    the others stay out of the step's mean and deviation. Adding a number to a component changes nothing. Source: GDPO,
    arXiv 2601.05242.
    """
    assert len(weights) == components.shape[1], f"{len(weights)} weights for {components.shape[1]} reward components"
    total = components.new_zeros(len(components))
    for component, weight in zip(components.unbind(dim=1), weights, strict=True):
        total = total + weight * group(rewards=component, groups=groups, scale="std")
    return standardise(total, counted=counted)


def teacher(*, teacher_logprobs: Tensor, policy_logprobs: Tensor) -> Tensor:
    """log p of the teacher minus log p of the policy for each token, without gradient, [M].

    The expected advantage is minus the reverse KL divergence from policy to teacher: on-policy distillation, arXiv
    2306.13649 (GKD) and 2306.08543 (MiniLLM).
    """
    return (teacher_logprobs - policy_logprobs).detach()


def standardise(values: Tensor, *, counted: Tensor | None = None) -> Tensor:
    """(x - mean) / (d + 1e-6), d the standard deviation of the population; exactly 0 where all values are equal.

    `counted` is bool, of the shape of `values`: only those enter mean and deviation, and the others become 0.
    """
    if counted is None:
        counted = torch.ones_like(values, dtype=torch.bool)
    kept = values[counted]
    if kept.numel() == 0 or bool(kept.min() == kept.max()):
        return torch.zeros_like(values)
    standard = (values - kept.mean()) / (kept.std(correction=0) + EPSILON)
    return torch.where(counted, standard, 0.0)


def _centred(rewards: Tensor, grouping: Grouping) -> Tensor:
    """R minus the mean of its group, [S]. A mean of equal rewards may differ from them by rounding: they stay at 0."""
    return torch.where(grouping.varies(rewards), rewards - grouping.means(rewards), 0.0)
