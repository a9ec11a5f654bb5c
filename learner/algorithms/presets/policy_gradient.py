"""Presets of an estimator of advantages and a policy loss; the rest follows from the knobs.

rewards ─ shaping ─▶ + KL in reward ─▶ estimator ─▶ advantages ─▶ policy loss x correction + KL + entropy ─▶ loss

Those with the clipped ratio of each token to the proximal policy are here, the others in `weighted`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from learner.algorithms import advantages, policy_loss, ratios
from learner.algorithms.config import (
    DapoConfig,
    DrGrpoConfig,
    GdpoConfig,
    GigpoConfig,
    GrpoConfig,
    MaxRlConfig,
    PpoConfig,
    ReinforcePpConfig,
)
from learner.algorithms.knobs import ClipKnobs, CorrectionKnobs, PositiveKnobs, RewardKnobs, SampledKnobs, ScaleKnobs
from learner.algorithms.policy_loss import PolicyLoss, negative_log_likelihood, token_weights
from learner.algorithms.presets.preset import (
    Advantages,
    Loss,
    LossTokens,
    Mean,
    Passes,
    Preset,
    Rewards,
    ScoredBatch,
    shaped,
)

NO_PASSES = Passes()

Estimator = Callable[[ScoredBatch, Rewards, Tensor], Advantages]
"""From the step, its rewards, and which tokens [M] take part in the loss, as far as no advantage decides that."""
TokenLoss = Callable[[LossTokens], PolicyLoss]


def policy_gradient(
    config: SampledKnobs,
    *,
    name: str,
    estimator: Estimator,
    loss: TokenLoss,
    passes: Passes = NO_PASSES,
    to_behavior: bool = False,
    pulls: bool = False,
) -> Preset:
    """The preset `name`. `passes` are those that the estimator needs; correction and KL add their own.

    `to_behavior`: the loss takes the ratio to the behavior policy, which moves with the first update already. `pulls`:
    it has a gradient where the advantage is 0, too.
    """
    correction = config if isinstance(config, CorrectionKnobs) and config.corrects else None
    needs_proximal = correction is not None and (_drops(correction) or correction.self_normalise)
    positive = config if isinstance(config, PositiveKnobs) and config.positive_nll else None
    kl_in_loss = config.kl_coefficient > 0 and not config.kl_is_in_reward

    def whole_loss(tokens: LossTokens) -> Loss:
        made = _loss(config, correction, loss, tokens)
        return made if positive is None else _with_likelihood(positive, tokens, made)

    return Preset(
        name=name,
        loss=whole_loss,
        weights=lambda lengths: token_weights(
            trained_lengths=lengths, aggregation=config.aggregation, constant_length=config.constant_length
        ),
        advantages=lambda batch: _estimate(config, correction, estimator, batch),
        passes=Passes(
            proximal=passes.proximal or config.kl_is_in_reward or needs_proximal,
            reference=passes.reference or config.kl_coefficient > 0,
            teacher=passes.teacher,
            values=passes.values,
        ),
        samples_policy=True,
        moves_at_once=to_behavior or (correction is not None and correction.proximal != "recompute"),
        entropy_gradient=config.entropy_coefficient != 0,
        turn_discounts=isinstance(config, RewardKnobs) and config.turn_discount < 1,
        good_reward=None if positive is None else positive.positive_reward,
        rests_on_advantages=not (pulls or kl_in_loss or config.entropy_coefficient != 0 or positive is not None),
    )


def _drops(correction: CorrectionKnobs) -> bool:
    return correction.has_filter and not correction.count_left_out


def _estimate(
    config: SampledKnobs, correction: CorrectionKnobs | None, estimator: Estimator, batch: ScoredBatch
) -> Advantages:
    found = shaped(config, batch)
    kept = torch.ones_like(batch.sequences, dtype=torch.bool)
    if config.masks_truncated:
        kept = ~batch.truncated[batch.sequences]
    if correction is not None and _drops(correction):
        kept = kept & ratios.kept_tokens(_gap_of(correction, batch), _rules(correction))
    made = estimator(batch, found.rewards, kept)
    made = replace(made, kept=kept, carried=found.carried, means={**found.means, **made.means})
    return made if correction is None else _with_correction(correction, batch, made)


def _with_correction(correction: CorrectionKnobs, batch: ScoredBatch, made: Advantages) -> Advantages:
    """What a correction says of the whole step once the advantages are known."""
    if not (_drops(correction) or correction.self_normalise):
        return made
    assert made.kept is not None, "said before the advantages were made"
    corrected = ratios.correct(_gap_of(correction, batch), _rules(correction), advantages=made.advantages)
    kept = made.kept & corrected.kept if _drops(correction) else made.kept
    if not correction.self_normalise:
        return replace(made, kept=kept)
    counted = replace(corrected, weights=torch.where(kept, corrected.weights, 0.0), kept=kept & corrected.kept)
    return replace(made, kept=kept, correction_scale=ratios.self_normalising_scale(counted))


def trajectory_level(estimate: Callable[[ScoredBatch, Tensor], Tensor]) -> Estimator:
    """An estimator of one advantage for a trajectory, from rewards [S] to advantages [S]."""

    def of_tokens(batch: ScoredBatch, rewards: Rewards, kept: Tensor) -> Advantages:
        return Advantages(advantages=estimate(batch, rewards.with_tokens(batch))[batch.sequences])

    return of_tokens


def group_level(config: ScaleKnobs) -> Estimator:
    """A trajectory's reward among those of its group."""
    return trajectory_level(
        lambda batch, rewards: advantages.group(rewards=rewards, groups=batch.groups, scale=config.advantage_scale)
    )


def _gap_of(correction: CorrectionKnobs, batch: ScoredBatch) -> ratios.Gap:
    """Between proximal and behavior policy over the whole step, before its first update."""
    assert batch.proximal_logprobs is not None, "the preset asked for a pass of the policy"
    proximal = proximal_of(
        correction, recomputed=batch.proximal_logprobs, behavior=batch.behavior_logprobs, lags=batch.lags
    )
    return ratios.Gap(proximal, batch.behavior_logprobs, batch.sequences, len(batch.rewards))


def proximal_of(correction: CorrectionKnobs | None, *, recomputed: Tensor, behavior: Tensor, lags: Tensor) -> Tensor:
    """The logprobs that ratios are taken to; `recomputed` are the policy's at the step's start."""
    if correction is None or correction.proximal == "recompute":
        return recomputed
    if correction.proximal == "behavior":
        return behavior
    return ratios.interpolated_proximal(behavior_logprobs=behavior, policy_logprobs=recomputed, lags=lags)


def _rules(knobs: CorrectionKnobs) -> ratios.Rules:
    return ratios.Rules(
        weight=knobs.correction,
        cap=knobs.correction_cap,
        floor=knobs.correction_floor,
        token_window=None if knobs.token_window is None else ratios.Window(*knobs.token_window),
        sequence_window=None if knobs.sequence_window is None else ratios.Window(*knobs.sequence_window),
        token_veto=knobs.token_veto,
        divergence_limit=knobs.divergence_limit,
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
        found = _corrected(correction, tokens)
        losses = losses * found.weights * tokens.correction_scale
        corrected = found.bounded if correction.correction != "none" else None
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


def _corrected(knobs: CorrectionKnobs, tokens: LossTokens) -> ratios.Corrected:
    count = len(tokens.sequence_weights)
    gap = ratios.Gap(tokens.proximal_logprobs, tokens.behavior_logprobs, tokens.sequences, count)
    return ratios.correct(gap, _rules(knobs), advantages=tokens.advantages)


def _with_penalties(config: SampledKnobs, tokens: LossTokens, losses: Tensor) -> tuple[Tensor, dict[str, Mean]]:
    """The losses with the KL penalty and the entropy bonus, and what the first measured."""
    means = {}
    if config.kl_coefficient > 0:
        assert tokens.reference_logprobs is not None, "the preset asked for a pass of the reference"
        penalty = ratios.penalty(
            form="k3" if config.kl_is_in_reward else config.kl_form,
            policy_logprobs=tokens.policy_logprobs,
            reference_logprobs=tokens.reference_logprobs,
        )
        means["reference_kl"] = mean_of(penalty)
        if config.kl_ratio:
            penalty = ratios.weighted(
                form=config.kl_form,
                policy_logprobs=tokens.policy_logprobs,
                reference_logprobs=tokens.reference_logprobs,
                behavior_logprobs=tokens.behavior_logprobs,
            )
        if not config.kl_is_in_reward:
            losses = losses + config.kl_coefficient * penalty
    if config.entropy_coefficient != 0:
        assert tokens.entropy is not None, "the preset asked for the entropy"
        losses = losses - config.entropy_coefficient * tokens.entropy
    return losses, means


def mean_of(values: Tensor) -> Mean:
    """The measure of the mean of `values`, without gradient."""
    return Mean(total=values.detach().sum(), count=values.new_tensor(values.numel()))


def grpo(config: GrpoConfig | DrGrpoConfig | DapoConfig | MaxRlConfig) -> Preset:
    """Group advantages and the clip. The four differ in defaults, and in that only dapo asks for spread."""
    return policy_gradient(
        config,
        name=config.type,
        estimator=group_level(config),
        loss=clip(config),
    )


def gdpo(config: GdpoConfig) -> Preset:
    """Each component of the reward in its group, their weighted sum over the step; the clip."""

    def estimate(batch: ScoredBatch, rewards: Rewards, kept: Tensor) -> Advantages:
        made = advantages.per_component(
            components=batch.components,
            groups=batch.groups,
            weights=tuple(config.components.values()),
            counted=torch.bincount(batch.sequences[kept], minlength=len(batch.rewards)) > 0,
        )
        return Advantages(advantages=made[batch.sequences])

    made = policy_gradient(config, name=config.type, estimator=estimate, loss=clip(config))
    return replace(made, components=tuple(config.components))


def reinforce_pp(config: ReinforcePpConfig) -> Preset:
    """Rewards to go, standardised over the step's tokens, and the clip."""

    def estimate(batch: ScoredBatch, rewards: Rewards, kept: Tensor) -> Advantages:
        return Advantages(
            advantages=advantages.batch(
                rewards=rewards.of_trajectories,
                groups=batch.groups,
                sequences=batch.sequences,
                subtract_group_mean=config.group_baseline,
                token_rewards=rewards.of_tokens,
                counted=kept,
            )
        )

    return policy_gradient(config, name=config.type, estimator=estimate, loss=clip(config))


def gigpo(config: GigpoConfig) -> Preset:
    """The trajectory's advantage in its group, and the turn's among equal states; the clip."""

    def estimate(batch: ScoredBatch, rewards: Rewards, kept: Tensor) -> Advantages:
        return Advantages(
            advantages=advantages.step_group(
                rewards=rewards.with_tokens(batch),
                groups=batch.groups,
                sequences=batch.sequences,
                turns=batch.turns,
                turn_states=batch.turn_states,
                gamma_step=config.step_discount,
                omega=config.step_weight,
                scale=config.advantage_scale,
                turn_rewards=batch.turn_rewards if config.turn_rewards else None,
            )
        )

    made = policy_gradient(config, name=config.type, estimator=estimate, loss=clip(config))
    return replace(made, turn_rewards=config.turn_rewards)


def ppo(config: PpoConfig) -> Preset:
    """Generalised advantages from a critic, and the clip."""

    def estimate(batch: ScoredBatch, rewards: Rewards, kept: Tensor) -> Advantages:
        assert batch.values is not None, "the preset asked for the critic's values"
        alpha = config.length_adaptive_alpha
        made = advantages.gae(
            rewards=rewards.at_tokens(batch),
            values=batch.values,
            sequences=batch.sequences,
            gamma=config.discount,
            policy_lambda=config.policy_lambda
            if alpha is None
            else advantages.length_adaptive_lambda(sequences=batch.sequences, alpha=alpha),
            value_lambda=config.value_lambda,
            whiten=config.whiten,
            counted=kept,
        )
        return Advantages(advantages=made.advantages, returns=made.returns)

    made = policy_gradient(config, name=config.type, estimator=estimate, loss=clip(config), passes=Passes(values=True))
    return replace(made, value_clip=config.value_clip)


def clip(config: ClipKnobs) -> TokenLoss:
    """The clip with the config's bounds."""

    def loss(tokens: LossTokens) -> policy_loss.PolicyLoss:
        return policy_loss.clip(
            policy_logprobs=tokens.policy_logprobs,
            proximal_logprobs=tokens.proximal_logprobs,
            advantages=tokens.advantages,
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            dual_clip=config.dual_clip,
        )

    return loss
