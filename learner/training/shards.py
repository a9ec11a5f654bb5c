"""Parameters of which each rank has a part alone, as ZeRO-3 leaves them outside of a pass: their whole shape, and what
of a whole value is this rank's.

    whole, flat    0 1 2 3 4 5 6         of 2 ranks, each has 4: the last one's padding is no number of the model
    rank 0         0 1 2 3
    rank 1         4 5 6 -
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def whole_shape(parameter: Tensor) -> torch.Size:
    """The shape of a parameter when it is whole."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


def whole_size(parameter: Tensor) -> int:
    """The number of elements of a parameter when it is whole."""
    return whole_shape(parameter).numel()


def is_sharded(parameter: Tensor) -> bool:
    """True if each rank has a part of the parameter."""
    return hasattr(parameter, "ds_tensor")


def own_part(parameter: nn.Parameter) -> Tensor:
    """The numbers of a parameter that this rank keeps, in their memory: flat and without padding if it is sharded,
    otherwise all of them.
    """
    if not is_sharded(parameter):
        return parameter.detach()
    shard = parameter.ds_tensor  # type: ignore[attr-defined]
    assert isinstance(shard, Tensor), "DeepSpeed's part of a parameter is a tensor"
    start, length = place_of(parameter)
    assert start + length <= whole_size(parameter), "a part lies within the whole"
    return shard.detach()[:length]


def part_of(value: Tensor, parameter: nn.Parameter) -> Tensor:
    """The part of `value`, which is as the whole parameter, that `own_part` of the parameter is to hold."""
    if not is_sharded(parameter):
        return value
    start, length = place_of(parameter)
    return value.reshape(-1)[start : start + length]


def place_of(parameter: nn.Parameter) -> tuple[int, int]:
    """The beginning of what this rank has of a parameter, and its length without padding: of one that is not sharded,
    all.
    """
    whole = whole_size(parameter)
    if not is_sharded(parameter):
        return 0, whole
    each, rank = parameter.ds_tensor.ds_numel, parameter.ds_zero_partition_rank  # type: ignore[attr-defined]
    start = min(int(rank) * int(each), whole)
    return start, min(int(each), whole - start)
