"""Layers of a model of transformers, compiled by torch: their many small kernels become few.

Attention of packed rows stays out of it, since its shapes change with every row; what is between it is compiled once
for any number of tokens, and for all layers alike.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from learner.training.packing import Microbatch
from learner.training.self_check import Compute, gap_between

_COMPILERS = ("cc", "gcc", "clang")


def check_compilable(model: nn.Module, path: Path, *, packed: bool, experts: bool) -> None:
    """Raises ValueError for a model, or a machine, whose layers cannot be compiled."""
    what = None
    if experts:
        what = f"{type(model).__name__} has experts, whose tokens change with every batch: expected a model without"
    elif not packed:
        what = f"{type(model).__name__} takes no packed rows: expected a model whose layers do"
    elif not _layers(model):
        what = f"{type(model).__name__} has no layers that transformers can compute once more: expected a decoder"
    elif not any(map(shutil.which, _COMPILERS)):
        what = "torch compiles kernels with a C compiler, and none is here: expected gcc. Install it"
    if what is not None:
        raise ValueError(f"{path}: learner.training.compile is true, and {what}. Or leave training.compile out.")


def compile_layers(model: nn.Module) -> None:
    """Has torch compile each layer of a model at its first call, whose parameters keep their names."""
    for layer in _layers(model):
        layer.compile(dynamic=True)


def check_compiled(model: nn.Module, path: Path, *, compute: Compute) -> None:
    """Raises ValueError if compiled layers give other numbers than the same layers as they are written. `compute` runs
    the model; all ranks must call it.
    """

    def as_written(microbatch: Microbatch) -> Tensor:
        with torch.compiler.set_stance("force_eager"):
            return compute(microbatch)

    gap = gap_between(model, compute, as_written)
    if not gap.passes:
        raise ValueError(
            f"{path}: {type(model).__name__} computes other numbers when it is compiled: a check found {gap.found:.2g} "
            f"between them, expected at most {gap.allowed:.2g}. Leave learner.training.compile out."
        )


def _layers(model: nn.Module) -> list[GradientCheckpointingLayer]:
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
