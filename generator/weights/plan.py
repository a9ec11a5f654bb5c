"""The plan of a weight sync: its checks before a byte moves, and its errors.

A bucket is one tensor of uint8, broadcast from rank 0: the bytes of its tensors, each contiguous, in row-major order
and in the byte order of the machine, at the offset that its `TensorSpec` names. `xxh3` is the lower-case hexadecimal
64-bit XXH3 hash (seed 0) of the whole bucket, padding included. Tensors have the names, shapes and types of the
checkpoint format, each once, and a tensor that the model ties to another is left out.
"""

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from protocol.fleet import BUCKET_ALIGNMENT, BucketSpec, Prepare, TensorSpec

POLICY_ADAPTER = 1
"""The number of the learner's adapter in an engine that computes it beside the weights."""
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "int8": 1, "uint8": 1, "bool": 1}


class WeightSyncError(Exception):
    """A weight sync failed. `unloaded`: the engine holds neither the old weights nor the new, and stays paused."""

    def __init__(self, reason: str, *, unloaded: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.unloaded = unloaded


def check_plan(buckets: Sequence[BucketSpec]) -> None:
    """Raises WeightSyncError if a tensor lies where it cannot: outside its bucket, over another, or not aligned."""
    names: set[str] = set()
    for index, bucket in enumerate(buckets):
        end, before = 0, ""
        for tensor in sorted(bucket.tensors, key=lambda spec: spec.offset):
            is_next_part = tensor.whole is not None and tensor.name == before
            if tensor.name in names and not is_next_part:
                raise WeightSyncError(f"tensor {tensor.name} is in the plan twice")
            names.add(tensor.name)
            before = tensor.name
            _check_part(tensor)
            _check_place(tensor, after=end, bucket=bucket, index=index)
            end = tensor.offset + tensor_bytes(tensor)


def tensor_bytes(tensor: TensorSpec) -> int:
    """Bytes of a tensor, without padding. Raises WeightSyncError for a type or shape that cannot be sent."""
    if tensor.dtype not in ITEM_BYTES:
        raise WeightSyncError(f"tensor {tensor.name}: dtype {tensor.dtype} is not one of {', '.join(ITEM_BYTES)}")
    if min(tensor.shape, default=1) < 0:
        raise WeightSyncError(f"tensor {tensor.name}: shape {list(tensor.shape)} has a negative size")
    return math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype]


def _check_part(tensor: TensorSpec) -> None:
    if tensor.whole is None:
        return
    places = tuple(zip(tensor.start, tensor.shape, tensor.whole, strict=False))
    if not len(tensor.start) == len(tensor.shape) == len(tensor.whole) or any(
        start < 0 or start + size > whole for start, size, whole in places
    ):
        raise WeightSyncError(
            f"tensor {tensor.name}: the part of shape {list(tensor.shape)} at {list(tensor.start)} is not within "
            f"{list(tensor.whole)}"
        )


def check_slices(plan: Prepare, *, workers: int) -> None:
    """Raises WeightSyncError if a plan of slices is not for so many workers, or one of theirs is no plan."""
    if plan.slices and len(plan.slices) != workers:
        raise WeightSyncError(f"slices for {len(plan.slices)} workers came, this generator has {workers}")
    if plan.slices and plan.adapter is not None:
        raise WeightSyncError("slices of an adapter came: adapters are sent whole")
    for buckets in plan.slices:
        check_plan(buckets)


def _check_place(tensor: TensorSpec, *, after: int, bucket: BucketSpec, index: int) -> None:
    where = f"tensor {tensor.name} at offset {tensor.offset} of bucket {index}"
    if tensor.offset % BUCKET_ALIGNMENT:
        raise WeightSyncError(f"{where} is not aligned to {BUCKET_ALIGNMENT} bytes")
    if tensor.offset < after:
        raise WeightSyncError(f"{where} overlaps the tensor before it, which ends at {after}")
    end = tensor.offset + tensor_bytes(tensor)
    if end > bucket.nbytes:
        raise WeightSyncError(f"{where} ends at {end}, beyond the bucket's {bucket.nbytes} bytes")


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """A worker's report of a load. `error` is empty on success; `unloaded` as in WeightSyncError.

    `wait_s` of the `load_s` seconds it waited for buckets. `slices` are a WorkerSlices as JSON, or empty.
    """

    load_s: float = 0.0
    wait_s: float = 0.0
    slices: str = ""
    error: str = ""
    unloaded: bool = False

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "LoadReport":
        return cls(**json.loads(text))
