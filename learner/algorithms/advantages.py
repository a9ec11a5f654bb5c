"""Advantages from the rewards of a step, with statistics of groups and sums along trajectories. No result depends on
the order of the trajectories.

Shapes. S trajectories: `rewards` [S] float64 and `groups` [S] int64, equal for the trajectories of one task; a group
may have any size and lie anywhere. M trained tokens: `sequences` [M] int64 is the trajectory (0 to S - 1) of each,
those of one trajectory next to each other and in order. What the environment said is not among the tokens. Results have
the dtype of the rewards and no gradient.

Of M entries those of one trajectory lie next to each other, in order; `owners` [M] int64 says whose an entry is.
Entries are trained tokens, or turns; what the environment said is not among them, so the entry after a completion's
last token is the first token of the next completion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from learner.algorithms.knobs import AdvantageScale

EPSILON = 1e-6


@dataclass(frozen=True)
class Grouping:
    """Groups of values that belong together. `index` [S] int64 numbers the groups from 0; `sizes` [S] int64, the size
    of the group that each value is in. Every method takes values [S] and returns [S], one entry for each value.
    """

    index: Tensor
    sizes: Tensor

    @classmethod
    def of(cls, labels: Tensor) -> Grouping:
        """Values with equal labels are one group. `labels` [S] int64, or [S, k] where all k numbers must be equal."""
        _, index, counts = torch.unique(
            labels, dim=0 if labels.dim() > 1 else None, return_inverse=True, return_counts=True
        )
        return cls(index=index, sizes=counts[index])

    def sums(self, values: Tensor) -> Tensor:
        """The sum over the group, to the last bit the same for every order of the values."""
        order = torch.argsort(values)
        totals = values.new_zeros(len(values)).index_add_(0, self.index[order], values[order])
        return totals[self.index]

    def means(self, values: Tensor) -> Tensor:
        """The mean over the group."""
        return self.sums(values) / self.sizes

    def deviations(self, values: Tensor) -> Tensor:
        """The unbiased standard deviation of the group, 0 for a group of one."""
        squares = self.sums((values - self.means(values)).square())
        return (squares / (self.sizes - 1).clamp(min=1)).sqrt()

    def minima(self, values: Tensor) -> Tensor:
        """The smallest value of the group."""
        return self._extreme(values, "amin")

    def maxima(self, values: Tensor) -> Tensor:
        """The largest value of the group."""
        return self._extreme(values, "amax")

    def varies(self, values: Tensor) -> Tensor:
        """Bool [S]: whether two values of the group differ. Exact: no mean is involved, so nothing is rounded."""
        return self.minima(values) != self.maxima(values)

    def _extreme(self, values: Tensor, reduce: str) -> Tensor:
        start = values.new_zeros(len(values))
        return start.scatter_reduce(0, self.index, values, reduce=reduce, include_self=False)[self.index]


def has_next(owners: Tensor) -> Tensor:
    """Bool [M]: whether the next entry is of the same trajectory."""
    follows = torch.zeros_like(owners, dtype=torch.bool)
    follows[:-1] = owners[1:] == owners[:-1]
    return follows


def at_end(values: Tensor, *, owners: Tensor) -> Tensor:
    """[M]: the value of its trajectory at a trajectory's last entry, 0 elsewhere. `values` is [S], indexed by owner."""
    return torch.where(has_next(owners), 0.0, values[owners])


def discounted_sums(values: Tensor, *, owners: Tensor, discount: float | Tensor) -> Tensor:
    """x_t = values_t + discount_t x_{t+1} along each trajectory, [M]; `discount` is a number or [M].

    By doubling: after round k every x_t sums 2^k entries, so that a trajectory of L entries takes log2(L) rounds over
    all entries at once, instead of L steps.
    """
    sums = values.clone()
    reach_weights = has_next(owners).to(values.dtype) * discount
    reach = 1
    while reach < len(sums) and bool(reach_weights.any()):
        ahead = torch.zeros_like(sums)
        ahead[:-reach] = sums[reach:]
        sums = sums + reach_weights * ahead
        weights_ahead = torch.zeros_like(reach_weights)
        weights_ahead[:-reach] = reach_weights[reach:]
        reach_weights = reach_weights * weights_ahead
        reach *= 2
    return sums


def group(*, rewards: Tensor, groups: Tensor, scale: AdvantageScale) -> Tensor:
    """(R - mean) / (d + 1e-6) within each group, d the unbiased standard deviation, the mean, or (`none`) nothing. [S].

    With `scale = "batch"` d is the standard deviation over the rewards of all groups, so that a group of nearly equal
    rewards is not blown up; where all rewards of the step are equal there is no group with spread either.
    A group without spread, or of one, has advantages of exactly 0. With `scale = "mean"` so has a group whose mean is
    not above 1e-6: dividing by it would turn signs around or blow a rounding error up. Adding a number to all rewards
    of a group changes nothing under `std` and `none`. Sources: arXiv 2402.03300 (std), 2503.20783 (none), 2508.08221
    (batch), 2602.02710 (mean, which supposes rewards that are not negative).
    """
    return _centred(rewards, Grouping.of(groups)) / divisors(rewards=rewards, groups=groups, scale=scale)


def divisors(*, rewards: Tensor, groups: Tensor, scale: AdvantageScale) -> Tensor:
    """Divisors of the centred rewards of each trajectory's group, see `group`; infinite where that leaves 0. [S]."""
    grouping = Grouping.of(groups)
    if scale == "none":
        return torch.ones_like(rewards)
    if scale == "std":
        return grouping.deviations(rewards) + EPSILON
    if scale == "batch":
        return Grouping.of(torch.zeros_like(groups)).deviations(rewards) + EPSILON
    means = grouping.means(rewards)
    return torch.where(means > EPSILON, means.clamp(min=0.0) + EPSILON, torch.inf)


def leave_one_out(*, rewards: Tensor, groups: Tensor) -> Tensor:
    """R minus the mean reward of the others of its group, [S]; 0 for a group of one, which has no others.

    Adding a number to all rewards of a group changes nothing. Source: RLOO, arXiv 2402.14740.
    """
    grouping = Grouping.of(groups)
    # R - (sum - R) / (n - 1) = n / (n - 1) x (R - mean), and centring keeps equal rewards at exactly 0.
    return _centred(rewards, grouping) * grouping.sizes / (grouping.sizes - 1).clamp(min=1)


def length_weighted(*, rewards: Tensor, groups: Tensor, lengths: Tensor) -> Tensor:
    """R minus the mean of its group in which each reward weighs as much as its trajectory has tokens, [S].

    `lengths` [S] are the trained tokens of each trajectory. The variance of the gradient is least with a baseline that
    weighs rewards by the squared norm of the gradient of log p, which is taken to grow with the length. The advantages
    of a group sum to 0 over its tokens, not over its trajectories. A group without spread, of one, or without tokens
    has 0; adding a number to all rewards of a group changes nothing. Source: OPO, arXiv 2505.23585.
    """
    grouping = Grouping.of(groups)
    weights = lengths.to(rewards.dtype)
    weighed = grouping.sums(weights)
    baselines = grouping.sums(weights * rewards) / weighed.clamp(min=1.0)
    return torch.where(grouping.varies(rewards) & (weighed > 0), rewards - baselines, 0.0)


def least_variance(
    *, rewards: Tensor, groups: Tensor, log_ratios: Tensor, norms: Tensor, scale: Literal["std", "none"]
) -> Tensor:
    """R - b, over the group's standard deviation or (`none`) nothing, b = sum W^2 g R / sum W^2 g over the group, [S].

    `log_ratios` [S] are log W, of whole trajectories to the policy that sampled them, and `norms` [S] are g, the
    squared norms of the gradients of their logprobs. With b the gradient of the group, each trajectory weighted by W,
    varies least. Adding a number to all rewards changes nothing. A group without spread, of one, or of which nothing
    has a norm, has 0; near it is a trajectory that outweighs all others of its group. Source: the off-policy
    optimal baseline of arXiv 2602.17616.
    """
    grouping = Grouping.of(groups)
    logs = 2.0 * log_ratios + torch.log(norms)
    largest = grouping.maxima(logs)
    weights = torch.where(torch.isfinite(largest), torch.exp(logs - largest), 0.0)
    weighed = grouping.sums(weights)
    baselines = grouping.sums(weights * rewards) / torch.where(weighed > 0, weighed, 1.0)
    made = torch.where(grouping.varies(rewards) & (weighed > 0), rewards - baselines, 0.0)
    return made if scale == "none" else made / (grouping.deviations(rewards) + EPSILON)


def group_variance(*, rewards: Tensor, groups: Tensor, log_ratios: Tensor, beta: float) -> Tensor:
    """(R - mean) - beta (L - mean) within each group, [S]; summing to 0 over it, and 0 for a group of one.

    `log_ratios` [S] are L, log p of a trajectory less its log p under the policy that is held on to: beta L is the
    reward that the policy implies, up to a number of the group. With sums of log p, weighted by this, the gradient is
    that of the squares of this over 2 beta: the one best policy is that of the reward less beta times the KL
    divergence, whatever policy sampled. Source: GVPO, arXiv 2504.19599.
    """
    grouping = Grouping.of(groups)
    return _centred(rewards, grouping) - beta * _centred(log_ratios, grouping)


def pass_at_k(*, right: Tensor, groups: Tensor, k: int) -> Tensor:
    """The advantage of each answer where not it but a set of k of its group is rewarded, 1 if one of the k is right.

    `right` [S] bool. With n answers of which w are wrong, the mean over all sets of k is m = 1 - C(w, k) / C(n, k) and
    their deviation s = sqrt(m (1 - m)). A right answer makes all its sets right: (1 - m) / s. A wrong one is in sets of
    wrong ones alone with the share f = C(w - 1, k - 1) / C(n - 1, k - 1): (1 - m - f) / s. [S] float64, summing to 0
    over a group; 0 where w < k, as every set is right, and where none is. k = 1 is `group` with the deviation of the
    population. In a group smaller than k the set is all of it. Source: Pass@k training, arXiv 2508.10751, eq. 11 to 15.
    """
    grouping = Grouping.of(groups)
    wrong = grouping.sums((~right).double())
    sizes = grouping.sizes.double()
    others_fail = torch.ones_like(sizes)
    for drawn in range(1, k):
        share = (wrong - drawn).clamp(min=0.0) / (sizes - drawn).clamp(min=1.0)
        others_fail = torch.where(sizes > drawn, others_fail * share, others_fail)
    all_fail = others_fail * wrong / sizes
    deviations = (all_fail * (1.0 - all_fail)).sqrt()
    gains = all_fail - torch.where(right, 0.0, others_fail)
    return torch.where(deviations > 0, gains / deviations.clamp(min=EPSILON), 0.0)


def batch(
    *,
    rewards: Tensor,
    groups: Tensor,
    sequences: Tensor,
    subtract_group_mean: bool,
    token_rewards: Tensor | None = None,
    counted: Tensor | None = None,
) -> Tensor:
    """Rewards-to-go, standardised over the trained tokens of the step, [M].

    `counted` bool [M] are those that take part in the loss: the others stay out of mean and deviation, and have 0.

    A token's reward-to-go is its trajectory's reward, less the mean of the group if `subtract_group_mean`, plus the
    `token_rewards` [M] (a KL penalty, say) from that token to the trajectory's end, undiscounted. Adding a number to
    all rewards changes nothing. Source: REINFORCE++ and its baseline variant, arXiv 2501.03262.
    """
    outcomes = _centred(rewards, Grouping.of(groups)) if subtract_group_mean else rewards
    to_go = outcomes[sequences]
    if token_rewards is not None:
        to_go = to_go + discounted_sums(token_rewards, owners=sequences, discount=1.0)
    return standardise(to_go, counted=counted)


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
    counted: Tensor | None = None,
) -> Gae:
    """Generalised advantage estimation over the trained tokens: A_t = sum_k (gamma lambda)^k delta_{t+k}, with
    delta_t = r_t + gamma V_{t+1} - V_t and V = 0 after a trajectory's last token.

    `rewards` and `values` are per token, [M]; V_t is the critic's value of what token t was sampled from. The returns
    are A + V under `value_lambda`; the advantages are A under `policy_lambda` (each a number or [M]), standardised
    over the `counted` tokens (bool [M], those that take part in the loss) if `whiten`. Sources: arXiv 1506.02438; two
    lambdas: VC-PPO, arXiv 2503.01491.
    """
    follows = has_next(sequences)
    next_values = torch.where(follows, values.roll(-1), 0.0)
    deltas = rewards + gamma * next_values - values
    advantages = discounted_sums(deltas, owners=sequences, discount=gamma * policy_lambda)
    returns = values + discounted_sums(deltas, owners=sequences, discount=gamma * value_lambda)
    return Gae(advantages=standardise(advantages, counted=counted) if whiten else advantages, returns=returns)


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
    turn_rewards: Tensor | None = None,
) -> Tensor:
    """The trajectory's advantage in its group plus omega times the turn's among equal states of the group, [M].

    `turns` [M] int64 is the turn of each token, ascending within a trajectory, and no turn is of two trajectories;
    `turn_states` [T] int64, equal where the policy was given the same. A turn's return is the sum of its own reward and
    of later ones, each times gamma_step for each turn between; turns without trained tokens do not count.
    `turn_rewards` [T] are those of turns; what they leave of the trajectory's reward, all of it without them, is of the
    last turn. A state met once in its group adds 0. Source: GiGPO, arXiv 2505.10978.
    """
    found = acted_turns(
        rewards=rewards, sequences=sequences, turns=turns, turn_rewards=turn_rewards, gamma_step=gamma_step
    )
    states = Grouping.of(torch.stack([groups[found.owners], turn_states[found.turns]], dim=1)).index
    of_trajectory = group(rewards=rewards, groups=groups, scale=scale)
    of_turn = group(rewards=found.returns, groups=states, scale=scale)
    return of_trajectory[sequences] + omega * of_turn[found.of_token]


@dataclass(frozen=True)
class ActedTurns:
    """The A turns that have trained tokens: `turns` [A] are their numbers, `owners` [A] their trajectories, `returns`
    [A] the rewards from each on, discounted; `of_token` [M] is the place among them of each token's turn.
    """

    turns: Tensor
    owners: Tensor
    returns: Tensor
    of_token: Tensor


def acted_turns(
    *, rewards: Tensor, sequences: Tensor, turns: Tensor, turn_rewards: Tensor | None, gamma_step: float
) -> ActedTurns:
    """The turns of a step as `step_group` sees them, with its arguments."""
    acted, of_token = torch.unique(turns, return_inverse=True)
    owners = torch.zeros_like(acted).scatter_(0, of_token, sequences)
    earned = rewards.new_zeros(len(acted)) if turn_rewards is None else turn_rewards[acted]
    left = rewards - torch.zeros_like(rewards).index_add(0, owners, earned)
    returns = discounted_sums(earned + at_end(left, owners=owners), owners=owners, discount=gamma_step)
    return ActedTurns(turns=acted, owners=owners, returns=returns, of_token=of_token)


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
