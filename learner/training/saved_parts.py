"""Weights and optimizer in a checkpoint, by weight, however they were cut among the ranks that wrote it.

    flat        weights end to end, one stretch of all of them for each rank       ZeRO 1 and 2
    sharded     each weight by itself, a piece of it for each rank                 ZeRO 3

The files are mapped into memory: what nobody asks for is not read.
"""

from __future__ import annotations

import contextlib
import copy
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from learner.training.deepspeed_setup import (
    CHECKPOINT_TAG,
    get_fp32_state_dict_from_zero_checkpoint,
    quiet_deepspeed,
)
from learner.training.saved_states import loaded, model_states, optimizer_states, refuse_foreign_pickles
from services.process import WrongSettings

FLAT, FLAT_STATE = "single_partition_of_fp32_groups", "base_optimizer_state"
"""Names in what ZeRO's stages 1 and 2 write, and the optimizer of bfloat16."""
SHARDED, SHARDED_STATE = "fp32_flat_groups", "optimizer_state_dict"
"""Names in what ZeRO-3 writes."""
_STAGE = "zero_stage"
_BFLOAT16 = "bf16_"
"""Beginning of the names of files whose weights were in bfloat16."""
MASTERS = "masters"


class OtherWeights(WrongSettings, ValueError):
    """A checkpoint is of other weights than are trained."""


@dataclass(frozen=True)
class WeightPiece:
    """`length` numbers of a weight, from number `start` of it when it is flat. They lie in the flat vector that a rank
    has of a group of weights, from number `place` on.
    """

    weight: str
    group: int
    place: int
    start: int
    length: int


@dataclass(frozen=True)
class SavedPart:
    """A rank's part: its `pieces`; for each group its flat vectors [E] by what they are, masters and means; and what
    is of no single number, such as the count of updates.
    """

    pieces: Sequence[WeightPiece]
    vectors: Sequence[Mapping[str, Tensor]]
    others: Sequence[Mapping[str, Any]]


class SavedParts:
    """The parts of all ranks that wrote a checkpoint, by weight."""

    def __init__(self, parts: Sequence[SavedPart]) -> None:
        self._pieces: dict[str, list[tuple[SavedPart, WeightPiece]]] = {}
        for part in parts:
            for piece in part.pieces:
                self._pieces.setdefault(piece.weight, []).append((part, piece))

    def others_of(self, weight: str) -> dict[str, Any]:
        """Copy of the state of a weight's group that is of no single number; empty if it was never updated."""
        part, piece = self._found(weight)[0]
        return copy.deepcopy(dict(part.others[piece.group]))  # an optimizer counts up in place

    def vectors_of(self, pieces: Sequence[WeightPiece], *, size: int, beside: str) -> dict[str, Tensor]:
        """Flat vectors [size] with the numbers of these pieces, which are of one group; 0 where none lies. They are
        those that the group of the weight `beside` has.

        Raises ValueError for a weight that is not there, or that lacks numbers.
        """
        part, piece = self._found(beside)[0]
        kinds = part.vectors[piece.group]
        found = {kind: torch.zeros(size, dtype=vector.dtype) for kind, vector in kinds.items()}
        for wanted in pieces:
            for kind, vector in found.items():
                self._copy(kind, wanted, vector)
        return found

    def master_of(self, weight: str, *, size: int) -> Tensor:
        """A weight of so many numbers in float32, whole and flat. Raises ValueError as `vectors_of` does."""
        found = torch.zeros(size)
        self._copy(MASTERS, WeightPiece(weight, 0, 0, 0, size), found)
        return found

    def _copy(self, kind: str, wanted: WeightPiece, vector: Tensor) -> None:
        copied = 0
        for part, piece in self._found(wanted.weight):
            start = max(piece.start, wanted.start)
            length = min(piece.start + piece.length, wanted.start + wanted.length) - start
            if length > 0:
                source = part.vectors[piece.group][kind].narrow(0, piece.place + start - piece.start, length)
                vector.narrow(0, wanted.place + start - wanted.start, length).copy_(source)
                copied += length
        if copied != wanted.length:
            raise ValueError(
                f"the checkpoint has {copied} of {wanted.length} numbers of {wanted.weight}: the parts of its ranks do "
                "not fit together. Restore its files, or resume from another checkpoint"
            )

    def _found(self, weight: str) -> Sequence[tuple[SavedPart, WeightPiece]]:
        found = self._pieces.get(weight)
        if found is None:
            raise ValueError(f"the checkpoint has no weight {weight}: restore its files, or resume from another one")
        return found


@dataclass(frozen=True)
class Layout:
    """The cut of a checkpoint's optimizer: none, through weights end to end, or through each weight by itself; and the
    number of its parts. DeepSpeed itself reads a checkpoint whose layout is that of the engine.
    """

    cut: Literal["whole", "flat", "masters", "sharded"]
    ranks: int = 1
    bfloat16: bool = False


def layout_of(directory: Path) -> Layout | None:
    """The layout of a checkpoint; None if there is none."""
    path, files = model_states(directory), optimizer_states(directory)
    if not path.is_file():
        return None
    if not files:
        return Layout("whole")
    state, ranks = loaded(files[0])["optimizer_state_dict"], int(loaded(path)["dp_world_size"])
    cut: Literal["flat", "masters", "sharded"] = "flat" if _STAGE in state else "masters"
    return Layout("sharded" if SHARDED in state else cut, ranks, files[0].name.startswith(_BFLOAT16))


def check_weights(directory: Path, trained: Mapping[str, torch.Size]) -> None:
    """Raises OtherWeights unless a checkpoint is of just these weights, in these shapes."""
    first = loaded(model_states(directory))
    if states := first.get("optimizer"):
        written = {name: value.shape for name, value in first["module"].items() if name in trained}
        count = sum(len(group["params"]) for group in states["param_groups"])
    else:
        written = {name: shape for group in first["param_shapes"] for name, shape in group.items()}
        count = len(written)
    other = next((name for name in {**trained, **written} if trained.get(name) != written.get(name)), None)
    if other is not None or count != len(trained):
        what = f"{other}, {_shape(written, other)} there and {_shape(trained, other)} now" if other else "their number"
        raise OtherWeights(
            f"{directory} is of {count} trained weights, and {len(trained)} are trained now; what differs is {what}. "
            "It is of another model, or of other adapters: resume with model and training.lora of the run, or begin "
            "a new run from the exported model"
        )


def _shape(shapes: Mapping[str, torch.Size], name: str) -> str:
    return " x ".join(map(str, shapes[name])) if name in shapes else "none"


def read_parts(directory: Path, *, weights: Sequence[str]) -> SavedParts:
    """The parts that a checkpoint of AdamW holds, mapped into memory. `weights` are all that are trained, in order.

    Raises ValueError if a rank's part is missing.
    """
    files, first = optimizer_states(directory), loaded(model_states(directory))
    if first.get("optimizer"):
        return SavedParts([_whole_part(first, weights)])
    expected = int(first["dp_world_size"])
    if len(files) != expected:
        raise ValueError(
            f"{directory / CHECKPOINT_TAG} holds the optimizer's parts of {len(files)} ranks, and {expected} wrote it: "
            "restore the missing files, or resume from another checkpoint"
        )
    written = [loaded(path)["optimizer_state_dict"] for path in files]
    if SHARDED in written[0]:
        return SavedParts(
            [
                _part(each[SHARDED], each[SHARDED_STATE], sharded_pieces(first["param_shapes"], rank=rank, of=expected))
                for rank, each in enumerate(written)
            ]
        )
    starts: dict[str, int] = {}
    return SavedParts([_part(each[FLAT], each[FLAT_STATE], _flat_pieces(each, starts)) for each in written])


def _whole_part(written: Mapping[str, Any], weights: Sequence[str]) -> SavedPart:
    """Of a checkpoint without ZeRO, where each weight has a state of its own."""
    masters = [written["module"][weight].reshape(-1) for weight in weights]
    state = {
        number: {kind: value.reshape(-1) if value.dim() else value for kind, value in of_weight.items()}
        for number, of_weight in written["optimizer"]["state"].items()
    }
    pieces = [WeightPiece(weight, at, 0, 0, len(masters[at])) for at, weight in enumerate(weights)]
    return _part(masters, {"state": state}, pieces)


def _part(masters: Sequence[Tensor], state: Mapping[str, Any], pieces: Sequence[WeightPiece]) -> SavedPart:
    vectors, others = [], []
    for group, values in enumerate(masters):
        of_group = state["state"].get(group, {})
        means = {kind: value for kind, value in of_group.items() if isinstance(value, Tensor) and value.dim()}
        vectors.append({MASTERS: values.detach(), **means})
        others.append({kind: value for kind, value in of_group.items() if kind not in means})
    return SavedPart(pieces=pieces, vectors=vectors, others=others)


def _flat_pieces(written: Mapping[str, Any], starts: dict[str, int]) -> list[WeightPiece]:
    """Pieces of the stages that cut all weights of a group, end to end, into one stretch for each rank. `starts` says
    how much of each weight the ranks before have.
    """
    pieces = []
    for group, places in enumerate(written["param_slice_mappings"]):
        for weight, place in places.items():
            start = starts.get(weight, 0)
            pieces.append(WeightPiece(weight, group, place.start, start, place.numel))
            starts[weight] = start + place.numel
    return pieces


def sharded_pieces(groups: Sequence[Mapping[str, torch.Size]], *, rank: int, of: int) -> list[WeightPiece]:
    """Pieces of a rank under ZeRO-3, which cuts each weight by itself; the last ones end in padding."""
    pieces = []
    for group, shapes in enumerate(groups):
        place = 0
        for weight, shape in shapes.items():
            each = math.ceil(shape.numel() / of)
            start = min(rank * each, shape.numel())
            pieces.append(WeightPiece(weight, group, place, start, min(each, shape.numel() - start)))
            place += each
    return pieces


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
    files, first = optimizer_states(directory), loaded(model_states(directory))
    if not files:
        return dict(first["module"])
    if files[0].name.startswith(_BFLOAT16):  # DeepSpeed's own reader does not know all of these
        saved = read_parts(directory, weights=())
        shapes = {name: shape for group in first["param_shapes"] for name, shape in group.items()}
        return {name: saved.master_of(name, size=shape.numel()).view(shape) for name, shape in shapes.items()}
    with contextlib.redirect_stdout(io.StringIO()):
        found: dict[str, Tensor] = get_fp32_state_dict_from_zero_checkpoint(str(directory), tag=CHECKPOINT_TAG)
    return found
