"""Sending rank 0's batch to the other ranks, as tensors and nothing else."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from learner.training.batch import FlatBatch

Scalar = TypeVar("Scalar", bound=np.generic)


def share_batch(batch: FlatBatch | None) -> FlatBatch:
    """Rank 0 gives its batch, the others None; everybody returns it. All ranks must call it."""
    if dist.get_world_size() == 1:
        assert batch is not None, "rank 0 has the batch"
        return batch
    sizes = _broadcast(
        None if batch is None else np.array([len(batch.lengths), len(batch.token_ids)]), 2, np.dtype("int64")
    )
    sequences, tokens = sizes.tolist()
    return FlatBatch(
        lengths=_broadcast(None if batch is None else batch.lengths, sequences, np.dtype("int64")),
        mixed_versions=_broadcast(None if batch is None else batch.mixed_versions, sequences, np.dtype("bool")),
        token_ids=_broadcast(None if batch is None else batch.token_ids, tokens, np.dtype("int32")),
        loss_mask=_broadcast(None if batch is None else batch.loss_mask, tokens, np.dtype("bool")),
        behavior_logprobs=_broadcast(None if batch is None else batch.behavior_logprobs, tokens, np.dtype("float32")),
        advantages=_broadcast(None if batch is None else batch.advantages, tokens, np.dtype("float32")),
        lags=_broadcast(None if batch is None else batch.lags, tokens, np.dtype("int32")),
    )


def _broadcast(values: NDArray[Scalar] | None, size: int, dtype: np.dtype[Scalar]) -> NDArray[Scalar]:
    buffer = np.empty(size, dtype=dtype) if values is None else np.ascontiguousarray(values)
    # A view of the array's bytes: the collective writes into it.
    dist.broadcast(torch.from_numpy(buffer.view(np.uint8)), src=0)
    return buffer


def any_rank(flag: bool) -> bool:
    """Whether any rank says so; the same answer on all. All ranks must call it."""
    if dist.get_world_size() == 1:
        return flag
    votes = torch.tensor([int(flag)])
    dist.all_reduce(votes, op=dist.ReduceOp.MAX)
    return bool(votes.item())
