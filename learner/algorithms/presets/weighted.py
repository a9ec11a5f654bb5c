"""Presets whose loss is not the token's clip: weighted by the ratio to the behavior policy, or over whole sequences."""

from __future__ import annotations

from functools import partial
from typing import Protocol

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
from learner.algorithms.presets.policy_gradient import TokenLoss, group_level, policy_gradient, trajectory_level
from learner.algorithms.presets.preset import Advantages, LossTokens, Passes, Preset, Rewards, ScoredBatch

GroupConfig = (
    GspoConfig | GmpoConfig | SapoConfig | CispoConfig | ToprConfig | KimiConfig | DppoConfig | ReinforceConfig
)


class _ToProximal(Protocol):
    """A loss per token by the ratio to the proximal policy."""

    def __call__(self, *, policy_logprobs: Tensor, proximal_logprobs: Tensor, advantages: Tensor) -> PolicyLoss: ...


class _ToBehavior(Protocol):
    """A loss per token by the ratio to the behavior policy."""

    def __call__(self, *, policy_logprobs: Tensor, behavior_logprobs: Tensor, advantages: Tensor) -> PolicyLoss: ...


def gspo(config: GspoConfig) -> Preset:
    """Group advantages, one clipped ratio for the trajectory."""
    return _of_group(config, lambda tokens: _sequence_clip(config, tokens))


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

    return _of_group(config, loss)


def sapo(config: SapoConfig) -> Preset:
    """Group advantages, a soft gate on each token's ratio."""
    loss = partial(
        policy_loss.sapo,
        temperature_positive=config.temperature_positive,
        temperature_negative=config.temperature_negative,
    )
    return _of_group(config, _to_proximal(loss))


def cispo(config: CispoConfig) -> Preset:
    """Group advantages, every token's weight bounded, none without gradient."""
    loss = partial(policy_loss.cispo, clip_low=config.ratio_low, clip_high=config.ratio_high)
    return _of_group(config, _to_behavior(loss), to_behavior=True)


def topr(config: ToprConfig) -> Preset:
    """Group advantages; good trajectories as examples, bad ones by a truncated ratio."""
    loss = partial(policy_loss.topr, positive_weight=config.positive_weight, negative_weight=config.negative_weight)
    return _of_group(config, _to_behavior(loss), to_behavior=True)


def kimi(config: KimiConfig) -> Preset:
    """Group advantages and a squared pull towards the proximal policy."""
    return _of_group(config, _to_proximal(partial(policy_loss.kimi, tau=config.tau)), pulls=True)


def dppo(config: DppoConfig) -> Preset:
    """Group advantages; a token's gradient stops where its probability has moved too far."""
    loss = partial(policy_loss.dppo, delta_low=config.delta_low, delta_high=config.delta_high, kappa=config.kappa)
    return _of_group(config, _to_behavior(loss), to_behavior=True, pulls=True)


def reinforce(config: ReinforceConfig) -> Preset:
    """Group advantages, weighted by a capped ratio."""
    return _of_group(config, _reinforce(config.ratio_cap), to_behavior=True)


def rloo(config: RlooConfig) -> Preset:
    """The mean of the group's others as baseline."""
    weighted = config.policy_loss == "reinforce"
    return policy_gradient(
        config,
        name=config.type,
        estimator=trajectory_level(
            lambda batch, rewards: advantages.leave_one_out(rewards=rewards, groups=batch.groups)
        ),
        loss=_reinforce(config.ratio_cap) if weighted else lambda tokens: _sequence_clip(config, tokens),
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
        loss=_reinforce(config.ratio_cap),
        passes=Passes(proximal=True, teacher=True),
        to_behavior=True,
    )


def _of_group(config: GroupConfig, loss: TokenLoss, *, to_behavior: bool = False, pulls: bool = False) -> Preset:
    return policy_gradient(
        config, name=config.type, estimator=group_level(config), loss=loss, to_behavior=to_behavior, pulls=pulls
    )


def _to_proximal(loss: _ToProximal) -> TokenLoss:
    return lambda tokens: loss(
        policy_logprobs=tokens.policy_logprobs,
        proximal_logprobs=tokens.proximal_logprobs,
        advantages=tokens.advantages,
    )


def _to_behavior(loss: _ToBehavior) -> TokenLoss:
    return lambda tokens: loss(
        policy_logprobs=tokens.policy_logprobs,
        behavior_logprobs=tokens.behavior_logprobs,
        advantages=tokens.advantages,
    )


def _reinforce(cap: float | None) -> TokenLoss:
    return _to_behavior(partial(policy_loss.reinforce, cap=cap))


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
