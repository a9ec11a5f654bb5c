"""Sums along trajectories that lie end to end: M entries, those of one trajectory next to each other and in order.

`owners` [M] int64 says which trajectory an entry belongs to. Entries are trained tokens, or turns; what the environment
said is not among them, so the entry after a completion's last token is the first token of the next completion.
"""

from __future__ import annotations

import torch
from torch import Tensor


def has_next(owners: Tensor) -> Tensor:
    """Bool [M]: whether the next entry is of the same trajectory."""
    follows = torch.zeros_like(owners, dtype=torch.bool)
    follows[:-1] = owners[1:] == owners[:-1]
    return follows


def at_end(values: Tensor, *, owners: Tensor) -> Tensor:
    """[M]: the value of its trajectory at a trajectory's last entry, 0 elsewhere. `values` is [S], indexed by owner."""
    return torch.where(has_next(owners), 0.0, values[owners])


def discounted_sums(values: Tensor, *, owners: Tensor, discount: float | Tensor) -> Tensor:
    """x_t = values_t + discount_t x_{t+1} along each trajectory, [M]; `discount` is a number or [M].

    By doubling: after round k every x_t sums 2^k entries, so that a trajectory of L entries takes log2(L) rounds over
    all entries at once, instead of L steps.
    """
    sums = values.clone()
    reach_weights = has_next(owners).to(values.dtype) * discount
    reach = 1
    while reach < len(sums) and bool(reach_weights.any()):
        ahead = torch.zeros_like(sums)
        ahead[:-reach] = sums[reach:]
        sums = sums + reach_weights * ahead
        weights_ahead = torch.zeros_like(reach_weights)
        weights_ahead[:-reach] = reach_weights[reach:]
        reach_weights = reach_weights * weights_ahead
        reach *= 2
    return sums
