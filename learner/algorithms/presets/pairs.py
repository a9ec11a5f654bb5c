"""Presets that learn from given sequences, of files or of a group's best and worst: likelihood, and preferences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from learner.algorithms import preference_losses, ratios
from learner.algorithms.config import BestOfKConfig, DistillConfig, DpoConfig, OnlineDpoConfig, RmConfig, SftConfig
from learner.algorithms.knobs import AggregationKnobs
from learner.algorithms.policy_loss import negative_log_likelihood, pair_weights, sequence_weights, token_weights
from learner.algorithms.preference_losses import PairLoss
from learner.algorithms.presets.policy_gradient import mean_of
from learner.algorithms.presets.preset import Advantages, Loss, LossTokens, Mean, Passes, Preset, ScoredBatch
from learner.algorithms.ratios import sequence_lengths, sequence_sums


@dataclass(frozen=True)
class Sides:
    """A number for the chosen and for the rejected sequence of each pair, [P] each."""

    chosen: Tensor
    rejected: Tensor


def online_dpo(config: OnlineDpoConfig) -> Preset:
    """DPO's loss on the best and the worst of each group; a group without spread has none."""

    def loss(tokens: LossTokens) -> Loss:
        made = preference_losses.dpo(
            **_sides(_sums(tokens, tokens.policy_logprobs), tokens, "logprobs"),
            **_sides(_sums(tokens, _reference(tokens)), tokens, "reference_logprobs"),
            beta=config.beta,
            label_smoothing=config.label_smoothing,
        )
        return _pair_loss(made, tokens)

    return Preset(
        name=config.type,
        loss=loss,
        weights=_per_pair,
        select=best_and_worst,
        paired=True,
        passes=Passes(reference=True),
        samples_policy=True,
    )


def dpo(config: DpoConfig) -> Preset:
    """The family; which of it `config.loss` says."""
    if config.loss == "kto":
        return _kto(config)

    def loss(tokens: LossTokens) -> Loss:
        count = len(tokens.sequence_weights)
        made = preference(
            config,
            policy=_of_pairs(_sums(tokens, tokens.policy_logprobs), tokens),
            reference=_of_pairs(_sums(tokens, _reference(tokens)), tokens) if config.uses_reference else None,
            lengths=_of_pairs(sequence_lengths(sequences=tokens.sequences, count=count), tokens),
            shift=_of_step(tokens),
        )
        return _with_sft(config, tokens, _pair_loss(made, tokens))

    shifted = config.loss == "bco"
    return Preset(
        name=config.type,
        loss=loss,
        weights=_per_pair,
        paired=True,
        advantages=(lambda batch: _mean_reward(config, batch)) if shifted else None,
        passes=Passes(reference=config.uses_reference, proximal=shifted),
    )


def rm(config: RmConfig) -> Preset:
    """Bradley-Terry on the scores of a pair's two last tokens."""

    def loss(tokens: LossTokens) -> Loss:
        chosen, rejected = tokens.pairs.unbind(dim=1)
        scores = _sums(tokens, tokens.policy_logprobs)  # one trained token a sequence: its score
        made = preference_losses.bradley_terry(
            chosen_scores=scores[chosen],
            rejected_scores=scores[rejected],
            margins=tokens.margins,
            centre_coefficient=config.center_coefficient,
        )
        return _pair_loss(made, tokens)

    return Preset(name=config.type, loss=loss, weights=_per_pair, paired=True, trains_scores=True)


def best_and_worst(rewards: Sequence[float]) -> Sequence[int]:
    """The first best and the first worst of a group's rewards; nothing if all are equal."""
    best, worst = int(np.argmax(rewards)), int(np.argmin(rewards))
    return (best, worst) if rewards[best] > rewards[worst] else ()


def preference(config: DpoConfig, *, policy: Sides, reference: Sides | None, lengths: Sides, shift: Tensor) -> PairLoss:
    """The loss that `config.loss` names, of any of the family but kto, on sums of logprobs over sequences.

    `reference` is None where the config has none; `shift` is bco's, a scalar.
    """
    anchor = (
        Sides(torch.zeros_like(policy.chosen), torch.zeros_like(policy.rejected)) if reference is None else reference
    )
    logprobs = {"chosen_logprobs": policy.chosen, "rejected_logprobs": policy.rejected}
    sizes = {"chosen_lengths": lengths.chosen, "rejected_lengths": lengths.rejected}
    anchors = {"chosen_reference_logprobs": anchor.chosen, "rejected_reference_logprobs": anchor.rejected}
    beta, smoothing = config.beta, config.label_smoothing
    match config.loss:
        case "orpo":
            return preference_losses.orpo(**logprobs, **sizes, beta=beta)
        case "simpo":
            gamma = config.simpo_margin
            return preference_losses.simpo(**logprobs, **sizes, beta=beta, gamma=gamma, label_smoothing=smoothing)
        case "ipo":
            return preference_losses.ipo(**logprobs, **anchors, **sizes, beta=beta)
        case "length_normalised":
            return preference_losses.length_normalised(
                **logprobs, **anchors, **sizes, beta=beta, label_smoothing=smoothing
            )
        case "sigmoid":
            return preference_losses.dpo(**logprobs, **anchors, beta=beta, label_smoothing=smoothing)
    chosen = preference_losses.reward(policy.chosen, anchor.chosen, beta=beta)
    rejected = preference_losses.reward(policy.rejected, anchor.rejected, beta=beta)
    return _of_rewards(config, chosen=chosen, rejected=rejected, shift=shift)


def _of_rewards(config: DpoConfig, *, chosen: Tensor, rejected: Tensor, shift: Tensor) -> PairLoss:
    losses: dict[str, Callable[..., PairLoss]] = {
        "robust": partial(preference_losses.robust, label_smoothing=config.label_smoothing),
        "hinge": preference_losses.hinge,
        "exo": partial(preference_losses.exo, label_smoothing=config.label_smoothing),
        "discopop": partial(preference_losses.discopop, temperature=config.discopop_temperature),
        "apo_zero": preference_losses.apo_zero,
        "apo_down": preference_losses.apo_down,
        "nca": preference_losses.nca,
        "bco": partial(preference_losses.bco, shift=shift),
        "sppo": partial(preference_losses.sppo, beta=config.beta),
    }
    return losses[config.loss](chosen=chosen, rejected=rejected)


def _mean_reward(config: DpoConfig, batch: ScoredBatch) -> Advantages:
    """The mean reward of all completions so far, this step's as it began included, as the advantage of each token."""
    known = batch.carried.rewards.including(config.beta * _gaps(batch))
    return Advantages(
        advantages=torch.full_like(batch.behavior_logprobs, known.mean),
        carried=replace(batch.carried, rewards=known),
        means={"reward_shift": known.mean},
    )


def _gaps(batch: ScoredBatch) -> Tensor:
    """Policy less reference, summed over each sequence, when the step began, [S]."""
    assert batch.proximal_logprobs is not None, "the preset asked for a pass of the policy"
    assert batch.reference_logprobs is not None, "the preset asked for a pass of the reference"
    gaps = batch.proximal_logprobs - batch.reference_logprobs
    return sequence_sums(values=gaps, sequences=batch.sequences, count=len(batch.rewards))


def _of_step(tokens: LossTokens) -> Tensor:
    """The one number that the step's advantages are, a scalar."""
    return tokens.advantages.amax() if len(tokens.advantages) else tokens.advantages.sum()


def _kto(config: DpoConfig) -> Preset:
    """Labelled sequences. The reference point is of the whole step, and comes as the advantage of each token."""

    def reference_point(batch: ScoredBatch) -> Advantages:
        assert batch.mismatched is not None, "a step without prompts with completions of others"
        assert bool(batch.mismatched.any()), "a step without prompts with completions of others"
        divergence = preference_losses.kto_divergence(gaps=_gaps(batch)[batch.mismatched])
        return Advantages(
            advantages=divergence.expand(len(batch.sequences)),
            kept=~batch.mismatched[batch.sequences],
            means={"reference_kl": float(divergence)},
        )

    def loss(tokens: LossTokens) -> Loss:
        made = preference_losses.kto(
            logprobs=_sums(tokens, tokens.policy_logprobs),
            reference_logprobs=_sums(tokens, _reference(tokens)),
            desirable=tokens.labels,
            divergence=_of_step(tokens),
            beta=config.beta,
            desirable_weight=config.good_weight,
            undesirable_weight=config.bad_weight,
        )
        total = (tokens.sequence_weights * made.losses).sum()
        means = {
            "good_reward": _mean_where(made.rewards, tokens.labels),
            "bad_reward": _mean_where(made.rewards, ~tokens.labels),
        }
        return _with_sft(config, tokens, Loss(total=total, means=means))

    return Preset(
        name=config.type,
        loss=loss,
        weights=lambda lengths: sequence_weights(trained_lengths=lengths),
        advantages=reference_point,
        passes=Passes(proximal=True, reference=True),
    )


def _per_pair(lengths: NDArray[np.int64]) -> NDArray[np.float64]:
    """Both sequences of a pair have the pair's weight: the loss is a mean over pairs. They stand next to each other."""
    return pair_weights(pairs=np.arange(len(lengths)).reshape(-1, 2), trained_lengths=lengths)


def _sums(tokens: LossTokens, values: Tensor) -> Tensor:
    return sequence_sums(values=values, sequences=tokens.sequences, count=len(tokens.sequence_weights))


def _of_pairs(per_sequence: Tensor, tokens: LossTokens) -> Sides:
    chosen, rejected = tokens.pairs.unbind(dim=1)
    return Sides(chosen=per_sequence[chosen], rejected=per_sequence[rejected])


def _sides(per_sequence: Tensor, tokens: LossTokens, what: str) -> dict[str, Tensor]:
    chosen, rejected = tokens.pairs.unbind(dim=1)
    return {f"chosen_{what}": per_sequence[chosen], f"rejected_{what}": per_sequence[rejected]}


def _reference(tokens: LossTokens) -> Tensor:
    assert tokens.reference_logprobs is not None, "the preset asked for a pass of the reference"
    return tokens.reference_logprobs


def _pair_loss(made: PairLoss, tokens: LossTokens) -> Loss:
    weights = tokens.sequence_weights[tokens.pairs[:, 0]]
    better = (made.chosen_rewards > made.rejected_rewards).to(made.chosen_rewards.dtype)
    return Loss(
        total=(weights * made.losses).sum(),
        means={
            "pair_accuracy": mean_of(better),
            "chosen_reward": mean_of(made.chosen_rewards),
            "rejected_reward": mean_of(made.rejected_rewards),
        },
    )


def _with_sft(config: DpoConfig, tokens: LossTokens, loss: Loss) -> Loss:
    """Adds the mean negative log-likelihood of the good sequences, each by its own length."""
    if config.sft_weight == 0:
        return loss
    count = len(tokens.sequence_weights)
    lengths = sequence_lengths(sequences=tokens.sequences, count=count).clamp(min=1)
    likelihoods = -_sums(tokens, tokens.policy_logprobs) / lengths
    good = tokens.labels.to(likelihoods.dtype)
    if config.loss != "kto":
        good = torch.zeros_like(likelihoods).index_fill(0, tokens.pairs[:, 0], 1.0)
    total = loss.total + config.sft_weight * (tokens.sequence_weights * good * likelihoods).sum()
    return Loss(total=total, means=loss.means)


def _mean_where(values: Tensor, chosen: Tensor) -> Mean:
    return Mean(total=values[chosen].sum(), count=chosen.sum())


def sft(config: SftConfig) -> Preset:
    """Negative log-likelihood of the tokens in the loss mask."""
    return Preset(name=config.type, loss=_likelihood, weights=_weights(config))


def best_of_k(config: BestOfKConfig) -> Preset:
    """The same, of the best trajectory of each group with spread."""
    return Preset(name=config.type, loss=_likelihood, weights=_weights(config), select=best, samples_policy=True)


def distill(config: DistillConfig) -> Preset:
    """A divergence from the teacher at each token, over the teacher's candidates and what is left of the mass."""

    def loss(tokens: LossTokens) -> Loss:
        gaps = _divergences(config, tokens)
        losses = gaps + config.sft_weight * negative_log_likelihood(policy_logprobs=tokens.policy_logprobs)
        return Loss(total=(tokens.weights * losses).sum(), means={"teacher_divergence": mean_of(gaps)})

    return Preset(name=config.type, loss=loss, weights=_weights(config), candidates=config.teacher_tokens)


def best(rewards: Sequence[float]) -> Sequence[int]:
    """The first best of a group's rewards; nothing if all are equal, as where the whole group failed."""
    return (int(np.argmax(rewards)),) if max(rewards) > min(rewards) else ()


def _likelihood(tokens: LossTokens) -> Loss:
    return Loss(total=(tokens.weights * negative_log_likelihood(policy_logprobs=tokens.policy_logprobs)).sum())


def _weights(config: AggregationKnobs) -> Callable[[NDArray[np.int64]], NDArray[np.float64]]:
    return lambda lengths: token_weights(
        trained_lengths=lengths, aggregation=config.aggregation, constant_length=config.constant_length
    )


def _divergences(config: DistillConfig, tokens: LossTokens) -> Tensor:
    assert tokens.candidate_logprobs is not None, "the batch holds a teacher's candidates"
    assert tokens.teacher_logprobs is not None, "the batch holds a teacher's candidates"
    student, teacher = tokens.candidate_logprobs, tokens.teacher_logprobs
    if config.divergence == "forward_kl":
        return ratios.forward_kl(student_logprobs=student, teacher_logprobs=teacher, tail=True)
    if config.divergence == "reverse_kl":
        return ratios.reverse_kl(student_logprobs=student, teacher_logprobs=teacher, tail=True)
    return ratios.jensen_shannon(student_logprobs=student, teacher_logprobs=teacher, beta=config.jsd_beta, tail=True)
