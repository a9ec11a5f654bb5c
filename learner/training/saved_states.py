"""DeepSpeed's checkpoint files, read without running anything that may stand in them."""

import pickle  # noqa: TID251 -- for the error of its name
import re
from pathlib import Path
from typing import Any

import torch

from learner.training.config import OptimizerType
from learner.training.deepspeed_setup import (
    CHECKPOINT_TAG,
    RECORDS,
)
from learner.training.muon import is_of_muon

_MODEL_STATES = "mp_rank_00_model_states.pt"


def refuse_foreign_pickles(directory: Path) -> None:
    """Raises ValueError if a file of a checkpoint holds anything that could run when it is loaded.

    DeepSpeed reads its files with pickle, which runs what it is told to. torch's own reader, which knows tensors and
    the classes that it is given, has to accept each of them first; the tensors themselves are not read.
    """
    for path in sorted(directory.rglob("*.pt")):
        loaded(path)


def optimizer_saved_in(directory: Path) -> OptimizerType | None:
    """The optimizer that a checkpoint is of; None if there is no checkpoint."""
    if optimizer_states(directory):
        return "adamw"  # Muon needs each matrix whole, which ZeRO leaves to none
    model = model_states(directory)
    states = loaded(model).get("optimizer") if model.is_file() else None
    if not states:
        return None
    return "muon" if any(is_of_muon(group) for group in states["param_groups"]) else "adamw"


def model_states(directory: Path) -> Path:
    """The file of rank 0 with a checkpoint's model, which may not be there; under ZeRO-3 it has no weights."""
    folder = directory / CHECKPOINT_TAG
    whole = folder / _MODEL_STATES
    return whole if whole.is_file() else folder / f"zero_pp_rank_0_{_MODEL_STATES}"


def optimizer_states(directory: Path) -> list[Path]:
    """The files of all ranks with their parts of a checkpoint's optimizer, in order; none without ZeRO."""
    return sorted((directory / CHECKPOINT_TAG).glob("*_optim_states.pt"), key=_rank)


def loaded(path: Path) -> dict[str, Any]:
    """A file of DeepSpeed's, whose tensors stay on the disk until they are read. Raises OSError, and ValueError for
    one with more in it than tensors and DeepSpeed's own records.
    """
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
