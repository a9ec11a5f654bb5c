"""Losses of pairs, and of single labelled sequences. P pairs, K sequences; a logprob here is a whole sequence's.

Every logprob is the *sum* over the trained tokens of one sequence (`per_sequence.sequence_sums`), in nats at the
sampling temperature, whatever the loss: the losses that average over length (`ipo`, `orpo`, `simpo`) take the
`lengths` [P] too and divide themselves, so that nothing is averaged twice or in one place only. Some take the implicit
rewards of both sides instead, beta (logprob - reference) as `reward` makes them. Gradients flow to `chosen_logprobs`,
`rejected_logprobs`, `logprobs`, rewards and scores; losses and gradients are finite however far apart the two sides
are. Losses are per pair, so that a caller who weights each with 1/(pairs of the step) gets the same total from any
split into microbatches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from learner.algorithms.ratios import bounded, finite, log_gap

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
    chosen = reward(chosen_logprobs, chosen_reference_logprobs, beta=beta)
    rejected = reward(rejected_logprobs, rejected_reference_logprobs, beta=beta)
    return _pair_loss(_smoothed(chosen - rejected, label_smoothing), chosen, rejected)


def length_normalised(
    *,
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    chosen_reference_logprobs: Tensor,
    rejected_reference_logprobs: Tensor,
    chosen_lengths: Tensor,
    rejected_lengths: Tensor,
    beta: float,
    label_smoothing: float = 0.0,
) -> PairLoss:
    """`dpo` whose rewards are per token: beta (logprob - reference) / length.

    A long completion cannot win by its length. Source: Tulu 3 (arXiv 2411.15124), which takes a beta of 5.
    """
    chosen = _per_token(reward(chosen_logprobs, chosen_reference_logprobs, beta=beta), chosen_lengths)
    rejected = _per_token(reward(rejected_logprobs, rejected_reference_logprobs, beta=beta), rejected_lengths)
    return _pair_loss(_smoothed(chosen - rejected, label_smoothing), chosen, rejected)


def reward(logprobs: Tensor, reference_logprobs: Tensor, *, beta: float) -> Tensor:
    """beta (logprob - reference): the reward that the policy would be the best one for, but for a constant."""
    return beta * log_gap(numerator=logprobs, denominator=reference_logprobs)


def robust(*, chosen: Tensor, rejected: Tensor, label_smoothing: float) -> PairLoss:
    """(-(1 - e) log sigmoid(h) + e log sigmoid(-h)) / (1 - 2e), h = chosen - rejected, the rewards of both sides.

    Its mean over labels that are wrong with chance e, below 0.5, is DPO's loss on right ones. Not bounded below.
    Source: arXiv 2403.00409.
    """
    h, e = chosen - rejected, label_smoothing
    return _pair_loss((e * logsigmoid(-h) - (1.0 - e) * logsigmoid(h)) / (1.0 - 2.0 * e), chosen, rejected)


def hinge(*, chosen: Tensor, rejected: Tensor) -> PairLoss:
    """max(0, 1 - h), h = chosen - rejected: nothing more to learn from a pair that is 1 apart. Source: SLiC (arXiv
    2305.10425), on DPO's rewards as in arXiv 2309.06657.
    """
    return _pair_loss((1.0 - (chosen - rejected)).clamp(min=0.0), chosen, rejected)


def exo(*, chosen: Tensor, rejected: Tensor, label_smoothing: float) -> PairLoss:
    """KL(p || q) of p = (sigmoid(h), sigmoid(-h)) against the labels q = (1 - e, e), h = chosen - rejected, e above 0.

    The reverse of the divergence in DPO's loss: 0 where sigmoid(h) = 1 - e. Source: EXO (arXiv 2402.00856), e 1e-3.
    """
    h, e = chosen - rejected, label_smoothing
    right = torch.sigmoid(h) * (logsigmoid(h) - math.log1p(-e))
    wrong = torch.sigmoid(-h) * (logsigmoid(-h) - math.log(e))
    return _pair_loss(right + wrong, chosen, rejected)


def discopop(*, chosen: Tensor, rejected: Tensor, temperature: float = 0.05) -> PairLoss:
    """(1 - m) -log sigmoid(h) + m exp(-h), m = sigmoid(h / temperature), h = chosen - rejected.

    DPO's loss for pairs in the wrong order, an exponential one for the others. Source: DiscoPOP (arXiv 2406.08414).
    """
    h = chosen - rejected
    mixed = torch.sigmoid(h / temperature)
    return _pair_loss((1.0 - mixed) * -logsigmoid(h) + mixed * torch.exp(-bounded(h)), chosen, rejected)


def apo_zero(*, chosen: Tensor, rejected: Tensor) -> PairLoss:
    """sigmoid(-chosen) + sigmoid(rejected): raises the chosen side and lowers the other, each against the reference.

    For pairs whose chosen side is better than what the model writes. Source: APO (arXiv 2408.06266).
    """
    return _pair_loss(torch.sigmoid(-chosen) + torch.sigmoid(rejected), chosen, rejected)


def apo_down(*, chosen: Tensor, rejected: Tensor) -> PairLoss:
    """sigmoid(chosen) + sigmoid(rejected - chosen): lowers both, the rejected side more.

    For pairs whose chosen side is worse than what the model writes. Source: APO (arXiv 2408.06266).
    """
    return _pair_loss(torch.sigmoid(chosen) + torch.sigmoid(rejected - chosen), chosen, rejected)


def nca(*, chosen: Tensor, rejected: Tensor) -> PairLoss:
    """-log sigmoid(chosen) - 1/2 log sigmoid(-chosen) - 1/2 log sigmoid(-rejected): a finite best reward for each side.

    The chosen side's likelihood does not fall with the rejected one's. Source: NCA (arXiv 2402.05369).
    """
    losses = -logsigmoid(chosen) - 0.5 * logsigmoid(-chosen) - 0.5 * logsigmoid(-rejected)
    return _pair_loss(losses, chosen, rejected)


def bco(*, chosen: Tensor, rejected: Tensor, shift: Tensor) -> PairLoss:
    """-log sigmoid(chosen - shift) - log sigmoid(shift - rejected): a classifier of each side by itself.

    `shift`, a scalar, is the mean reward of all completions so far. Source: BCO (arXiv 2404.04656).
    """
    losses = -logsigmoid(chosen - shift.detach()) - logsigmoid(shift.detach() - rejected)
    return _pair_loss(losses, chosen, rejected)


def sppo(*, chosen: Tensor, rejected: Tensor, beta: float) -> PairLoss:
    """((chosen - 1/2)^2 + (rejected + 1/2)^2) / beta^2: the log ratios are to be 1/(2 beta) and minus that.

    Source: SPPO (arXiv 2405.00675) with certain labels; beta is 1/eta, 1e-3 there.
    """
    return _pair_loss(((chosen - 0.5).square() + (rejected + 0.5).square()) / beta**2, chosen, rejected)


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


def kto_divergence(*, gaps: Tensor) -> Tensor:
    """max(0, the mean of `gaps` [K], logprob - reference), a scalar without gradient: the reference point of `kto`.

    The sequences are prompts with completions of other prompts, so that what is good or bad about a completion does
    not move the point that it is compared with; it then estimates how far the policy has moved as a whole. They are
    those of the whole step on all ranks, before its first update: the maximum of a mean is no sum of parts. Source: KTO
    (arXiv 2402.01306).
    """
    return gaps.detach().mean().clamp(min=0.0)


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
    rewards = reward(logprobs, reference_logprobs, beta=beta)
    gain = rewards - beta * divergence.detach()
    # Of two numbers alone `where` makes float32, whatever the gains are.
    weights = torch.where(desirable, desirable_weight, torch.full_like(gain, undesirable_weight))
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
