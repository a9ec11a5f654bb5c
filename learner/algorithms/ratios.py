"""Ratios of probabilities from logprobs, finite however impossible a token is, and means of them over sequences.

Tensors of ratios have any shape; for sequences they hold N tokens of K sequences, without padding, in any order.
"""

from __future__ import annotations

import torch
from torch import Tensor

# exp(20) is far above every cap in use, and keeps a wild logprob from becoming infinity times zero.
LOG_RATIO_BOUND = 20.0
# Below the sum of any trajectory's logprobs, and far from where squares overflow in float32.
LOGPROB_FLOOR = -1e8


def finite(logprobs: Tensor) -> Tensor:
    """`logprobs`, not below -1e8. A token that the model calls impossible (-inf) gets no gradient."""
    return logprobs.clamp(min=LOGPROB_FLOOR)


def log_gap(*, numerator: Tensor, denominator: Tensor) -> Tensor:
    """numerator - denominator in nats, with the gradient of `numerator` only. Two impossible tokens are 0 apart."""
    return finite(numerator) - finite(denominator.detach())


def bounded(gap: Tensor) -> Tensor:
    """A log ratio within 20 either way. Beyond, no gradient flows."""
    return gap.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def ratio(*, numerator: Tensor, denominator: Tensor) -> Tensor:
    """exp(numerator - denominator), the exponent within 20 either way, with the gradient of `numerator` only."""
    return torch.exp(bounded(log_gap(numerator=numerator, denominator=denominator)))


def sequence_sums(*, values: Tensor, sequences: Tensor, count: int) -> Tensor:
    """The sum of each sequence's `values` [N], as [count]; `sequences` [N] int64 says whose each token is.

    A sequence without tokens has 0. Gradients flow to `values`.
    """
    return torch.zeros(count, dtype=values.dtype, device=values.device).index_add(0, sequences, values)


def sequence_lengths(*, sequences: Tensor, count: int) -> Tensor:
    """How many tokens each sequence has, [count] int64."""
    return sequence_sums(values=torch.ones_like(sequences), sequences=sequences, count=count)


def sequence_means(*, values: Tensor, sequences: Tensor, count: int) -> Tensor:
    """The mean of each sequence's `values` [N], as [count]. A sequence without tokens has 0, not NaN."""
    lengths = sequence_lengths(sequences=sequences, count=count).clamp(min=1)
    return sequence_sums(values=values, sequences=sequences, count=count) / lengths
