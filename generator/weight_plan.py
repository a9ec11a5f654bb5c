"""What the two ends of a weight sync agree on before a byte moves: the group, and the buckets.

Layout of a bucket, the one rule that a sender has to follow: a bucket is one tensor of uint8, broadcast from rank 0.
It holds the bytes of its tensors, each contiguous, in row-major order and in the byte order of the machine, in the
order of `BucketSpec.tensors`. Each tensor starts at the next multiple of 16 bytes after the end of the one before, the
first at 0; the bucket ends at a multiple of 16. Padding bytes are zero, and count in the hash. `xxh3` is the lower-case
hexadecimal 64-bit XXH3 hash (seed 0) of the whole bucket. Tensors have the names, shapes and types of the checkpoint
format, each once, and a tensor that the model ties to another is left out.
"""

import dataclasses
import json
import math
from dataclasses import dataclass
from typing import Any, Literal

ALIGNMENT_BYTES = 16

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "int8": 1, "uint8": 1, "bool": 1}


class WeightSyncError(Exception):
    """A weight sync failed. `unloaded`: the engine holds neither the old weights nor the new, and stays paused."""

    def __init__(self, reason: str, *, unloaded: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.unloaded = unloaded


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """One tensor in checkpoint format. `dtype` is torch's name without its prefix, such as `bfloat16`."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor without padding. Raises WeightSyncError for a type that cannot be sent."""
        if self.dtype not in ITEM_BYTES:
            raise WeightSyncError(f"tensor {self.name}: dtype {self.dtype} is not one of {', '.join(ITEM_BYTES)}")
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class BucketSpec:
    """One broadcast: its tensors in order, its size with padding, and the XXH3 hash of its bytes."""

    tensors: tuple[TensorSpec, ...]
    nbytes: int
    xxh3: str

    def offsets(self) -> tuple[int, ...]:
        """First byte of each tensor. Raises WeightSyncError if `nbytes` does not follow from the tensors."""
        starts = []
        position = 0
        for tensor in self.tensors:
            starts.append(position)
            position = _aligned(position + tensor.nbytes)
        if position != self.nbytes:
            raise WeightSyncError(
                f"a bucket of {len(starts)} tensors takes {position} bytes, its plan says {self.nbytes}"
            )
        return tuple(starts)


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """Everything that will be broadcast for one version (`incarnation.version`), in order."""

    version: str
    buckets: tuple[BucketSpec, ...]

    @property
    def nbytes(self) -> int:
        return sum(bucket.nbytes for bucket in self.buckets)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "StagePlan":
        """Inverse of `to_json`. Raises KeyError or TypeError for any other text."""
        data: Any = json.loads(text)
        return cls(version=data["version"], buckets=tuple(_bucket(item) for item in data["buckets"]))


@dataclass(frozen=True, kw_only=True)
class GroupSpec:
    """A private process group. `rank` is that of this engine's first worker; rank 0 sends."""

    epoch: int
    backend: Literal["gloo", "nccl"]
    host: str
    port: int
    rank: int
    world_size: int
    bucket_timeout_s: float

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "GroupSpec":
        return cls(**json.loads(text))


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What one worker says after a load. `error` is empty on success; `unloaded` as in WeightSyncError."""

    fingerprint: str = ""
    load_s: float = 0.0
    error: str = ""
    unloaded: bool = False

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "LoadReport":
        return cls(**json.loads(text))


def _aligned(position: int) -> int:
    return -(-position // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _bucket(data: Any) -> BucketSpec:
    tensors = tuple(
        TensorSpec(name=item["name"], dtype=item["dtype"], shape=tuple(item["shape"])) for item in data["tensors"]
    )
    return BucketSpec(tensors=tensors, nbytes=data["nbytes"], xxh3=data["xxh3"])
