"""Weights and filters for the gap between the proximal and the behavior policy (lag and engine numerics).

w = exp(proximal - behavior) of a token, never its inverse. Tensors are [N]: the tokens of one microbatch, or of a whole
step; `sequences` [N] int64 numbers the `count` trajectories, each of which must be whole. Nothing here passes a
gradient, and everything is finite for every logprob, -inf included.

A filtered token leaves the numerator and the denominator. The numerator is the caller's sum of weight x loss, where a
filtered token has weight 0. The denominator is a count over all microbatches and ranks, so it cannot come from inside a
loss: take `kept_tokens` of the whole step before its first update, count those, and compute the aggregation's weights
from these counts. Each microbatch then only multiplies. The same holds for the scale of `self_normalising_scale`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from learner.algorithms.ratios import bounded, finite, log_gap, ratio, sequence_means, sequence_sums

Weight = Literal["truncate", "sequence", "geometric", "none"]


@dataclass(frozen=True)
class Window:
    """The ratios that pass, `low` and `high` included. Dimensionless, 0 <= low <= high."""

    low: float
    high: float

    def holds(self, ratios: Tensor) -> Tensor:
        """Which of `ratios` pass; bool of the same shape."""
        return (ratios >= self.low) & (ratios <= self.high)


@dataclass(frozen=True)
class Rules:
    """Which corrections apply, together.

    `weight`: `truncate`, `sequence` and `geometric` as the functions of these names, within `floor` and `cap`; `none`
    is 1 or, under a `token_window`, w itself, which is IcePop. The windows filter as `mask_token` and `mask_sequence`
    do, `token_veto` as `veto`, `divergence_limit` as `mask_divergence`.
    """

    weight: Weight = "truncate"
    cap: float = 2.0
    floor: float = 0.0
    token_window: Window | None = None
    sequence_window: Window | None = None
    token_veto: float | None = None
    divergence_limit: float | None = None


@dataclass(frozen=True)
class Corrected:
    """`weights` [N], 0 where a token is filtered; `kept` [N] bool, which are not; `bounded` [N] bool, of which cap or
    floor took effect.
    """

    weights: Tensor
    kept: Tensor
    bounded: Tensor


@dataclass(frozen=True)
class Gap:
    """The tokens whose two policies are compared. `proximal_logprobs` and `behavior_logprobs` are [N]."""

    proximal_logprobs: Tensor
    behavior_logprobs: Tensor
    sequences: Tensor
    count: int

    @property
    def ratios(self) -> Tensor:
        """w of each token, [N]."""
        return importance_ratio(proximal_logprobs=self.proximal_logprobs, behavior_logprobs=self.behavior_logprobs)

    @property
    def logs(self) -> Tensor:
        """log w of each token, [N]."""
        return log_gap(numerator=self.proximal_logprobs, denominator=self.behavior_logprobs).detach()

    @property
    def log_means(self) -> Tensor:
        """The mean of log w over each trajectory, [count]."""
        return sequence_means(values=self.logs, sequences=self.sequences, count=self.count)


def importance_ratio(*, proximal_logprobs: Tensor, behavior_logprobs: Tensor) -> Tensor:
    """exp(proximal - behavior), without gradient, the exponent bounded by 20 either way."""
    return ratio(numerator=proximal_logprobs, denominator=behavior_logprobs).detach()


def truncate(gap: Gap) -> Tensor:
    """w of each token; within a cap, truncated importance sampling (Ionides 2008, doi 10.1198/106186008X320456).

    With a floor as well, the truncation is two-sided: no token is left without a gradient.
    """
    return gap.ratios


def sequence(gap: Gap) -> Tensor:
    """The product of w over the trajectory, the same for each of its tokens.

    The unbiased correction of a whole trajectory but for its bounds; its variance grows with the length.
    """
    sums = sequence_sums(values=gap.logs, sequences=gap.sequences, count=gap.count)
    return torch.exp(bounded(sums))[gap.sequences]


def geometric(gap: Gap) -> Tensor:
    """The geometric mean of w over the trajectory, the same for each of its tokens.

    Biased, but of a variance that falls with the length; GSPO's ratio (arXiv 2507.18071) taken to the behavior policy.
    """
    return torch.exp(bounded(gap.log_means))[gap.sequences]


def mask_token(gap: Gap, window: Window) -> Tensor:
    """Which tokens have w within `window`. Source: IcePop (arXiv 2510.18855), 0.5 to 5."""
    return window.holds(gap.ratios)


def mask_sequence(gap: Gap, window: Window) -> Tensor:
    """Which tokens are of a trajectory whose geometric mean of w is within `window`.

    The mean is over all its trained tokens, whatever another filter does to them; being per token, it means the same
    for a long trajectory as for a short one.
    """
    return window.holds(torch.exp(bounded(gap.log_means)))[gap.sequences]


def veto(gap: Gap, least: float) -> Tensor:
    """Which tokens are of a trajectory none of whose tokens has w below `least`: one that the learner's policy would
    hardly ever have sampled says that the rest was sampled from somewhere else. 1e-4 is usual.
    """
    extreme = (gap.ratios < least).to(gap.logs.dtype)
    return (sequence_sums(values=extreme, sequences=gap.sequences, count=gap.count) == 0)[gap.sequences]


def mask_divergence(gap: Gap, *, advantages: Tensor, limit: float) -> Tensor:
    """Which tokens are not of a negative advantage in a trajectory whose mean of behavior - proximal is above `limit`.

    That mean estimates KL(behavior || proximal), in nats per token. What is good is learned however it came about; what
    is bad is pushed down only where the policy still does it. Source: the off-policy mask of DeepSeek-V3.2 (arXiv
    2512.02556).
    """
    far = (-gap.log_means > limit)[gap.sequences]
    return ~(far & (advantages < 0))


def kept_tokens(gap: Gap, rules: Rules) -> Tensor:
    """Which tokens pass those filters of `rules` that look at no advantage, bool [N].

    For the whole step, from logprobs before its first update.
    """
    kept = torch.ones_like(gap.sequences, dtype=torch.bool)
    if rules.token_window is not None:
        kept &= mask_token(gap, rules.token_window)
    if rules.sequence_window is not None:
        kept &= mask_sequence(gap, rules.sequence_window)
    if rules.token_veto is not None:
        kept &= veto(gap, rules.token_veto)
    return kept


def kept_for(gap: Gap, rules: Rules, *, advantages: Tensor) -> Tensor:
    """Which tokens pass all filters of `rules`, bool [N]."""
    kept = kept_tokens(gap, rules)
    if rules.divergence_limit is not None:
        kept &= mask_divergence(gap, advantages=advantages, limit=rules.divergence_limit)
    return kept


def correct(gap: Gap, rules: Rules, *, advantages: Tensor) -> Corrected:
    """All corrections of `rules` at once: the weight that `rules.weight` names, 0 for filtered tokens."""
    kept = kept_for(gap, rules, advantages=advantages)
    plain = _plain_weights(gap, rules)
    weights = plain if rules.weight == "none" else plain.clamp(rules.floor, rules.cap)
    return Corrected(weights=torch.where(kept, weights, 0.0), kept=kept, bounded=kept & (weights != plain))


def self_normalising_scale(corrected: Corrected) -> float:
    """One over the mean weight of the kept tokens, which are those of the whole step: sum(w x) / sum(w) in place of
    sum(w x) / n. 1 where nothing is kept.

    Biased by O(1/n) and of less variance. Source: Hesterberg 1995, doi 10.1080/00401706.1995.10484303.
    """
    total = float(corrected.weights.sum())
    return float(corrected.kept.sum()) / total if total > 0 else 1.0


def interpolated_proximal(*, behavior_logprobs: Tensor, policy_logprobs: Tensor, lags: Tensor) -> Tensor:
    """alpha behavior + (1 - alpha) sg(policy), alpha = 1/(lag + 1): a proximal policy without a forward pass.

    `lags` [N] counts policy versions from the one that sampled the token to the proximal one; the policy is one further
    on, and its logprob is taken to move evenly. A fresh token's proximal is its behavior; the staler a token is, the
    nearer its proximal is to the policy. Source: A-3PO (arXiv 2512.06547).
    """
    alpha = 1.0 / (lags.to(policy_logprobs.dtype) + 1.0)
    return alpha * finite(behavior_logprobs.detach()) + (1.0 - alpha) * finite(policy_logprobs.detach())


def _plain_weights(gap: Gap, rules: Rules) -> Tensor:
    if rules.weight == "none":
        return torch.ones_like(gap.logs) if rules.token_window is None else gap.ratios
    return {"truncate": truncate, "sequence": sequence, "geometric": geometric}[rules.weight](gap)
