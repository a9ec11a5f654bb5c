"""Slices: what a worker of a tensor-parallel generator reads of each tensor, as vLLM's own loaders show it.

While a whole version is loaded, `ReadTrace` notes which part of each tensor the loaders read: they narrow it to the
worker's rows, columns or experts, and copy that. From then on the learner may send this part alone (`TensorBox`). What
arrives is put where it lies in a tensor of the whole shape, whose other elements nobody has written and nobody reads,
and the loaders do with it what they do with whole ones. The first load of slices is watched, too: one that reads
elsewhere fails.
"""

import logging
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from generator.weights.held_base import view_of
from generator.weights.plan import ITEM_BYTES, WeightSyncError, tensor_bytes
from protocol.fleet import BucketSpec, TensorBox, TensorSpec, WorkerSlices

logger = logging.getLogger(__name__)

MAX_BOXES = 64
"""Of a tensor whose parts are more, the whole is sent."""
WORTH = 0.9
"""Slices that are a larger share of the whole save nothing."""

Box = tuple[tuple[int, int], ...]
"""Of each dimension, its first place and the one behind its last."""


class ReadTrace(TorchDispatchMode):
    """Within it, notes what is read of the tensors that `watch` was told of. A view of a tensor reads nothing."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._places: dict[int, tuple[list[int], list[TensorSpec]]] = {}
        self._read: dict[str, set[Box] | None] = {}
        """By name; None for one that is read in a way that no box tells."""
        self._specs: dict[str, TensorSpec] = {}
        self._kept: list[torch.Tensor] = []

    def watch(self, buffer: torch.Tensor, tensors: Sequence[TensorSpec]) -> None:
        """These tensors lie in the storage of `buffer`, from its first byte on, at their offsets."""
        first = buffer.storage_offset() * buffer.element_size()
        ordered = sorted(tensors, key=lambda spec: spec.offset)
        placed = [spec.model_copy(update={"offset": first + spec.offset}) for spec in ordered]
        self._places[buffer.untyped_storage().data_ptr()] = [spec.offset for spec in placed], placed
        self._specs |= {spec.name: spec for spec in placed}

    def watch_whole(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """These are tensors of their whole shape, which stay where they are as long as this trace is."""
        for name, tensor in tensors:
            self._kept.append(tensor)
            dtype = str(tensor.dtype).removeprefix("torch.")
            self.watch(tensor, [TensorSpec(name=name, dtype=dtype, shape=tuple(tensor.shape), offset=0)])

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Notes the arguments of what is no view."""
        del types
        kwargs = kwargs or {}
        if not _is_view(func):
            for each in (*args, *kwargs.values()):
                for tensor in each if isinstance(each, list | tuple) else (each,):
                    if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                        self._note(tensor)
        return func(*args, **kwargs)

    def boxes(self) -> dict[str, tuple[Box, ...]]:
        """The parts that were read, of each tensor of which a part was read and no more. Others are read whole, or in
        ways that are not understood, or not at all as far as is seen.
        """
        found = {}
        for name, read in self._read.items():
            if not read:
                continue
            merged, shape = _merged(read), self._specs[name].shape
            whole = tuple((0, size) for size in shape)
            if len(merged) <= MAX_BOXES and merged != (whole,):
                found[name] = merged
        return found

    def read_beyond(self, allowed: Mapping[str, Sequence[TensorBox]]) -> list[str]:
        """The names of tensors of which more was read than these boxes."""
        beyond = []
        for name, boxes in allowed.items():
            read = self._read.get(name, set())
            if read is None or any(not _is_within(box, boxes) for box in read):
                beyond.append(name)
        return sorted(beyond)

    def _note(self, tensor: torch.Tensor) -> None:
        place = self._places.get(tensor.untyped_storage().data_ptr()) if tensor.numel() else None
        if place is None:
            return
        offsets, specs = place
        start = int(tensor.storage_offset()) * tensor.element_size()
        spec = specs[max(bisect_right(offsets, start) - 1, 0)]
        box = _box_of(tensor, spec, start=start)
        read = self._read.setdefault(spec.name, set())
        if box is None or read is None:
            self._read[spec.name] = None
        else:
            read.add(box)


def whole_tensors(
    bucket: BucketSpec, buffer: torch.Tensor, *, device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a bucket of slices: of those that came in parts, the parts where they lie in the whole."""
    name, whole = "", torch.empty(0)
    for spec in bucket.tensors:
        part = view_of(buffer, spec)
        if spec.whole is None:
            yield spec.name, part
            continue
        if spec.name != name:
            if name:
                yield name, whole
            # Not zeros: pages that nobody writes to are no memory.
            name, whole = spec.name, torch.empty(spec.whole, dtype=part.dtype, device=device)
        ends = (start + size for start, size in zip(spec.start, spec.shape, strict=True))
        whole[tuple(slice(*each) for each in zip(spec.start, ends, strict=True))] = part.to(device)
    if name:
        yield name, whole


def boxes_of(buckets: Iterable[BucketSpec]) -> dict[str, list[TensorBox]]:
    """The boxes in which tensors come that do not come whole."""
    found: dict[str, list[TensorBox]] = {}
    for spec in (spec for bucket in buckets for spec in bucket.tensors if spec.whole is not None):
        found.setdefault(spec.name, []).append(TensorBox(start=spec.start, shape=spec.shape))
    return found


def is_sliced(bucket: BucketSpec) -> bool:
    """True if it has a part of a tensor."""
    return any(spec.whole is not None for spec in bucket.tensors)


def worth_sending(trace: ReadTrace, buckets: Sequence[BucketSpec]) -> str:
    """The slices of these buckets' tensors that were read, a WorkerSlices as JSON; empty if that is nearly all."""
    whole = sum(tensor_bytes(spec) for bucket in buckets for spec in bucket.tensors)
    slices, nbytes = worker_slices(trace, buckets)
    logger.info(
        "this worker reads %d of %d MB of the weights, and parts of %d tensors", nbytes >> 20, whole >> 20, len(slices)
    )
    return WorkerSlices(boxes=slices).model_dump_json() if nbytes < WORTH * whole else ""


def worker_slices(trace: ReadTrace, buckets: Sequence[BucketSpec]) -> tuple[dict[str, tuple[TensorBox, ...]], int]:
    """The boxes by name that this worker needs of tensors of which it does not need the whole, and their bytes with
    those of the whole ones.
    """
    read = trace.boxes()
    found: dict[str, tuple[TensorBox, ...]] = {}
    nbytes = 0
    for spec in (spec for bucket in buckets for spec in bucket.tensors):
        boxes = read.get(spec.name)
        if boxes is None:
            nbytes += tensor_bytes(spec)
            continue
        found[spec.name] = tuple(
            TensorBox(start=tuple(a for a, _ in box), shape=tuple(b - a for a, b in box)) for box in boxes
        )
        nbytes += sum(prod(box.shape) for box in found[spec.name]) * ITEM_BYTES[spec.dtype]
    return found, nbytes


def check_reads(trace: ReadTrace, buckets: Sequence[BucketSpec]) -> None:
    """Raises WeightSyncError if more was read of a tensor than these buckets brought."""
    if beyond := trace.read_beyond(boxes_of(buckets)):
        raise WeightSyncError(
            f"vLLM read more of {len(beyond)} tensors than the slices that came: {', '.join(beyond[:3])}; this worker "
            "takes whole tensors from now on"
        )


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(each.alias_info is not None and not each.alias_info.is_write for each in returns)


def _box_of(tensor: torch.Tensor, spec: TensorSpec, *, start: int) -> Box | None:
    """The part of a tensor that a view of it shows; None if that is no box of it."""
    item = ITEM_BYTES[spec.dtype]
    place, rest = divmod(start - spec.offset, item)
    if rest or place < 0 or tensor.element_size() != item:
        return None
    strides = [prod(spec.shape[at + 1 :]) for at in range(len(spec.shape))]
    box = []
    for stride in strides:
        at, place = divmod(place, stride)
        box.append((at, at + 1))
    free = [at for at, size in enumerate(spec.shape) if size > 1]
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda each: -each[1]):
        if size == 1:
            continue
        along = next((at for at in free if strides[at] == stride), None)
        if along is None or box[along][0] + size > spec.shape[along]:
            return None
        free.remove(along)
        box[along] = (box[along][0], box[along][0] + size)
    return None if any(end > size for (_, end), size in zip(box, spec.shape, strict=True)) else tuple(box)


def _merged(boxes: Iterable[Box]) -> tuple[Box, ...]:
    """Fewer boxes for the same places: those that differ in one dimension, and touch there, are one."""
    found = set(boxes)
    while True:
        before = len(found)
        for dimension in range(len(next(iter(found), ()))):
            found = _merged_along(found, dimension)
        if len(found) == before:
            return tuple(sorted(found))


def _merged_along(boxes: set[Box], dimension: int) -> set[Box]:
    alike: dict[Box, list[tuple[int, int]]] = {}
    for box in boxes:
        alike.setdefault((*box[:dimension], *box[dimension + 1 :]), []).append(box[dimension])
    merged = set()
    for others, intervals in alike.items():
        joined: list[tuple[int, int]] = []
        for start, end in sorted(intervals):
            if joined and start <= joined[-1][1]:
                joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
            else:
                joined.append((start, end))
        merged |= {(*others[:dimension], interval, *others[dimension:]) for interval in joined}
    return merged


def _is_within(box: Box, boxes: Sequence[TensorBox]) -> bool:
    """True if one of the boxes holds all of it."""
    return any(
        all(
            first <= start and end <= first + size
            for (start, end), first, size in zip(box, each.start, each.shape, strict=True)
        )
        for each in boxes
    )
