"""Whole copies of the weights on the host: for publishing and for export."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from learner.training.adapters import MergedWeight, merge, merged_weights
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


@dataclass(frozen=True)
class WholeWeight:
    """A weight of the policy while it is whole on this rank: `base`, and what an adapter adds to it."""

    name: str
    base: Tensor
    adapter: tuple[Tensor, Tensor, float] | None = None

    def value(self) -> Tensor:
        """The weight without gradient, on its device: a new tensor in float32 if merged, otherwise the weight itself.

        Merging does not touch the model: its weights and its adapters stay apart.
        """
        if self.adapter is None:
            return self.base
        up, down, scale = self.adapter
        return merge(self.base, up=up, down=down, scale=scale)


def host_copy(engine: Engine[object], *, dtype: Dtype, keep: bool) -> WeightSnapshot:
    """The weights as of now, as `dtype`: the optimizer's own for float32, the model's for the model's type.

    Adapters are merged, in float32. All ranks must call it; those with `keep` false return no tensors, and spend no
    memory.
    """
    wanted = torch_dtype(dtype)
    copies: list[NamedTensor] = []
    for weight in whole_weights(engine, dtype=wanted):
        if keep:
            copied = weight.value().to("cpu", wanted, copy=True).contiguous()
            copies.append(NamedTensor(name=weight.name.removeprefix(PolicyModel.PREFIX), value=copied))
    return WeightSnapshot(tensors=tuple(copies))


def whole_weights(engine: Engine[object], *, dtype: torch.dtype) -> Iterator[WholeWeight]:
    """The weights of `engine.model` without adapters, in the model's order, one bucket of them whole at a time.

    Precise enough for `dtype`, but not converted to it. Each is valid until the next one is asked for. All ranks must
    iterate, and to the end.
    """
    for bucket in _buckets(engine.model):
        with engine.gathered([parameter for weight in bucket for parameter in weight.parameters]):
            for weight in bucket:
                yield _whole(engine, weight, dtype)


def _whole(engine: Engine[object], weight: MergedWeight, dtype: torch.dtype) -> WholeWeight:
    parameter, adapter = weight.parameter, weight.adapter
    if adapter is not None:
        factors = (engine.master_weight(adapter.up), engine.master_weight(adapter.down), adapter.scale)
        return WholeWeight(name=weight.name, base=parameter.detach(), adapter=factors)
    base = engine.master_weight(parameter) if dtype != parameter.dtype else parameter.detach()
    return WholeWeight(name=weight.name, base=base)


def _buckets(model: nn.Module) -> Iterator[list[MergedWeight]]:
    bucket: list[MergedWeight] = []
    size = 0
    for weight in merged_weights(model):
        bucket.append(weight)
        for parameter in weight.parameters:
            # A parameter that ZeRO-3 has sharded is empty here, and says its size elsewhere.
            size += int(getattr(parameter, "ds_numel", parameter.numel())) * parameter.element_size()
        if size >= GATHER_BYTES:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket


def write_model_directory(snapshot: WeightSnapshot, *, causal_lm: nn.Module, source: Path, destination: Path) -> None:
    """Writes a Hugging Face model directory: config, weights of `snapshot`, and the tokenizer files of `source`.

    Whoever may read the config may read the weights; safetensors leaves them to this user alone.
    """
    save = causal_lm.save_pretrained
    assert callable(save), "a transformers model"
    destination.mkdir(parents=True, exist_ok=True)
    save(destination, state_dict={tensor.name: tensor.value for tensor in snapshot.tensors})
    for weights in destination.glob("*.safetensors"):
        shutil.copymode(destination / "config.json", weights)
    for pattern in TOKENIZER_FILES:
        for file in source.glob(pattern):
            shutil.copy2(file, destination / file.name)
