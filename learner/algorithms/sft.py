"""The `sft` preset."""

from __future__ import annotations

from learner.algorithms.aggregation import token_weights
from learner.algorithms.config import SftConfig
from learner.algorithms.policy_loss import negative_log_likelihood
from learner.algorithms.preset import Preset, TokenLosses


def sft(config: SftConfig) -> Preset:
    """Negative log-likelihood of the tokens in the loss mask."""
    return Preset(
        name=config.type,
        token_losses=lambda tokens: TokenLosses(losses=negative_log_likelihood(policy_logprobs=tokens.policy_logprobs)),
        token_weights=lambda lengths: token_weights(
            trained_lengths=lengths, aggregation=config.aggregation, constant_length=config.constant_length
        ),
        advantages=None,
        samples_policy=False,
        needs_reference=False,
    )
