"""Numbers of parameters that a learner trains, from the heads of a model's files: all of them, or those of adapters.

Rough: of a name that may be a linear layer it is taken to be one.
"""

import json
import math
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

_HEAD = struct.Struct("<Q")
_LONGEST_HEAD = 100 << 20  # what safetensors itself reads
_USUAL_BYTES = 2
_ALL = "all-linear"
_NEVER = frozenset({"embed_tokens", "lm_head", "embed", "wte", "wpe", "router"})
"""Embeddings, heads and routers, which are matrices, too, and have no adapters."""


def parameter_count(model: Path) -> int:
    """Parameters in the files of a folder, 0 without any; of one that cannot be read, as if it were in bfloat16."""
    return sum(_count(path) for path in model.glob("*.safetensors"))


def adapter_count(model: Path, *, rank: int, targets: Sequence[str]) -> int:
    """Parameters of LoRA adapters of that rank on the linear layers of these names, or on `all-linear`."""
    return sum(
        rank * math.prod(shape[:-2]) * (shape[-2] + shape[-1])
        for path in model.glob("*.safetensors")
        for name, shape in _tensors(path)
        if len(shape) >= 2 and _is_adapted(name, targets)
    )


def _is_adapted(name: str, targets: Sequence[str]) -> bool:
    words = name.removesuffix(".weight").split(".")
    if tuple(targets) == (_ALL,):
        return _NEVER.isdisjoint(words)
    return any(words[-len(wanted) :] == wanted for wanted in (target.split(".") for target in targets))


def _count(path: Path) -> int:
    return sum(math.prod(shape) for _, shape in _tensors(path)) or path.stat().st_size // _USUAL_BYTES


def _tensors(path: Path) -> Iterator[tuple[str, list[int]]]:
    """Names and shapes of a file's tensors; none of one that is no whole file of safetensors."""
    try:
        with path.open("rb") as file:
            (length,) = _HEAD.unpack(file.read(_HEAD.size))
            head = json.loads(file.read(length)) if length <= _LONGEST_HEAD else {}
        yield from [(name, list(entry["shape"])) for name, entry in head.items() if name != "__metadata__"]
    except (OSError, ValueError, struct.error, KeyError, TypeError, AttributeError):
        return
