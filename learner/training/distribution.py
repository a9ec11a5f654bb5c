"""Sending rank 0's batch to the other ranks, as tensors and nothing else."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from learner.training.batch import ARRAY_TYPES, FlatBatch

Scalar = TypeVar("Scalar", bound=np.generic)


def share_batch(batch: FlatBatch | None) -> FlatBatch:
    """Rank 0 gives its batch, the others None; everybody returns it. All ranks must call it."""
    if dist.get_world_size() == 1:
        assert batch is not None, "rank 0 has the batch"
        return batch
    names = [field.name for field in dataclasses.fields(FlatBatch)]
    given = {} if batch is None else {name: getattr(batch, name) for name in names}
    lengths = np.array([len(given[name]) for name in names], dtype=np.int64) if given else None
    sizes = _broadcast(lengths, len(names), np.dtype("int64")).tolist()
    return FlatBatch(
        **{name: _broadcast(given.get(name), size, ARRAY_TYPES[name]) for name, size in zip(names, sizes, strict=True)}
    )


def _broadcast(values: NDArray[Scalar] | None, size: int, dtype: np.dtype[Scalar]) -> NDArray[Scalar]:
    if size == 0:  # nothing travels: what every rank knows, and gloo need not be asked to send no bytes
        return np.empty(0, dtype=dtype)
    buffer = np.empty(size, dtype=dtype) if values is None else np.ascontiguousarray(values)
    # A view of the array's bytes: the collective writes into it.
    dist.broadcast(torch.from_numpy(buffer.view(np.uint8)), src=0)
    return buffer


def summed_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """The sum of all ranks' tensors, in place; the same on all. All ranks must call it with the same shape."""
    if dist.get_world_size() > 1:
        dist.all_reduce(values)
    return values


def any_rank(flag: bool) -> bool:
    """Whether any rank says so; the same answer on all. All ranks must call it."""
    if dist.get_world_size() == 1:
        return flag
    votes = torch.tensor([int(flag)])
    dist.all_reduce(votes, op=dist.ReduceOp.MAX)
    return bool(votes.item())
