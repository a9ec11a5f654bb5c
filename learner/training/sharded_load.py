"""Loading of a model whose weights the ranks share among them: no rank ever holds the whole of it.

    rank 0      reads a weight ─▶ shape and type ─▶ the weight to all ─▶ keeps its part, forgets the rest
    the others  build the model without memory  ─▶  receive the weight  ─▶ keep their parts
    at the end  names of the weights, in rank 0's order; buffers, and weights that the folder lacks, whole

The peak of a rank is its part and one weight; on rank 0 a weight of experts may be there twice, and weights that may be
tied to each other stay whole until they have been compared.
"""

from __future__ import annotations

import ctypes
import errno
import json
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Protocol, cast

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig

from learner.training.ranks import share_text

Shard = Callable[[nn.Parameter], None]
"""Gives the numbers that rank 0's parameter has to all ranks, each of which keeps its part. All ranks must call it with
a parameter of the same shape and type.
"""
_WEIGHT, _END, _FAILED = 1, 0, 2
_MOST_DIMENSIONS = 8
_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
_STORED = dict(zip(("F32", "BF16", "F16", "F64", "I64", "I32", "I16", "I8", "U8", "BOOL"), _DTYPES, strict=True))
"""Names of types in safetensors."""
_ONE_BY_ONE = "HF_DEACTIVATE_ASYNC_LOAD"
_WHOLE_FILE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


class ModelClass(Protocol):
    """The parts used of a class that transformers chooses models by."""

    def from_pretrained(self, path: Path | None, **settings: object) -> tuple[object, dict[str, set[str]]]: ...

    def from_config(self, config: object, **settings: object) -> object: ...


@dataclass(frozen=True)
class _Contents:
    """Rank 0's model without its numbers: weights by name, as their places in the order of sending; names, types and
    shapes of what is sent whole; names of what the folder lacks.
    """

    weights: Mapping[str, int]
    whole: Mapping[str, Mapping[str, tuple[int, list[int]]]]
    missing: Sequence[str]


def load_shards(
    kind: type,
    path: Path,
    *,
    shard: Shard,
    dtype: torch.dtype,
    attention: str | None,
    settings: Mapping[str, object],
) -> tuple[nn.Module, Collection[str]]:
    """The model in `path` as `kind`, a class of transformers, makes it, each weight sharded; and the names of weights
    that the folder lacks, which are whole and the same on every rank. All ranks must call it.

    Raises OSError on the other ranks if rank 0 could not read it.
    """
    loader = cast(ModelClass, kind)
    config = AutoConfig.from_pretrained(path, local_files_only=True, **settings)
    with torch.device("meta"):
        empty = loader.from_config(config, dtype=dtype, attn_implementation=attention)
    assert isinstance(empty, nn.Module), "transformers returned something else than a module"
    if dist.get_rank() > 0:
        return _receive(empty, path, shard=shard)
    sender = _Sender(shard, kept=_shapes_of_ties(empty))
    try:
        with sender.sending(), _one_by_one(), _files_of(path) as weights:
            # With weights given transformers takes no folder.
            source = settings if weights is None else {**_beside_weights(path, config), "state_dict": weights}
            model, report = (loader if weights is None else cast(ModelClass, type(empty))).from_pretrained(
                path if weights is None else None,
                dtype=dtype,
                attn_implementation=attention,
                local_files_only=True,
                output_loading_info=True,
                **source,
            )
        assert isinstance(model, nn.Module), "transformers returned something else than a module"
        missing = sorted(report["missing_keys"])
        sender.send_rest(model, missing=missing)
    except BaseException:
        _announce(_FAILED)
        raise
    _announce(_END)
    _send_contents(model, sender, missing=missing)
    return model, missing


def _trim() -> None:
    """Gives freed memory back where the C library can: parts that stay lie between weights that went."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _beside_weights(path: Path, config: PreTrainedConfig) -> dict[str, object]:
    try:
        generation = GenerationConfig.from_pretrained(path, local_files_only=True)
    except OSError:  # a folder without that file
        generation = None
    return {"config": config, "generation_config": generation}


class _Sender:
    """Rank 0's side: sends each parameter of a model that is being loaded as soon as it has its numbers."""

    def __init__(self, shard: Shard, *, kept: Collection[torch.Size]) -> None:
        self._shard = shard
        self._kept = kept
        self._sent: dict[int, int] = {}
        self._alive: list[nn.Parameter] = []  # or another one could come to lie at the same address

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Within it what transformers loads is sent, but for weights that it may compare with each other."""
        hook = register_module_parameter_registration_hook(self._registered)
        try:
            yield
        finally:
            hook.remove()

    def place(self, parameter: nn.Parameter) -> int | None:
        """The place of a parameter in the order of sending; None for one that is whole."""
        return self._sent.get(id(parameter))

    def send_rest(self, model: nn.Module, *, missing: Collection[str]) -> None:
        """Sends the weights that were kept, but for those that the folder lacks."""
        for name, parameter in model.named_parameters():
            if name not in missing and self.place(parameter) is None:
                self._send(parameter)

    def _registered(self, _: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is None or parameter.is_meta or not getattr(parameter, "_is_hf_initialized", False):
            return
        if self.place(parameter) is None and parameter.shape not in self._kept:
            self._send(parameter)

    def _send(self, parameter: nn.Parameter) -> None:
        parameter.data = parameter.data.contiguous()
        _announce(_WEIGHT, dtype=parameter.dtype, shape=parameter.shape)
        self._sent[id(parameter)] = len(self._alive)
        self._alive.append(parameter)
        self._shard(parameter)
        _trim()


def _shapes_of_ties(model: nn.Module) -> set[torch.Size]:
    """The shapes of weights that may be tied: whether they are is seen in their numbers, if a folder has both."""
    ties: Mapping[str, str] = getattr(model, "all_tied_weights_keys", {})
    return {model.get_parameter(name).shape for pair in ties.items() for name in pair}


@contextmanager
def _one_by_one() -> Iterator[None]:
    """Keeps transformers from reading weights ahead, in threads, faster than they are sent."""
    former = os.environ.get(_ONE_BY_ONE)
    os.environ[_ONE_BY_ONE] = "1"
    try:
        yield
    finally:
        if former is None:
            del os.environ[_ONE_BY_ONE]
        else:
            os.environ[_ONE_BY_ONE] = former


@contextmanager
def _files_of(path: Path) -> Iterator[Mapping[str, _FileTensor] | None]:
    """The weights of a folder by name, none read yet; None if they lie in other files, or are of a rare type."""
    index = path / _INDEX
    names = [_WHOLE_FILE] if (path / _WHOLE_FILE).is_file() else []
    if not names and index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    if not names:
        yield None
        return
    with ExitStack() as files:
        opened = [files.enter_context((path / name).open("rb", buffering=0)) for name in names]
        weights = {name: weight for file in opened for name, weight in _stored(file)}
        yield weights if all(weight.get_dtype() in _STORED for weight in weights.values()) else None


@dataclass(frozen=True)
class _FileTensor:
    """A weight in a file of safetensors, as transformers asks for it: it reads all of it, when it comes to it.

    It is read straight to where it is to lie. Pages of a mapped file would be this process's until it is closed, and
    safetensors' own reading takes the weight twice.
    """

    file: FileIO
    dtype: str
    shape: Sequence[int]
    begin: int
    size: int

    def get_dtype(self) -> str:
        """As safetensors names it."""
        return self.dtype

    def get_shape(self) -> list[int]:
        """All of it."""
        return list(self.shape)

    def __deepcopy__(self, _: object) -> _FileTensor:
        return self

    def __getitem__(self, _: object) -> Tensor:
        room = torch.empty(self.size, dtype=torch.uint8)
        left = memoryview(room.numpy())  # type: ignore[arg-type]  # numpy's stubs leave it out
        self.file.seek(self.begin)
        while left:
            read = self.file.readinto(left)
            if not read:
                raise OSError(errno.EIO, f"{self.file.name} ends within a weight")
            left = left[read:]
        return room.view(_STORED[self.dtype]).view(list(self.shape))


def _stored(file: FileIO) -> Iterator[tuple[str, _FileTensor]]:
    """The weights of a file (format: 8 bytes for the size of a text, which is JSON, and then the weights)."""
    with safe_open(file.name, framework="pt"):
        pass  # it raises for a file that is not whole
    length = int.from_bytes(file.read(8), "little")
    for name, told in json.loads(file.read(length)).items():
        if name != "__metadata__":
            begin, end = told["data_offsets"]
            yield name, _FileTensor(file, told["dtype"], told["shape"], begin=8 + length + begin, size=end - begin)


def _announce(kind: int, *, dtype: torch.dtype = torch.float32, shape: Sequence[int] = ()) -> None:
    header = torch.zeros(3 + _MOST_DIMENSIONS, dtype=torch.int64)
    header[:3] = torch.tensor([kind, _DTYPES.index(dtype), len(shape)])
    header[3 : 3 + len(shape)] = torch.tensor(list(shape))
    dist.broadcast(header, 0)


def _send_contents(model: nn.Module, sender: _Sender, *, missing: Sequence[str]) -> None:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    whole = {name: each for name, each in parameters.items() if sender.place(each) is None}
    contents = _Contents(
        weights={name: place for name, each in parameters.items() if (place := sender.place(each)) is not None},
        whole={"parameters": _described(whole), "buffers": _described(buffers)},
        missing=missing,
    )
    share_text(json.dumps(vars(contents)))
    for value in (*whole.values(), *buffers.values()):
        _broadcast(value.detach().contiguous())


def _described(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, list[int]]]:
    return {name: (_DTYPES.index(value.dtype), list(value.shape)) for name, value in tensors.items()}


def _broadcast(value: Tensor) -> Tensor:
    if value.numel():
        dist.broadcast(value.reshape(-1).view(torch.uint8), 0)
    return value


def _receive(model: nn.Module, path: Path, *, shard: Shard) -> tuple[nn.Module, Collection[str]]:
    received = list(_received(path, shard))
    contents = _Contents(**json.loads(share_text(None)))
    for name, place in contents.weights.items():
        _put(model, name, received[place])
    for name, parameter in _received_whole(contents.whole["parameters"]):
        _put(model, name, _parameter(parameter))
    for name, buffer in _received_whole(contents.whole["buffers"]):
        _put(model, name, buffer)
    absent = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    assert not absent, f"rank 0's {type(model).__name__} has no {absent[0]}"
    return model, contents.missing


def _received(path: Path, shard: Shard) -> Iterator[nn.Parameter]:
    room = torch.empty(0, dtype=torch.uint8)  # the same for all, or parts would come to lie between holes
    while True:
        header = torch.empty(3 + _MOST_DIMENSIONS, dtype=torch.int64)
        dist.broadcast(header, 0)
        kind, dtype, dimensions, *shape = header.tolist()
        if kind == _END:
            del room
            _trim()
            return
        if kind == _FAILED:
            raise OSError(f"rank 0 could not load the model in {path}: its own log says why")
        size = math.prod(shape[:dimensions]) * _DTYPES[dtype].itemsize
        room = room if len(room) >= size else torch.empty(size, dtype=torch.uint8)
        parameter = _parameter(room[:size].view(_DTYPES[dtype]).view(shape[:dimensions]))
        shard(parameter)
        yield parameter


def _received_whole(described: Mapping[str, tuple[int, list[int]]]) -> Iterator[tuple[str, Tensor]]:
    for name, (dtype, shape) in described.items():
        yield name, _broadcast(torch.empty(shape, dtype=_DTYPES[dtype]))


def _parameter(value: Tensor) -> nn.Parameter:
    return nn.Parameter(value, requires_grad=value.is_floating_point())


def _put(model: nn.Module, name: str, value: Tensor) -> None:
    owner, _, own = name.rpartition(".")
    setattr(model.get_submodule(owner), own, value)
