"""DeepSpeed's checkpoint files, read without running anything that may stand in them, and as whole weights."""

import contextlib
import io
import pickle  # noqa: TID251 -- for the error of its name
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from learner.training.config import OptimizerType
from learner.training.deepspeed_setup import (
    CHECKPOINT_TAG,
    RECORDS,
    get_fp32_state_dict_from_zero_checkpoint,
    quiet_deepspeed,
)
from learner.training.muon import is_of_muon

_MODEL_STATES = "mp_rank_00_model_states.pt"


def saved_weights(directory: Path) -> dict[str, Tensor]:
    """Weights that `save` wrote, by the names of the parameters, on the CPU: in float32 what the optimizer has,
    put together of all ranks' parts. It needs neither the ranks nor a process group.

    Raises FileNotFoundError for a folder that is none, OSError, and ValueError where the part of a rank is missing, or
    for files with more in them than tensors and DeepSpeed's own records.
    """
    folder = directory / CHECKPOINT_TAG
    if not folder.is_dir():
        raise FileNotFoundError(f"no DeepSpeed checkpoint in {directory}: expected {folder}")
    quiet_deepspeed()
    refuse_foreign_pickles(directory)
    model = folder / _MODEL_STATES
    if parts := sorted(folder.glob("bf16_zero_*_optim_states.pt"), key=_rank):
        # ZeRO-1 in bfloat16, which DeepSpeed's own reader does not know.
        return _put_together([_loaded(path) for path in parts], shapes=_loaded(model)["param_shapes"])
    if any(folder.glob("*_optim_states.pt")):  # ZeRO's otherwise, of any stage
        with contextlib.redirect_stdout(io.StringIO()):
            found: dict[str, Tensor] = get_fp32_state_dict_from_zero_checkpoint(str(directory), tag=CHECKPOINT_TAG)
        return found
    return dict(_loaded(model)["module"])


def _put_together(parts: Sequence[dict[str, Any]], shapes: Sequence[Mapping[str, torch.Size]]) -> dict[str, Tensor]:
    """The float32 weights of which each rank has a piece of one flat vector for each group of parameters."""
    states = [part["optimizer_state_dict"] for part in parts]
    expected = max(states[0]["partition_count"])
    if len(states) != expected:
        raise ValueError(f"the parts of {len(states)} ranks are there, expected {expected}")
    found: dict[str, Tensor] = {}
    for group, named in enumerate(shapes):
        for name, shape in named.items():
            pieces = [
                state["single_partition_of_fp32_groups"][group].flatten().narrow(0, place.start, place.numel)
                for state in states
                if (place := state["param_slice_mappings"][group].get(name)) is not None
            ]
            found[name] = torch.cat(pieces).view(shape)
    return found


def refuse_foreign_pickles(directory: Path) -> None:
    """Raises ValueError if a file of a checkpoint holds anything that could run when it is loaded.

    DeepSpeed reads its files with pickle, which runs what it is told to. torch's own reader, which knows tensors and
    the classes that it is given, has to accept each of them first; the tensors themselves are not read.
    """
    for path in sorted(directory.rglob("*.pt")):
        _loaded(path)


def optimizer_saved_in(directory: Path) -> OptimizerType | None:
    """The optimizer that a checkpoint is of; None if there is none in it that is whole, as of ZeRO."""
    model = directory / CHECKPOINT_TAG / _MODEL_STATES
    states = _loaded(model).get("optimizer") if model.is_file() else None
    if not states:
        return None
    return "muon" if any(is_of_muon(group) for group in states["param_groups"]) else "adamw"


def _loaded(path: Path) -> dict[str, Any]:
    try:
        with torch.serialization.safe_globals(list(RECORDS)):
            states: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} was not loaded: it holds more than tensors and DeepSpeed's own records, which could be code "
            f"({_first_sentence(error)}). Expected what this learner wrote: restore the file, or resume from another "
            "checkpoint"
        ) from error
    return states


def _first_sentence(error: Exception) -> str:
    """Of torch's advice, which goes on with how to let everything in."""
    found = re.search(r"(Unsupported [^.]*|GLOBAL \S+)", str(error))
    return found[1] if found else type(error).__name__


def _rank(path: Path) -> int:
    found = re.search(r"_pp_rank_(\d+)_", path.name)
    return int(found[1]) if found else 0
