"""The family of DPO: losses of pairs, and KTO's of single examples, as presets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from learner.algorithms import preference_losses
from learner.algorithms.pairs import Sides, gaps, of_pairs, pair_loss, per_pair, reference, sums
from learner.algorithms.policy_loss import sequence_weights
from learner.algorithms.preference_losses import PairLoss
from learner.algorithms.preset import Advantages, Loss, LossTokens, Mean, Passes, Preset, ScoredBatch
from learner.algorithms.presets.dpo import DpoConfig
from learner.algorithms.ratios import sequence_lengths


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


def paired(config: DpoConfig) -> Preset:
    """The preset of any of the family but kto."""

    def loss(tokens: LossTokens) -> Loss:
        count = len(tokens.sequence_weights)
        made = preference(
            config,
            policy=of_pairs(sums(tokens, tokens.policy_logprobs), tokens),
            reference=of_pairs(sums(tokens, reference(tokens)), tokens) if config.uses_reference else None,
            lengths=of_pairs(sequence_lengths(sequences=tokens.sequences, count=count), tokens),
            shift=_of_step(tokens),
        )
        return _with_sft(config, tokens, pair_loss(made, tokens))

    shifted = config.loss == "bco"
    return Preset(
        name=config.type,
        loss=loss,
        weights=per_pair,
        paired=True,
        advantages=(lambda batch: _mean_reward(config, batch)) if shifted else None,
        passes=Passes(reference=config.uses_reference, proximal=shifted),
    )


def kto(config: DpoConfig) -> Preset:
    """Labelled sequences. The reference point is of the whole step, and comes as the advantage of each token."""

    def reference_point(batch: ScoredBatch) -> Advantages:
        assert batch.mismatched is not None, "a step without prompts with completions of others"
        assert bool(batch.mismatched.any()), "a step without prompts with completions of others"
        divergence = preference_losses.kto_divergence(gaps=gaps(batch)[batch.mismatched])
        return Advantages(
            advantages=divergence.expand(len(batch.sequences)),
            kept=~batch.mismatched[batch.sequences],
            means={"reference_kl": float(divergence)},
        )

    def loss(tokens: LossTokens) -> Loss:
        made = preference_losses.kto(
            logprobs=sums(tokens, tokens.policy_logprobs),
            reference_logprobs=sums(tokens, reference(tokens)),
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


def _mean_reward(config: DpoConfig, batch: ScoredBatch) -> Advantages:
    """The mean reward of all completions so far, this step's as it began included, as the advantage of each token."""
    known = batch.carried.rewards.including(config.beta * gaps(batch))
    return Advantages(
        advantages=torch.full_like(batch.behavior_logprobs, known.mean),
        carried=replace(batch.carried, rewards=known),
        means={"reward_shift": known.mean},
    )


def _of_step(tokens: LossTokens) -> Tensor:
    """The one number that the step's advantages are, a scalar."""
    return tokens.advantages.amax() if len(tokens.advantages) else tokens.advantages.sum()


def _with_sft(config: DpoConfig, tokens: LossTokens, loss: Loss) -> Loss:
    """Adds the mean negative log-likelihood of the good sequences, each by its own length."""
    if config.sft_weight == 0:
        return loss
    count = len(tokens.sequence_weights)
    lengths = sequence_lengths(sequences=tokens.sequences, count=count).clamp(min=1)
    likelihoods = -sums(tokens, tokens.policy_logprobs) / lengths
    good = tokens.labels.to(likelihoods.dtype)
    if config.loss != "kto":
        good = torch.zeros_like(likelihoods).index_fill(0, tokens.pairs[:, 0], 1.0)
    total = loss.total + config.sft_weight * (tokens.sequence_weights * good * likelihoods).sum()
    return Loss(total=total, means=loss.means)


def _mean_where(values: Tensor, chosen: Tensor) -> Mean:
    return Mean(total=values[chosen].sum(), count=chosen.sum())
