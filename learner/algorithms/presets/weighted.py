"""Presets whose loss is not the token's clip: weighted by the ratio to the behavior policy, or over whole sequences."""

from __future__ import annotations

from torch import Tensor

from learner.algorithms import advantages, policy_loss
from learner.algorithms.config import (
    CispoConfig,
    DppoConfig,
    GmpoConfig,
    GspoConfig,
    KimiConfig,
    OpdConfig,
    ReinforceConfig,
    RlooConfig,
    SapoConfig,
    ToprConfig,
)
from learner.algorithms.policy_loss import PolicyLoss
from learner.algorithms.presets.policy_gradient import group_level, policy_gradient, trajectory_level
from learner.algorithms.presets.preset import Advantages, LossTokens, Passes, Preset, Rewards, ScoredBatch


def gspo(config: GspoConfig) -> Preset:
    """Group advantages, one clipped ratio for the trajectory."""
    return policy_gradient(
        config, name=config.type, estimator=group_level(config), loss=lambda tokens: _sequence_clip(config, tokens)
    )


def gmpo(config: GmpoConfig) -> Preset:
    """Group advantages, the geometric mean over the trajectory of ratios that are clipped token by token."""

    def loss(tokens: LossTokens) -> PolicyLoss:
        return policy_loss.gmpo(
            policy_logprobs=tokens.policy_logprobs,
            proximal_logprobs=tokens.proximal_logprobs,
            advantages=tokens.advantages,
            sequences=tokens.sequences,
            count=len(tokens.sequence_weights),
            clip_low=config.log_clip_low,
            clip_high=config.log_clip_high,
        )

    return policy_gradient(config, name=config.type, estimator=group_level(config), loss=loss)


def sapo(config: SapoConfig) -> Preset:
    """Group advantages, a soft gate on each token's ratio."""

    def loss(tokens: LossTokens) -> PolicyLoss:
        return policy_loss.sapo(
            policy_logprobs=tokens.policy_logprobs,
            proximal_logprobs=tokens.proximal_logprobs,
            advantages=tokens.advantages,
            temperature_positive=config.temperature_positive,
            temperature_negative=config.temperature_negative,
        )

    return policy_gradient(config, name=config.type, estimator=group_level(config), loss=loss)


def cispo(config: CispoConfig) -> Preset:
    """Group advantages, every token's weight bounded, none without gradient."""

    def loss(tokens: LossTokens) -> PolicyLoss:
        return policy_loss.cispo(
            policy_logprobs=tokens.policy_logprobs,
            behavior_logprobs=tokens.behavior_logprobs,
            advantages=tokens.advantages,
            clip_low=config.ratio_low,
            clip_high=config.ratio_high,
        )

    return policy_gradient(config, name=config.type, estimator=group_level(config), loss=loss, to_behavior=True)


def topr(config: ToprConfig) -> Preset:
    """Group advantages; good trajectories as examples, bad ones by a truncated ratio."""

    def loss(tokens: LossTokens) -> PolicyLoss:
        return policy_loss.topr(
            policy_logprobs=tokens.policy_logprobs,
            behavior_logprobs=tokens.behavior_logprobs,
            advantages=tokens.advantages,
            positive_weight=config.positive_weight,
            negative_weight=config.negative_weight,
        )

    return policy_gradient(config, name=config.type, estimator=group_level(config), loss=loss, to_behavior=True)


def kimi(config: KimiConfig) -> Preset:
    """Group advantages and a squared pull towards the proximal policy."""

    def loss(tokens: LossTokens) -> PolicyLoss:
        return policy_loss.kimi(
            policy_logprobs=tokens.policy_logprobs,
            proximal_logprobs=tokens.proximal_logprobs,
            advantages=tokens.advantages,
            tau=config.tau,
        )

    return policy_gradient(config, name=config.type, estimator=group_level(config), loss=loss)


def dppo(config: DppoConfig) -> Preset:
    """Group advantages; a token's gradient stops where its probability has moved too far."""

    def loss(tokens: LossTokens) -> PolicyLoss:
        return policy_loss.dppo(
            policy_logprobs=tokens.policy_logprobs,
            behavior_logprobs=tokens.behavior_logprobs,
            advantages=tokens.advantages,
            delta_low=config.delta_low,
            delta_high=config.delta_high,
            kappa=config.kappa,
        )

    return policy_gradient(config, name=config.type, estimator=group_level(config), loss=loss, to_behavior=True)


def reinforce(config: ReinforceConfig) -> Preset:
    """Group advantages, weighted by a capped ratio."""
    return policy_gradient(
        config,
        name=config.type,
        estimator=group_level(config),
        loss=lambda tokens: _reinforce(config.ratio_cap, tokens),
        to_behavior=True,
    )


def rloo(config: RlooConfig) -> Preset:
    """The mean of the group's others as baseline."""
    weighted = config.policy_loss == "reinforce"
    return policy_gradient(
        config,
        name=config.type,
        estimator=trajectory_level(
            lambda batch, rewards: advantages.leave_one_out(rewards=rewards, groups=batch.groups)
        ),
        loss=lambda tokens: _reinforce(config.ratio_cap, tokens) if weighted else _sequence_clip(config, tokens),
        to_behavior=weighted,
    )


def opd(config: OpdConfig) -> Preset:
    """The teacher's logprob less the policy's, token by token."""

    def estimate(batch: ScoredBatch, rewards: Rewards, kept: Tensor) -> Advantages:
        assert batch.teacher_logprobs is not None, "the preset asked for the teacher's logprobs"
        assert batch.proximal_logprobs is not None, "the preset asked for a pass of the policy"
        gaps = advantages.teacher(teacher_logprobs=batch.teacher_logprobs, policy_logprobs=batch.proximal_logprobs)
        kl = float(-gaps.mean()) if len(gaps) else 0.0
        return Advantages(advantages=gaps, means={"teacher_kl": kl})

    return policy_gradient(
        config,
        name=config.type,
        estimator=estimate,
        loss=lambda tokens: _reinforce(config.ratio_cap, tokens),
        passes=Passes(proximal=True, teacher=True),
        to_behavior=True,
    )


def _reinforce(cap: float | None, tokens: LossTokens) -> PolicyLoss:
    return policy_loss.reinforce(
        policy_logprobs=tokens.policy_logprobs,
        behavior_logprobs=tokens.behavior_logprobs,
        advantages=tokens.advantages,
        cap=cap,
    )


def _sequence_clip(config: GspoConfig | RlooConfig, tokens: LossTokens) -> PolicyLoss:
    return policy_loss.sequence_clip(
        policy_logprobs=tokens.policy_logprobs,
        proximal_logprobs=tokens.proximal_logprobs,
        advantages=tokens.advantages,
        sequences=tokens.sequences,
        count=len(tokens.sequence_weights),
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        product=isinstance(config, RlooConfig),
    )
