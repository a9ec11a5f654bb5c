"""From values of tokens to values of sequences. N tokens of K sequences, without padding, in any order."""

from __future__ import annotations

import torch
from torch import Tensor


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
