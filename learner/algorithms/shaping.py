"""Changes to rewards before an advantage sees them: bounds, normalisation, penalties, KL, truncated trajectories.

Shapes as in `advantages`: S trajectories, `rewards` and `lengths` [S] (lengths int64, in trained tokens); M trained
tokens, `sequences` [M] int64 the trajectory (0 to S - 1) of each, those of one trajectory next to each other. A penalty
is at most 0 and is added to the rewards, times a coefficient of the caller's. Nothing here carries a gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from learner.algorithms import ratios
from learner.algorithms.advantages import Grouping, at_end, discounted_sums
from learner.algorithms.knobs import KlForm, TruncationRule

EPSILON = 1e-6
# One step's relative error moves the coefficient by no more than if the divergence were a fifth off its target.
ADAPTATION_BOUND = 0.2


def clip(*, rewards: Tensor, low: float | None = None, high: float | None = None) -> Tensor:
    """Rewards bounded to [low, high]; a bound that is absent does not bind. At least one is needed."""
    return rewards.clamp(min=low, max=high)


def scale(*, rewards: Tensor, factor: float) -> Tensor:
    """Rewards times `factor`."""
    return rewards * factor


def turn_discounted(
    *, rewards: Tensor, sequences: Tensor, turns: Tensor, turn_rewards: Tensor, discount: float
) -> Tensor:
    """Each trajectory's return from its first turn on: the sum of its turns' rewards, each times `discount` for every
    turn before it. [S]; a trajectory without trained tokens keeps its reward.

    `turns` [M] int64 is the turn of each token, ascending within a trajectory; `turn_rewards` [T] are those of all
    turns of the step, 0 where a turn has none. What they leave of the trajectory's reward comes with its last turn.
    """
    acted, turn_of_token = torch.unique(turns, return_inverse=True)
    owners = torch.zeros_like(acted).scatter_(0, turn_of_token, sequences)
    earned = turn_rewards[acted]
    left = rewards - torch.zeros_like(rewards).index_add(0, owners, earned)
    returns = discounted_sums(earned + at_end(left, owners=owners), owners=owners, discount=discount)
    first = torch.ones_like(owners, dtype=torch.bool)
    first[1:] = owners[1:] != owners[:-1]
    discounted = rewards.clone()
    discounted[owners[first]] = returns[first]
    return discounted


@dataclass(frozen=True)
class RunningMoments:
    """Of all rewards so far: how many, their mean, and the sum of their squared distances from it.

    Three plain numbers, so that a checkpoint can hold them and `RunningMoments(**numbers)` goes on where they were.
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    @property
    def deviation(self) -> float:
        """The standard deviation of the population, 0 before the first reward."""
        return math.sqrt(self.squares / self.count) if self.count else 0.0

    def including(self, rewards: Tensor) -> RunningMoments:
        """The moments with `rewards` counted too (Chan, Golub and LeVeque 1979, doi 10.1007/978-3-642-51461-6_3)."""
        added = rewards.numel()
        if not added:
            return self
        mean = float(rewards.mean())
        count, gap = self.count + added, mean - self.mean
        return RunningMoments(
            count=count,
            mean=self.mean + gap * added / count,
            squares=self.squares + float((rewards - mean).square().sum()) + gap * gap * self.count * added / count,
        )


def running_normalisation(*, rewards: Tensor, moments: RunningMoments, centre: bool) -> tuple[Tensor, RunningMoments]:
    """(R - mean) / (d + 1e-6), or R / (d + 1e-6) without `centre`, and the moments to start the next step from.

    Mean and standard deviation d are over all rewards so far, these included. While d is at most 1e-6, rewards differ
    by rounding if at all, and there is no scale to divide by: the divisor is then 1.
    """
    known = moments.including(rewards)
    divisor = known.deviation + EPSILON if known.deviation > EPSILON else 1.0
    return (rewards - known.mean if centre else rewards) / divisor, known


def overlong_penalty(*, lengths: Tensor, max_length: int, buffer: int) -> Tensor:
    """0 up to max_length - buffer tokens, then linear to -1 at max_length, never below -1. [S] float64.

    `buffer` is at least 1. Source: DAPO, arXiv 2503.14476.
    """
    over = lengths.to(torch.float64) - (max_length - buffer)
    return -(over / buffer).clamp(0.0, 1.0)


def length_penalty(*, lengths: Tensor, max_length: int) -> Tensor:
    """-length / max_length, never below -1. [S] float64."""
    return -(lengths.to(torch.float64) / max_length).clamp(max=1.0)


def relative_length(*, lengths: Tensor, groups: Tensor, correct: Tensor) -> Tensor:
    """0.5 for the shortest of a group down to -0.5 for the longest, never above 0 where not `correct` (bool [S]).

    [S] float64; 0 in a group of equal lengths. Not a penalty: it can be positive. Source: Kimi k1.5, arXiv 2501.12599.
    """
    exact = lengths.to(torch.float64)
    grouping = Grouping.of(groups)
    shortest, longest = grouping.minima(exact), grouping.maxima(exact)
    rank = torch.where(longest > shortest, 0.5 - (exact - shortest) / (longest - shortest).clamp(min=1.0), 0.0)
    return torch.where(correct, rank, rank.clamp(max=0.0))


def repetition_penalty(*, token_ids: Tensor, sequences: Tensor, turns: Tensor, trajectories: int, ngram: int) -> Tensor:
    """Minus the share of a trajectory's n-grams that it had before, [S] float64; S is `trajectories`.

    `token_ids` and `turns` are [M] int64 of the trained tokens; `ngram` tokens in a row make an n-gram, all of one turn
    (no turn is of two trajectories). With U different ones among n: U / n - 1. 0 for a trajectory that has none.
    Source of penalties on n-grams: arXiv 2502.03373.
    """
    first = torch.arange(max(len(token_ids) - ngram + 1, 0))
    first = first[turns[first] == turns[first + ngram - 1]]
    owners = sequences[first]
    codes = kinds = owners
    radix = int(token_ids.max()) + 1 if len(token_ids) else 1
    # Codes start as the trajectory and are numbered afresh after each token: they stay small and never overflow.
    for offset in range(ngram):
        kinds, codes = torch.unique(codes * radix + token_ids[first + offset], return_inverse=True)
    owners_of_kinds = torch.zeros_like(kinds).scatter_(0, codes, owners)
    total = torch.bincount(owners, minlength=trajectories)
    different = torch.bincount(owners_of_kinds, minlength=trajectories)
    return torch.where(total > 0, different / total.clamp(min=1).to(torch.float64) - 1.0, 0.0)


def kl_rewards(*, policy_logprobs: Tensor, reference_logprobs: Tensor, beta: float, form: KlForm) -> Tensor:
    """-beta times the estimate of KL(policy || reference) at each token, [M], without gradient.

    Source: arXiv 1909.08593 (k1).
    """
    estimate = ratios.penalty(form=form, policy_logprobs=policy_logprobs, reference_logprobs=reference_logprobs)
    return -beta * estimate.detach()


def adapted_beta(*, beta: float, measured_kl: float, target: float, horizon: int, trajectories: int) -> float:
    """The coefficient for the next step: beta (1 + e min(1, n / horizon)), e = measured / target - 1 bounded by 0.2.

    n is the number of `trajectories` of this step and `horizon` counts trajectories too; `measured_kl` and `target` are
    in nats, both per trajectory or both per token. The one number to save is beta. Source: arXiv 1909.08593.
    """
    error = max(-ADAPTATION_BOUND, min(measured_kl / target - 1.0, ADAPTATION_BOUND))
    return beta * (1.0 + error * min(1.0, trajectories / horizon))


@dataclass(frozen=True)
class EntropyWeight:
    """The weight of the entropy in this step's loss, and the one that the next step begins with."""

    now: float
    following: float


def entropy_weight(*, weight: float, measured: float, target: float, step: float, limit: float) -> EntropyWeight:
    """`weight` now if the entropy `measured` is at most `target`, else 0; next `step` more if below, less if above.

    The next weight is from 0 to `limit`. `measured` and `target` are in nats per token. The one number to save is the
    next weight. Source: adaptive entropy control of Skywork-OR1, arXiv 2505.22312.
    """
    now = weight if measured <= target else 0.0
    change = step if measured < target else -step if measured > target else 0.0
    return EntropyWeight(now=now, following=min(max(weight + change, 0.0), limit))


def to_trajectories(*, token_rewards: Tensor, sequences: Tensor, trajectories: int) -> Tensor:
    """The sum of each trajectory's token rewards, [S]; S is `trajectories`."""
    return token_rewards.new_zeros(trajectories).index_add_(0, sequences, token_rewards)


def to_tokens(*, rewards: Tensor, sequences: Tensor) -> Tensor:
    """Each trajectory's reward at its last trained token, 0 at the others, [M]."""
    return at_end(rewards, owners=sequences)


@dataclass(frozen=True)
class TruncationOutcome:
    """`rewards` [S], and `trained` bool [S]: whose tokens enter the loss."""

    rewards: Tensor
    trained: Tensor


def truncation(*, rewards: Tensor, truncated: Tensor, rule: TruncationRule, penalty: float) -> TruncationOutcome:
    """The fate of trajectories that the length limit cut off; `truncated` is bool [S].

    `keep`: nothing; `mask`: they are not trained, but their rewards stay in the baselines of their groups (arXiv
    2503.14476); `penalise`: `penalty` is taken off their rewards.
    """
    everyone = torch.ones_like(truncated)
    if rule == "mask":
        return TruncationOutcome(rewards=rewards, trained=~truncated)
    if rule == "penalise":
        return TruncationOutcome(rewards=torch.where(truncated, rewards - penalty, rewards), trained=everyone)
    return TruncationOutcome(rewards=rewards, trained=everyone)
