"""Weights and filters for the gap between the proximal and the behavior policy (lag and engine numerics).

w = exp(proximal - behavior) of a token, never its inverse. Tensors are [N]: the tokens of one microbatch, or of a whole
step. Nothing here passes a gradient, and everything is finite for every logprob, -inf included.

A filtered token leaves the numerator and the denominator. The numerator is the caller's sum of weight x loss, where a
filtered token has weight 0. The denominator is a count over all microbatches and ranks, so it cannot come from inside a
loss: take `kept_tokens` of the whole step before its first update, count with `counted_lengths`, and compute the
aggregation's weights from these counts. Each microbatch then only multiplies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from learner.algorithms.per_sequence import sequence_lengths, sequence_means, sequence_sums
from learner.algorithms.ratios import bounded, finite, log_gap, ratio

Weight = Literal["truncate", "sequence", "none"]


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

    `weight`: `truncate` and `sequence` as the functions of these names, with `cap`; `none` is 1 or, under a
    `token_window`, w itself, which is IcePop. The windows filter as `mask_token` and `mask_sequence` do.
    """

    weight: Weight = "truncate"
    cap: float = 2.0
    token_window: Window | None = None
    sequence_window: Window | None = None


@dataclass(frozen=True)
class Corrected:
    """`weights` [N], 0 where a token is filtered; `kept` [N] bool, which are not."""

    weights: Tensor
    kept: Tensor


def importance_ratio(*, proximal_logprobs: Tensor, behavior_logprobs: Tensor) -> Tensor:
    """exp(proximal - behavior), without gradient, the exponent bounded by 20 either way."""
    return ratio(numerator=proximal_logprobs, denominator=behavior_logprobs).detach()


def truncate(*, proximal_logprobs: Tensor, behavior_logprobs: Tensor, cap: float) -> Tensor:
    """min(w, cap) per token.

    Truncated importance sampling: Ionides 2008, "Truncated Importance Sampling", doi 10.1198/106186008X320456.
    """
    plain = importance_ratio(proximal_logprobs=proximal_logprobs, behavior_logprobs=behavior_logprobs)
    return plain.clamp(max=cap)


def sequence(
    *, proximal_logprobs: Tensor, behavior_logprobs: Tensor, sequences: Tensor, count: int, cap: float
) -> Tensor:
    """min(product of w over the trajectory, cap), the same for each of its tokens.

    `sequences` [N] int64 numbers the `count` trajectories, each whole. The unbiased correction of a whole trajectory
    but for the cap; its variance grows with the length.
    """
    gaps = log_gap(numerator=proximal_logprobs, denominator=behavior_logprobs).detach()
    products = torch.exp(bounded(sequence_sums(values=gaps, sequences=sequences, count=count)))
    return products.clamp(max=cap)[sequences]


def mask_token(*, proximal_logprobs: Tensor, behavior_logprobs: Tensor, window: Window) -> Corrected:
    """w where it is within `window`; a token outside is filtered. Source: IcePop (arXiv 2510.18855), 0.5 to 5."""
    plain = importance_ratio(proximal_logprobs=proximal_logprobs, behavior_logprobs=behavior_logprobs)
    kept = window.holds(plain)
    return Corrected(weights=torch.where(kept, plain, 0.0), kept=kept)


def mask_sequence(
    *, proximal_logprobs: Tensor, behavior_logprobs: Tensor, sequences: Tensor, count: int, window: Window
) -> Corrected:
    """1, but a trajectory whose geometric mean of w is outside `window` is filtered whole.

    `sequences` [N] int64 numbers the `count` trajectories, each whole. The mean is over all its trained tokens,
    whatever another filter does to them; being per token, it means the same for a long trajectory as for a short one.
    """
    gaps = log_gap(numerator=proximal_logprobs, denominator=behavior_logprobs).detach()
    means = torch.exp(bounded(sequence_means(values=gaps, sequences=sequences, count=count)))
    kept = window.holds(means)[sequences]
    return Corrected(weights=kept.to(gaps.dtype), kept=kept)


def kept_tokens(
    *, rules: Rules, proximal_logprobs: Tensor, behavior_logprobs: Tensor, sequences: Tensor, count: int
) -> Tensor:
    """Which tokens pass all filters of `rules`, bool [M]. For the whole step, from logprobs before its first update."""
    kept = torch.ones_like(proximal_logprobs, dtype=torch.bool)
    if rules.token_window is not None:
        kept &= mask_token(
            proximal_logprobs=proximal_logprobs, behavior_logprobs=behavior_logprobs, window=rules.token_window
        ).kept
    if rules.sequence_window is not None:
        kept &= mask_sequence(
            proximal_logprobs=proximal_logprobs,
            behavior_logprobs=behavior_logprobs,
            sequences=sequences,
            count=count,
            window=rules.sequence_window,
        ).kept
    return kept


def correct(
    *, rules: Rules, proximal_logprobs: Tensor, behavior_logprobs: Tensor, sequences: Tensor, count: int
) -> Corrected:
    """All corrections of `rules` at once: the weight that `rules.weight` names, 0 for filtered tokens."""
    kept = kept_tokens(
        rules=rules,
        proximal_logprobs=proximal_logprobs,
        behavior_logprobs=behavior_logprobs,
        sequences=sequences,
        count=count,
    )
    if rules.weight == "sequence":
        weights = sequence(
            proximal_logprobs=proximal_logprobs,
            behavior_logprobs=behavior_logprobs,
            sequences=sequences,
            count=count,
            cap=rules.cap,
        )
    elif rules.weight == "truncate":
        weights = truncate(proximal_logprobs=proximal_logprobs, behavior_logprobs=behavior_logprobs, cap=rules.cap)
    elif rules.token_window is not None:
        weights = importance_ratio(proximal_logprobs=proximal_logprobs, behavior_logprobs=behavior_logprobs)
    else:
        weights = torch.ones_like(proximal_logprobs)
    return Corrected(weights=torch.where(kept, weights, 0.0), kept=kept)


def counted_lengths(*, kept: Tensor, sequences: Tensor, count: int, keep_original_count: bool = False) -> Tensor:
    """Trained tokens that each trajectory counts for in the denominators, [count] int64.

    `kept` and `sequences` are [M], of the whole step. Filtered tokens do not count, unless `keep_original_count`.
    """
    if keep_original_count:
        return sequence_lengths(sequences=sequences, count=count)
    return sequence_sums(values=kept.to(torch.int64), sequences=sequences, count=count)


def interpolated_proximal(*, behavior_logprobs: Tensor, policy_logprobs: Tensor, lags: Tensor) -> Tensor:
    """alpha behavior + (1 - alpha) sg(policy), alpha = 1/(lag + 1): a proximal policy without a forward pass.

    `lags` [N] counts policy versions from the one that sampled the token to the proximal one; the policy is one further
    on, and its logprob is taken to move evenly. A fresh token's proximal is its behavior; the staler a token is, the
    nearer its proximal is to the policy. Source: A-3PO (arXiv 2512.06547).
    """
    alpha = 1.0 / (lags.to(policy_logprobs.dtype) + 1.0)
    return alpha * finite(behavior_logprobs.detach()) + (1.0 - alpha) * finite(policy_logprobs.detach())
