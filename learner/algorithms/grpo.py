"""The `grpo` preset."""

from __future__ import annotations

from functools import partial

from torch import int64

from learner.algorithms import advantages, corrections, kl, policy_loss
from learner.algorithms.aggregation import token_weights
from learner.algorithms.config import GrpoConfig
from learner.algorithms.preset import LossTokens, Preset, TokenLosses


def grpo(config: GrpoConfig) -> Preset:
    """Group advantages, the decoupled clip, truncated importance weights, an optional k3 penalty."""
    return Preset(
        name=config.type,
        token_losses=partial(_token_losses, config),
        token_weights=lambda lengths: token_weights(
            trained_lengths=lengths, aggregation=config.aggregation, constant_length=config.constant_length
        ),
        advantages=lambda rewards: advantages.group(
            rewards=rewards, groups=rewards.new_zeros(len(rewards), dtype=int64), scale=config.advantage_scale
        ),
        samples_policy=True,
        needs_reference=config.kl_coefficient > 0,
    )


def _token_losses(config: GrpoConfig, tokens: LossTokens) -> TokenLosses:
    clipped = policy_loss.clip(
        policy_logprobs=tokens.policy_logprobs,
        proximal_logprobs=tokens.proximal_logprobs,
        advantages=tokens.advantages,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        dual_clip=config.dual_clip,
    )
    losses = clipped.losses
    corrected = None
    if config.correction == "truncate":
        weight = corrections.truncate(
            proximal_logprobs=tokens.proximal_logprobs,
            behavior_logprobs=tokens.behavior_logprobs,
            cap=config.correction_cap,
        )
        losses = losses * weight
        corrected = weight >= config.correction_cap
    if config.kl_coefficient > 0:
        assert tokens.reference_logprobs is not None, "the preset asked for a reference pass"
        penalty = kl.k3(policy_logprobs=tokens.policy_logprobs, reference_logprobs=tokens.reference_logprobs)
        losses = losses + config.kl_coefficient * penalty
    return TokenLosses(losses=losses, clipped=clipped.clipped, corrected=corrected)
