"""Losses of pairs, and of single labelled sequences. P pairs, K sequences; a logprob here is a whole sequence's.

Every logprob is the *sum* over the trained tokens of one sequence (`per_sequence.sequence_sums`), in nats at the
sampling temperature, whatever the loss: the losses that average over length (`ipo`, `orpo`, `simpo`) take the
`lengths` [P] too and divide themselves, so that nothing is averaged twice or in one place only. Gradients flow to
`chosen_logprobs`, `rejected_logprobs`, `logprobs` and scores; losses and gradients are finite however far apart the two
sides are. Losses are per pair, so that a caller who weights each with 1/(pairs of the step) gets the same total from
any split into microbatches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from learner.algorithms.ratios import finite, log_gap

# The mean logprob per token that `orpo` counts at most: at 0 the odds are infinite.
ORPO_CEILING = -1e-6


@dataclass(frozen=True)
class PairLoss:
    """`losses` [P] to be minimized, and the implicit rewards [P] of both sides, without gradient."""

    losses: Tensor
    chosen_rewards: Tensor
    rejected_rewards: Tensor


@dataclass(frozen=True)
class LabelLoss:
    """`losses` [K] to be minimized, and the implicit rewards [K], without gradient."""

    losses: Tensor
    rewards: Tensor


def dpo(
    *,
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    chosen_reference_logprobs: Tensor,
    rejected_reference_logprobs: Tensor,
    beta: float,
    label_smoothing: float = 0.0,
) -> PairLoss:
    """-(1 - e) log sigmoid(h) - e log sigmoid(-h), h the difference of the rewards beta (logprob - reference).

    `label_smoothing` e, 0 to 0.5, is the chance that a label is wrong; the loss is then least at h = log((1 - e)/e),
    and not at infinity. Sources: DPO (arXiv 2305.18290); the smoothed form is conservative DPO
    (https://ericmitchell.ai/cdpo.pdf).
    """
    chosen = beta * log_gap(numerator=chosen_logprobs, denominator=chosen_reference_logprobs)
    rejected = beta * log_gap(numerator=rejected_logprobs, denominator=rejected_reference_logprobs)
    return _pair_loss(_smoothed(chosen - rejected, label_smoothing), chosen, rejected)


def ipo(
    *,
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    chosen_reference_logprobs: Tensor,
    rejected_reference_logprobs: Tensor,
    chosen_lengths: Tensor,
    rejected_lengths: Tensor,
    beta: float,
) -> PairLoss:
    """(h - 1/(2 beta))^2, h the difference of (logprob - reference) per token between the two sides.

    Policy and reference are both averaged over the side's length, here and nowhere else: the optimum is at a difference
    of 1/(2 beta) nats per token, whatever the lengths. Rewards are beta (logprob - reference) per token. Source: IPO
    (arXiv 2310.12036), which leaves the length open; its authors settled on the mean
    (https://huggingface.co/blog/pref-tuning).
    """
    chosen_gap = log_gap(numerator=chosen_logprobs, denominator=chosen_reference_logprobs)
    rejected_gap = log_gap(numerator=rejected_logprobs, denominator=rejected_reference_logprobs)
    chosen, rejected = _per_token(chosen_gap, chosen_lengths), _per_token(rejected_gap, rejected_lengths)
    return _pair_loss((chosen - rejected - 1.0 / (2.0 * beta)).square(), beta * chosen, beta * rejected)


def orpo(
    *,
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    chosen_lengths: Tensor,
    rejected_lengths: Tensor,
    beta: float,
) -> PairLoss:
    """-c - beta log sigmoid(log odds(c) - log odds(r)), c and r the mean logprobs per token, odds = p/(1 - p).

    The first term is the likelihood of the chosen side, which belongs to the loss: a further SFT weight comes on top.
    Needs no reference. Rewards are beta c and beta r. Source: ORPO (arXiv 2403.07691), whose lambda is beta.
    """
    chosen = _per_token(finite(chosen_logprobs), chosen_lengths)
    rejected = _per_token(finite(rejected_logprobs), rejected_lengths)
    preference = -logsigmoid(_log_odds(chosen) - _log_odds(rejected))
    return _pair_loss(beta * preference - chosen, beta * chosen, beta * rejected)


def simpo(
    *,
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    chosen_lengths: Tensor,
    rejected_lengths: Tensor,
    beta: float,
    gamma: float,
    label_smoothing: float = 0.0,
) -> PairLoss:
    """-log sigmoid(h), h = beta (c - r) - gamma, c and r the mean logprobs per token; smoothed as `dpo` is.

    `gamma` is the margin by which the rewards beta c and beta r should differ. Needs no reference. Source: SimPO (arXiv
    2405.14734), which takes beta 2 to 10 and gamma about half of it.
    """
    chosen = beta * _per_token(finite(chosen_logprobs), chosen_lengths)
    rejected = beta * _per_token(finite(rejected_logprobs), rejected_lengths)
    return _pair_loss(_smoothed(chosen - rejected - gamma, label_smoothing), chosen, rejected)


def kto_divergence(*, logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """max(0, mean of logprob - reference) in nats, a scalar without gradient: the reference point of `kto`.

    Both are [K], of one whole step on all ranks, before its first update: the maximum of a mean is not a sum, so an
    estimate per microbatch would depend on the split. In the paper they are those of completions paired with another
    task's prompt, so that the estimate does not follow the reward of the pairs being learned. Those of the step's own
    sequences need no further pass; then the estimate is right for sequences that the policy sampled, and high for
    sequences that were picked because they are good.
    """
    gaps = log_gap(numerator=logprobs, denominator=reference_logprobs).detach()
    return gaps.mean().clamp(min=0.0)


def kto(
    *,
    logprobs: Tensor,
    reference_logprobs: Tensor,
    desirable: Tensor,
    divergence: Tensor,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> LabelLoss:
    """weight x (1 - sigmoid(s)), s = beta (gap - divergence) for a desirable sequence, its negative for another.

    gap = logprob - reference; `desirable` [K] bool; `divergence` is the scalar of `kto_divergence`. Rewards are beta
    gap. A sequence far on either side has no gradient: it is not worth more than 0, nor less than its weight. Source:
    KTO (arXiv 2402.01306).
    """
    rewards = beta * log_gap(numerator=logprobs, denominator=reference_logprobs)
    gain = rewards - beta * divergence.detach()
    weights = torch.where(desirable, desirable_weight, undesirable_weight)
    # 1 - sigmoid(s) is sigmoid(-s), which keeps its digits where the loss is nearly 0.
    losses = weights * torch.sigmoid(torch.where(desirable, -gain, gain))
    return LabelLoss(losses=losses, rewards=rewards.detach())


def bradley_terry(
    *, chosen_scores: Tensor, rejected_scores: Tensor, margins: Tensor, centre_coefficient: float = 0.0
) -> PairLoss:
    """-log sigmoid(c - r - margin) + centre_coefficient (c + r)^2, c and r the scores that a reward model gives.

    `margins` [P] are 0 where the data has none. The loss sees only differences, so scores may drift by a constant; the
    second term centres them on 0. Rewards are the scores. Sources: InstructGPT (arXiv 2203.02155); margin, Llama 2
    (arXiv 2307.09288); centre penalty, arXiv 2312.09244.
    """
    difference = -logsigmoid(chosen_scores - rejected_scores - margins)
    centre = centre_coefficient * (chosen_scores + rejected_scores).square()
    return _pair_loss(difference + centre, chosen_scores, rejected_scores)


def _per_token(sums: Tensor, lengths: Tensor) -> Tensor:
    """`sums` over `lengths`; a sequence without tokens has 0, not NaN."""
    return sums / lengths.clamp(min=1)


def _smoothed(margin: Tensor, label_smoothing: float) -> Tensor:
    return -(1.0 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)


def _log_odds(mean_logprobs: Tensor) -> Tensor:
    below = mean_logprobs.clamp(max=ORPO_CEILING)
    return below - torch.log(-torch.expm1(below))


def _pair_loss(losses: Tensor, chosen: Tensor, rejected: Tensor) -> PairLoss:
    return PairLoss(losses=losses, chosen_rewards=chosen.detach(), rejected_rewards=rejected.detach())
