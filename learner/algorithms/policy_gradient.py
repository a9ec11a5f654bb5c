"""Puts a preset together from an estimator of advantages and a policy loss; the rest follows from the knobs.

rewards ─ shaping ─▶ + KL in reward ─▶ estimator ─▶ advantages ─▶ policy loss x correction + KL + entropy ─▶ loss
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from learner.algorithms import advantages, corrections, kl
from learner.algorithms.aggregation import token_weights
from learner.algorithms.knobs import CorrectionKnobs, PositiveKnobs, ScaleKnobs
from learner.algorithms.policy_loss import PolicyLoss, negative_log_likelihood
from learner.algorithms.preset import Advantages, Loss, LossTokens, Mean, Passes, Preset, ScoredBatch
from learner.algorithms.rewards import Rewards, shaped
from learner.algorithms.sampled_knobs import SampledKnobs

NO_PASSES = Passes()

Estimator = Callable[[ScoredBatch, Rewards], Advantages]
TokenLoss = Callable[[LossTokens], PolicyLoss]


def policy_gradient(
    config: SampledKnobs,
    *,
    name: str,
    estimator: Estimator,
    loss: TokenLoss,
    passes: Passes = NO_PASSES,
    to_behavior: bool = False,
) -> Preset:
    """The preset `name`. `passes` are those that the estimator needs; correction and KL add their own.

    `to_behavior`: the loss takes the ratio to the behavior policy, which moves with the first update already.
    """
    correction = config if isinstance(config, CorrectionKnobs) else None
    drops = correction is not None and correction.has_window and not correction.count_left_out
    positive = config if isinstance(config, PositiveKnobs) and config.positive_nll else None

    def whole_loss(tokens: LossTokens) -> Loss:
        made = _loss(config, correction, loss, tokens)
        return made if positive is None else _with_likelihood(positive, tokens, made)

    return Preset(
        name=name,
        loss=whole_loss,
        weights=lambda lengths: token_weights(
            trained_lengths=lengths, aggregation=config.aggregation, constant_length=config.constant_length
        ),
        advantages=lambda batch: _estimate(config, estimator, batch),
        kept=lambda batch: _kept(config, correction if drops else None, batch),
        passes=Passes(
            proximal=passes.proximal or config.kl_is_in_reward or drops,
            reference=passes.reference or config.kl_coefficient > 0,
            teacher=passes.teacher,
            values=passes.values,
        ),
        samples_policy=True,
        ratio_to_behavior=to_behavior,
        entropy_gradient=config.entropy_coefficient != 0,
        good_reward=None if positive is None else positive.positive_reward,
    )


def _estimate(config: SampledKnobs, estimator: Estimator, batch: ScoredBatch) -> Advantages:
    found = shaped(config, batch)
    made = estimator(batch, found.rewards)
    return replace(made, carried=found.carried, means={**found.means, **made.means})


def trajectory_level(estimate: Callable[[ScoredBatch, Tensor], Tensor]) -> Estimator:
    """An estimator of one advantage for a trajectory, from rewards [S] to advantages [S]."""

    def of_tokens(batch: ScoredBatch, rewards: Rewards) -> Advantages:
        return Advantages(advantages=estimate(batch, rewards.with_tokens(batch))[batch.sequences])

    return of_tokens


def group_level(config: ScaleKnobs) -> Estimator:
    """A trajectory's reward among those of its group."""
    return trajectory_level(
        lambda batch, rewards: advantages.group(rewards=rewards, groups=batch.groups, scale=config.advantage_scale)
    )


def _kept(config: SampledKnobs, correction: CorrectionKnobs | None, batch: ScoredBatch) -> Tensor:
    kept = torch.ones_like(batch.sequences, dtype=torch.bool)
    if config.masks_truncated:
        kept = ~batch.truncated[batch.sequences]
    if correction is None:
        return kept
    assert batch.proximal_logprobs is not None, "the preset asked for a pass of the policy"
    return kept & corrections.kept_tokens(
        rules=_rules(correction),
        proximal_logprobs=proximal_of(
            correction, recomputed=batch.proximal_logprobs, behavior=batch.behavior_logprobs, lags=batch.lags
        ),
        behavior_logprobs=batch.behavior_logprobs,
        sequences=batch.sequences,
        count=len(batch.rewards),
    )


def proximal_of(correction: CorrectionKnobs | None, *, recomputed: Tensor, behavior: Tensor, lags: Tensor) -> Tensor:
    """The logprobs that ratios are taken to; `recomputed` are the policy's at the step's start."""
    if correction is None or correction.proximal == "recompute":
        return recomputed
    if correction.proximal == "behavior":
        return behavior
    return corrections.interpolated_proximal(behavior_logprobs=behavior, policy_logprobs=recomputed, lags=lags)


def _rules(knobs: CorrectionKnobs) -> corrections.Rules:
    return corrections.Rules(
        weight=knobs.correction,
        cap=knobs.correction_cap,
        token_window=None if knobs.token_window is None else corrections.Window(*knobs.token_window),
        sequence_window=None if knobs.sequence_window is None else corrections.Window(*knobs.sequence_window),
    )


def _loss(config: SampledKnobs, correction: CorrectionKnobs | None, policy_loss: TokenLoss, tokens: LossTokens) -> Loss:
    if correction is not None:
        anchor = tokens.policy_logprobs.detach() if correction.proximal == "interpolate" else tokens.proximal_logprobs
        anchor = proximal_of(correction, recomputed=anchor, behavior=tokens.behavior_logprobs, lags=tokens.lags)
        tokens = replace(tokens, proximal_logprobs=anchor)
    made = policy_loss(tokens)
    losses = made.losses
    corrected = None
    if correction is not None and correction.proximal != "behavior":
        weights = _correction_weights(correction, tokens)
        losses = losses * weights
        corrected = weights >= correction.correction_cap if correction.correction != "none" else None
    losses, means = _with_penalties(config, tokens, losses)
    return Loss(total=(tokens.weights * losses).sum(), clipped=made.clipped, corrected=corrected, means=means)


def _with_likelihood(knobs: PositiveKnobs, tokens: LossTokens, loss: Loss) -> Loss:
    """The loss with the likelihood of good trajectories: arXiv 2504.05118, section 4.3."""
    weights = tokens.good_weights
    assert weights is not None, "the preset says which trajectories are good"
    losses = negative_log_likelihood(policy_logprobs=tokens.policy_logprobs)
    return replace(
        loss,
        total=loss.total + knobs.positive_nll * (weights * losses).sum(),
        means={**loss.means, "positive_nll": mean_of(losses[weights > 0])},
    )


def _correction_weights(knobs: CorrectionKnobs, tokens: LossTokens) -> Tensor:
    return corrections.correct(
        rules=_rules(knobs),
        proximal_logprobs=tokens.proximal_logprobs,
        behavior_logprobs=tokens.behavior_logprobs,
        sequences=tokens.sequences,
        count=len(tokens.sequence_weights),
    ).weights


def _with_penalties(config: SampledKnobs, tokens: LossTokens, losses: Tensor) -> tuple[Tensor, dict[str, Mean]]:
    """The losses with the KL penalty and the entropy bonus, and what the first measured."""
    means = {}
    if config.kl_coefficient > 0:
        assert tokens.reference_logprobs is not None, "the preset asked for a pass of the reference"
        penalty = kl.penalty(
            form="k3" if config.kl_is_in_reward else config.kl_form,
            policy_logprobs=tokens.policy_logprobs,
            reference_logprobs=tokens.reference_logprobs,
        )
        means["reference_kl"] = mean_of(penalty)
        if not config.kl_is_in_reward:
            losses = losses + config.kl_coefficient * penalty
    if config.entropy_coefficient != 0:
        assert tokens.entropy is not None, "the preset asked for the entropy"
        losses = losses - config.entropy_coefficient * tokens.entropy
    return losses, means


def mean_of(values: Tensor) -> Mean:
    """The measure of the mean of `values`, without gradient."""
    return Mean(total=values.detach().sum(), count=values.new_tensor(values.numel()))
