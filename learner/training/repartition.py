"""Taking up a checkpoint that other ranks wrote: another number of them, or of another ZeRO stage.

    written by 2    a weight, flat    0 1 2 3 | 4 5 6 .         each has a piece of each weight, some of them padding
    read by 3                         0 1 2 | 3 4 5 | 6 . .     each copies what lies in its own pieces

They are the same numbers, bit for bit: masters in float32, AdamW's two means, the count of updates. A rank makes room
for its own new part alone, one weight is copied after the other, and nothing is written.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from learner.training.deepspeed_setup import deepspeed
from learner.training.saved_parts import (
    FLAT,
    FLAT_STATE,
    MASTERS,
    SHARDED,
    SHARDED_STATE,
    Layout,
    SavedParts,
    WeightPiece,
    check_weights,
    read_parts,
)
from learner.training.saved_states import loaded, model_states
from learner.training.shards import is_sharded, place_of, whole_shape


def layout_now(engine: deepspeed.DeepSpeedEngine) -> Layout:
    """The layout of what `engine` writes."""
    ranks, bfloat16 = torch.distributed.get_world_size(), engine.bfloat16_enabled()
    if isinstance(engine.optimizer, torch.optim.Optimizer):
        return Layout("whole")
    if hasattr(engine.optimizer, "fp32_partitioned_groups_flat"):
        return Layout("sharded", ranks, bfloat16)
    return Layout("masters" if hasattr(engine.optimizer, "bf16_groups") else "flat", ranks, bfloat16)


def take_up(engine: deepspeed.DeepSpeedEngine, directory: Path) -> None:
    """Has `engine`, whose optimizer is AdamW, go on from a checkpoint of AdamW, whatever ranks, ZeRO stage and type of
    weights wrote it. What is not trained stays as it is, but for the model's buffers. All ranks must call it.

    Raises OtherWeights for a checkpoint of others than are trained, and ValueError where a part is missing.
    """
    trained = {name: each for name, each in engine.module.named_parameters() if each.requires_grad}
    check_weights(directory, {name: whole_shape(each) for name, each in trained.items()})
    saved, optimizer = read_parts(directory, weights=list(trained)), engine.optimizer
    sharded = any(map(is_sharded, trained.values()))
    if sharded:
        optimizer.checkpoint_event_prologue()
    with torch.no_grad():
        _take_buffers(engine.module, directory)
        for name, parameter in () if sharded else trained.items():
            parameter.copy_(saved.master_of(name, size=parameter.numel()).view_as(parameter))
    if isinstance(optimizer, torch.optim.Optimizer):
        optimizer.load_state_dict({**optimizer.state_dict(), "state": dict(_whole_states(trained, saved))})
    else:
        state = _state_now(engine, saved)
        # It looks for its own among those of all ranks.
        with contextlib.redirect_stdout(io.StringIO()):
            optimizer.load_state_dict(
                state_dict_list=[state] * torch.distributed.get_world_size(), load_from_fp32_weights=True
            )
    if sharded:
        optimizer.checkpoint_event_epilogue()


def _take_buffers(model: nn.Module, directory: Path) -> None:
    written = loaded(model_states(directory))
    buffers = dict(model.named_buffers())
    for name in written["buffer_names"]:
        buffers[name].copy_(written["module"][name])


def _whole_states(trained: Mapping[str, nn.Parameter], saved: SavedParts) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, (name, parameter) in enumerate(trained.items()):
        size = parameter.numel()
        vectors = saved.vectors_of([WeightPiece(name, 0, 0, 0, size)], size=size, beside=name)
        means = {kind: vector.view_as(parameter) for kind, vector in vectors.items() if kind != MASTERS}
        if others := saved.others_of(name):
            yield number, {**others, **means}


def _state_now(engine: deepspeed.DeepSpeedEngine, saved: SavedParts) -> dict[str, Any]:
    """State of the optimizer as this rank would have written it, had the ranks of now made the checkpoint."""
    now: dict[str, Any] = engine.optimizer.state_dict()
    masters, state = (SHARDED, SHARDED_STATE) if SHARDED in now else (FLAT, FLAT_STATE)
    vectors: list[Tensor] = []
    states: dict[int, dict[str, Any]] = {}
    for group, (weights, size, pieces) in enumerate(_own_pieces(engine)):
        found = saved.vectors_of(pieces, size=size, beside=weights[0])
        vectors.append(found.pop(MASTERS))
        if others := saved.others_of(weights[0]):
            states[group] = {**others, **found}
    return {**now, masters: vectors, state: {**now[state], "state": states}}


def _own_pieces(engine: deepspeed.DeepSpeedEngine) -> Iterator[tuple[list[str], int, list[WeightPiece]]]:
    """For each group of weights as this rank has it: all their names, the size of its flat vector, and its pieces."""
    optimizer, names = engine.optimizer, engine.param_names
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        groups, vectors = optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat
    elif hasattr(optimizer, "bf16_groups"):
        groups, vectors = optimizer.bf16_groups, optimizer.fp32_groups_flat_partition
    else:
        groups, vectors = optimizer.bit16_groups, optimizer.single_partition_of_fp32_groups
    for number, (group, vector) in enumerate(zip(groups, vectors, strict=True)):
        yield [names[each] for each in group], vector.numel(), list(_pieces_now(group, names, number=number))


def _pieces_now(
    group: Sequence[nn.Parameter], names: Mapping[nn.Parameter, str], *, number: int
) -> Iterator[WeightPiece]:
    place = 0
    for parameter in group:
        if is_sharded(parameter):
            start, length = place_of(parameter)
            yield WeightPiece(names[parameter], number, place, start, length)
            place += parameter.partition_numel()  # type: ignore[attr-defined]
        elif (mapping := parameter._hp_mapping) is not None:  # type: ignore[attr-defined]
            within, here = mapping.lp_fragment_address, mapping.hp_fragment_address
            yield WeightPiece(names[parameter], number, here.start, within.start, here.numel)
