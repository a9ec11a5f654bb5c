"""Sending rank 0's batch to the other ranks, as tensors and nothing else."""

from __future__ import annotations

from typing import TypeVar

import dataclasses

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
    given = [None] * len(names) if batch is None else [getattr(batch, name) for name in names]
    sizes = _broadcast(None if batch is None else np.array([len(array) for array in given]), len(names), np.dtype("i8"))
    arrays = (
        _broadcast(array, size, ARRAY_TYPES[name])
        for name, array, size in zip(names, given, sizes.tolist(), strict=True)
    )
    return FlatBatch(*arrays)


def _broadcast(values: NDArray[Scalar] | None, size: int, dtype: np.dtype[Scalar]) -> NDArray[Scalar]:
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
