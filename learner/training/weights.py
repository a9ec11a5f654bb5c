"""Whole copies of the weights on the host: for publishing and for export."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from learner.training.config import Dtype
from learner.training.engine import Engine
from learner.training.policy import PolicyModel

# Parameters are gathered in groups of about this size, so that ZeRO-3 never has the whole model on one device.
GATHER_BYTES = 256 * 2**20
TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "chat_template*",
)


@dataclass(frozen=True)
class NamedTensor:
    """A parameter's Hugging Face name and a contiguous copy of its value on the CPU."""

    name: str
    value: Tensor


@dataclass(frozen=True)
class WeightSnapshot:
    """The weights after a step, in the model's order; parameters that are tied appear once, under their first name."""

    tensors: tuple[NamedTensor, ...]

    @property
    def bytes(self) -> int:
        """The size of all values."""
        return sum(tensor.value.nbytes for tensor in self.tensors)


def torch_dtype(dtype: Dtype) -> torch.dtype:
    """The torch type of a config's."""
    return torch.float32 if dtype == "float32" else torch.bfloat16


def host_copy(engine: Engine, *, dtype: Dtype, keep: bool) -> WeightSnapshot:
    """The weights as of now, as `dtype`: the optimizer's own for float32, the model's for the model's type.

    All ranks must call it; those with `keep` false return no tensors, and spend no memory.
    """
    wanted = torch_dtype(dtype)
    copies: list[NamedTensor] = []
    for group in _groups(engine.model):
        with engine.gathered([parameter for _, parameter in group]):
            for name, parameter in group:
                value = engine.master_weight(parameter) if wanted != parameter.dtype else parameter.detach()
                if keep:
                    copied = value.to("cpu", wanted, copy=True).contiguous()
                    copies.append(NamedTensor(name=name.removeprefix(PolicyModel.PREFIX), value=copied))
    return WeightSnapshot(tensors=tuple(copies))


def _groups(model: nn.Module) -> Iterator[list[tuple[str, nn.Parameter]]]:
    group: list[tuple[str, nn.Parameter]] = []
    size = 0
    for name, parameter in model.named_parameters():
        group.append((name, parameter))
        # A parameter that ZeRO-3 has sharded is empty here, and says its size elsewhere.
        size += int(getattr(parameter, "ds_numel", parameter.numel())) * parameter.element_size()
        if size >= GATHER_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def write_model_directory(snapshot: WeightSnapshot, *, causal_lm: nn.Module, source: Path, destination: Path) -> None:
    """Writes a Hugging Face model directory: config, weights of `snapshot`, and the tokenizer files of `source`."""
    save = causal_lm.save_pretrained
    assert callable(save), "a transformers model"
    destination.mkdir(parents=True, exist_ok=True)
    save(destination, state_dict={tensor.name: tensor.value for tensor in snapshot.tensors})
    for pattern in TOKENIZER_FILES:
        for file in source.glob(pattern):
            shutil.copy2(file, destination / file.name)
