"""Shared parts of the presets of likelihood: their loss, and the weights of its tokens."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from learner.algorithms.knobs import AggregationKnobs
from learner.algorithms.policy_loss import negative_log_likelihood, token_weights
from learner.algorithms.preset import Loss, LossTokens


def likelihood(tokens: LossTokens) -> Loss:
    """The weighted negative log-likelihood of a microbatch's tokens."""
    return Loss(total=(tokens.weights * negative_log_likelihood(policy_logprobs=tokens.policy_logprobs)).sum())


def weights(config: AggregationKnobs) -> Callable[[NDArray[np.int64]], NDArray[np.float64]]:
    """The aggregation that the settings name, as a preset's `weights`."""
    return lambda lengths: token_weights(
        trained_lengths=lengths, aggregation=config.aggregation, constant_length=config.constant_length
    )
