"""Weights put together at the rank that sends them, and nowhere else.

    in parts (ZeRO-3)   each rank's part ── gathered at the owner ──▶ whole there; the others hold nothing more
    whole on each rank  the owner's own; what the optimizer alone has in float32 (ZeRO 1 and 2) is whole on all

So of a model in parts each rank receives what it sends to generators, and sends its parts of the rest, once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from learner.training.adapters import MergedWeight
from learner.training.policy import WeightPart, WholeModel, WholeWeight, weight_groups
from learner.training.shards import is_sharded, whole_shape, whole_size


class PartsModel(WholeModel, Protocol):
    """A model whose weights may be in parts, one on each rank."""

    def own_master(self, parameter: nn.Parameter) -> Tensor:
        """This rank's part of the master weight of a parameter in parts, flat; of an untrained one, of itself."""


@dataclass(frozen=True)
class _WantedParameter:
    """A parameter that a weight is made of, by the optimizer's own numbers or the model's, and the type to gather."""

    parameter: nn.Parameter
    master: bool
    dtype: torch.dtype


def _wanted(weight: MergedWeight, dtype: torch.dtype) -> Sequence[_WantedParameter]:
    base = weight.parameter
    if weight.adapter is None:
        # Rounded before it travels: the same numbers, in fewer bytes.
        return [_WantedParameter(base, master=dtype != base.dtype, dtype=dtype)]
    factors = [_WantedParameter(factor, master=True, dtype=torch.float32) for factor in weight.parameters[1:]]
    return [_WantedParameter(base, master=False, dtype=base.dtype), *factors]


def owned_weights(
    engine: PartsModel, owners: Mapping[str, int], *, dtype: torch.dtype, part: WeightPart
) -> Iterator[WholeWeight]:
    """This rank's weights by `owners`, as `whole_weights` has them, `merged` or of the `base`. All ranks must iterate,
    and to the end.
    """
    rank = dist.get_rank()
    for group in weight_groups(engine.model, part):
        plain = [replace(weight, adapter=None) if part == "base" else weight for weight in group]
        for owner in range(dist.get_world_size()):
            weights = [weight for weight in plain if owners[weight.name] == owner]
            wanted = [each for weight in weights for each in _wanted(weight, dtype)]
            values = iter(_put_together(engine, wanted, owner=owner))
            for weight in weights if rank == owner else ():
                base, *factors = (next(values) for _ in _wanted(weight, dtype))
                adapter = weight.adapter
                if adapter is not None:
                    adapter = replace(adapter, down=factors[0], up=factors[1])
                yield WholeWeight(name=weight.name, base=base, adapter=adapter)


def _put_together(engine: PartsModel, wanted: Sequence[_WantedParameter], *, owner: int) -> Sequence[Tensor]:
    """The values of parameters, whole at the owner; what other ranks get is of no use. All ranks must call it."""
    values: dict[int, Tensor] = {}
    parts: dict[tuple[torch.dtype, torch.device], dict[int, Tensor]] = {}
    for place, each in enumerate(wanted):
        if is_sharded(each.parameter):
            part = engine.own_master(each.parameter) if each.master else _stored_part(each.parameter)
            padded = _padded(part.to(each.dtype), each.parameter)
            parts.setdefault((padded.dtype, padded.device), {})[place] = padded
        else:
            values[place] = engine.master_weight(each.parameter) if each.master else each.parameter.detach()
    for alike in parts.values():
        gathered = _gathered(torch.cat(list(alike.values())), owner=owner)
        start = 0
        for place, part in alike.items():
            parameter = wanted[place].parameter
            found = [flat[start : start + part.numel()] for flat in gathered]
            start += part.numel()
            if found:
                values[place] = torch.cat(found)[: whole_size(parameter)].view(whole_shape(parameter))
    return [values[place] for place in range(len(wanted)) if place in values]


def _stored_part(parameter: nn.Parameter) -> Tensor:
    part = parameter.ds_tensor  # type: ignore[attr-defined]
    assert isinstance(part, Tensor), "DeepSpeed's part of a parameter is a tensor"
    return part.detach().reshape(-1)


def _padded(part: Tensor, parameter: nn.Parameter) -> Tensor:
    """The part in the length that all ranks' parts have."""
    length = int(parameter.ds_tensor.ds_numel)  # type: ignore[attr-defined]
    return nn.functional.pad(part[:length], (0, length - min(length, part.numel())))


def _gathered(flat: Tensor, *, owner: int) -> Sequence[Tensor]:
    """All ranks' tensors in their order at the owner; nothing elsewhere."""
    if dist.get_rank() != owner:
        dist.gather(flat, dst=owner)
        return []
    found = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.gather(flat, found, dst=owner)
    return found
