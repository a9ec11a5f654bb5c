"""Layers of a model of transformers, compiled by torch: their many small kernels become few.

Attention of packed rows stays out of it, since its shapes change with every row; what is between it is compiled once
for any number of tokens, and for all layers alike.
"""

from __future__ import annotations

import os
import shlex
import shutil
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from learner.training.ranks import last_rank
from learner.training.self_check import Compute, gap_between, slope_gap_between
from learner.training.unfit_model import UnfitModel

# With and without gradient, adapters and their absence, kinds of layers, and rows of one token make a variant each;
# beyond torch's own eight a layer would run as it is written, and only torch's log would say so.
_MOST_VARIANTS = 64
# Of the environment: torch would run the layers as they are written, and say nothing.
_TURNED_OFF_BY = ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE")


def check_compilable(model: nn.Module, path: Path, *, packed: bool, experts: bool, device: torch.device) -> None:
    """Raises UnfitModel for a model whose layers cannot be compiled, and on all ranks if one's machine cannot compile.
    All ranks must call it.
    """
    compiler = _compiler_for(device)
    lacking = last_rank(shutil.which(compiler) is None)
    turned_off = last_rank(any(os.environ.get(name) == "1" for name in _TURNED_OFF_BY))
    what = None
    if experts:
        what = f"{type(model).__name__} has experts, whose tokens change with every batch: expected a model without"
    elif not packed:
        what = f"{type(model).__name__} takes no packed rows: expected a model whose layers do"
    elif not _layers(model):
        what = f"{type(model).__name__} has no layers that transformers can compute once more: expected a decoder"
    elif lacking is not None:
        where = "here" if shutil.which(compiler) is None else f"where rank {lacking} is"
        what = f"torch compiles kernels by {compiler}, which is not {where}: expected it in PATH. Install it"
    elif turned_off is not None:
        names = " or ".join(_TURNED_OFF_BY)
        what = f"rank {turned_off} has {names} set to 1, by which torch compiles nothing: expected neither. Unset it"
    if what is not None:
        raise UnfitModel(f"{path}: learner.training.compile is true, and {what}. Or leave training.compile out.")


def _compiler_for(device: torch.device) -> str:
    """The program that torch calls: of C for Triton's launchers, of C++ for kernels of a CPU."""
    usual = next((name for name in ("gcc", "clang") if shutil.which(name)), "gcc")
    variable, usual = ("CC", usual) if device.type == "cuda" else ("CXX", "g++")
    # As builds have it, it may be several words, such as "ccache gcc".
    return next(iter(shlex.split(os.environ.get(variable, ""))), usual)


def compile_layers(model: nn.Module) -> None:
    """Has torch compile each layer of a model at its first call, whose parameters keep their names."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MOST_VARIANTS)
    for layer in _layers(model):
        layer.compile(dynamic=True)


def check_compiled(model: nn.Module, path: Path, *, compute: Compute, allowed: float) -> None:
    """Raises UnfitModel if compiled layers give other numbers than the same layers as they are written, or other
    gradients. `compute` runs the model; `allowed` bounds the numbers' gap; all ranks must call it.
    """
    # The gradient that reaches the first layer has gone through all others.
    first = [parameter for parameter in _layers(model)[0].parameters() if parameter.requires_grad]
    gaps = {"numbers": gap_between(model, compute, _as_written, allowed=allowed)}
    if first:
        gaps["gradients"] = slope_gap_between(model, compute, _as_written, parameters=first)
    for what, gap in gaps.items():
        if not gap.passes:
            raise UnfitModel(
                f"{path}: {type(model).__name__} computes other {what} when it is compiled: a check found "
                f"{gap.found:.2g} between them, expected at most {gap.allowed:.2g}. Leave learner.training.compile out."
            )


def _as_written() -> AbstractContextManager[object]:
    stance: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return stance


def _layers(model: nn.Module) -> list[GradientCheckpointingLayer]:
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
