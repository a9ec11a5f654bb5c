"""Presets with the clipped ratio of each token to the proximal policy."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from learner.algorithms import advantages, policy_loss
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
from learner.algorithms.knobs import ClipKnobs
from learner.algorithms.presets.policy_gradient import TokenLoss, group_level, policy_gradient
from learner.algorithms.presets.preset import Advantages, LossTokens, Passes, Preset, ScoredBatch
from learner.algorithms.presets.rewards import Rewards


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
