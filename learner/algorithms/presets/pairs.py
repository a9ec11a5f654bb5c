"""Presets over sequences and their pairs: from files, or from the best and the worst of a group."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from learner.algorithms import preference_losses
from learner.algorithms.aggregation import pair_weights, sequence_weights
from learner.algorithms.config import DpoConfig, OnlineDpoConfig, RmConfig
from learner.algorithms.per_sequence import sequence_lengths, sequence_sums
from learner.algorithms.policy_gradient import mean_of
from learner.algorithms.preference_losses import PairLoss
from learner.algorithms.preset import Advantages, Loss, LossTokens, Mean, Passes, Preset, ScoredBatch


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
    return Preset(
        name=config.type,
        loss=lambda tokens: _with_sft(config, tokens, _pair_loss(_preference(config, tokens), tokens)),
        weights=_per_pair,
        paired=True,
        passes=Passes(reference=config.loss in ("sigmoid", "ipo")),
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


def _kto(config: DpoConfig) -> Preset:
    """Labelled sequences. The reference point is of the whole step, and comes as the advantage of each token."""

    def reference_point(batch: ScoredBatch) -> Advantages:
        assert batch.proximal_logprobs is not None, "the preset asked for a pass of the policy"
        assert batch.reference_logprobs is not None, "the preset asked for a pass of the reference"
        count = len(batch.rewards)
        divergence = preference_losses.kto_divergence(
            logprobs=sequence_sums(values=batch.proximal_logprobs, sequences=batch.sequences, count=count),
            reference_logprobs=sequence_sums(values=batch.reference_logprobs, sequences=batch.sequences, count=count),
        )
        return Advantages(advantages=divergence.expand(len(batch.sequences)), means={"reference_kl": float(divergence)})

    def loss(tokens: LossTokens) -> Loss:
        made = preference_losses.kto(
            logprobs=_sums(tokens, tokens.policy_logprobs),
            reference_logprobs=_sums(tokens, _reference(tokens)),
            desirable=tokens.labels,
            divergence=tokens.advantages.amax() if len(tokens.advantages) else tokens.advantages.sum(),
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


def _preference(config: DpoConfig, tokens: LossTokens) -> PairLoss:
    sums = _sides(_sums(tokens, tokens.policy_logprobs), tokens, "logprobs")
    if config.loss in ("sigmoid", "ipo"):
        sums |= _sides(_sums(tokens, _reference(tokens)), tokens, "reference_logprobs")
    if config.loss == "sigmoid":
        return preference_losses.dpo(**sums, beta=config.beta, label_smoothing=config.label_smoothing)
    lengths = sequence_lengths(sequences=tokens.sequences, count=len(tokens.sequence_weights))
    sums |= _sides(lengths, tokens, "lengths")
    if config.loss == "ipo":
        return preference_losses.ipo(**sums, beta=config.beta)
    if config.loss == "orpo":
        return preference_losses.orpo(**sums, beta=config.beta)
    return preference_losses.simpo(
        **sums, beta=config.beta, gamma=config.simpo_margin, label_smoothing=config.label_smoothing
    )


def _per_pair(lengths: NDArray[np.int64]) -> NDArray[np.float64]:
    """Both sequences of a pair have the pair's weight: the loss is a mean over pairs. They stand next to each other."""
    return pair_weights(pairs=np.arange(len(lengths)).reshape(-1, 2), trained_lengths=lengths)


def _sums(tokens: LossTokens, values: Tensor) -> Tensor:
    return sequence_sums(values=values, sequences=tokens.sequences, count=len(tokens.sequence_weights))


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
