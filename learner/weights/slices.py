"""Slices of a version: for each worker of tensor-parallel generators, the parts of tensors that it reads.

A generator tells them once it has loaded a whole version (`SliceLayout`). They are cut from the copy that is published,
by each rank from its share, into buckets of their own, and let go of when they are sent. Each worker's go to the
workers of that number of all generators, in a process group of these.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from learner.weights.process_group import Bucket, BucketWriter, LaidOut, Rooms, in_thread
from protocol.fleet import BucketSpec, SliceLayout, TensorBox
from services.process import DaemonThreads

if TYPE_CHECKING:
    from learner.weights.senders import AnyBucket


class SlicesUnfit(ValueError):
    """Slices that a generator has told, and that are not of these weights."""


@dataclass(frozen=True, eq=False)
class SlicedWeights:
    """Buckets of a version's slices by worker, ready to be sent, and the layout that they were cut by."""

    layout: SliceLayout
    buckets: Sequence[Sequence["AnyBucket"]]

    @property
    def nbytes(self) -> int:
        """Bytes that the workers of one generator receive together."""
        return sum(bucket.spec.nbytes for share in self.buckets for bucket in share)

    @property
    def specs(self) -> tuple[tuple[BucketSpec, ...], ...]:
        """As a plan has them."""
        return tuple(tuple(bucket.spec for bucket in share) for share in self.buckets)


class Slicer:
    """Cuts slices of one version after another, in memory that it keeps."""

    def __init__(self) -> None:
        self._rooms = Rooms()

    def cut(self, laid_outs: Sequence[LaidOut], layout: SliceLayout) -> Sequence[Sequence[LaidOut]]:
        """Buckets of slices for each worker, as large as those of the copy. Raises SlicesUnfit."""
        bucket_bytes = max((laid_out.data.numel() for laid_out in laid_outs), default=1)
        made = [_cut(laid_outs, each.boxes, bucket_bytes, self._rooms) for each in layout.workers]
        self._rooms.keep(sum(map(len, made)))
        return made

    async def hashed(
        self, laid_outs: Sequence[LaidOut], layout: SliceLayout, *, threads: DaemonThreads, sender: int = 0
    ) -> Sequence[Sequence[Bucket]]:
        """As `cut`, with hashes, beside the event loop."""
        return await in_thread(partial(self._hashed, laid_outs, layout, sender), threads=threads)

    def _hashed(self, laid_outs: Sequence[LaidOut], layout: SliceLayout, sender: int) -> Sequence[Sequence[Bucket]]:
        return [[bucket.hashed(sender=sender) for bucket in share] for share in self.cut(laid_outs, layout)]


def _cut(
    laid_outs: Sequence[LaidOut], boxes: Mapping[str, Sequence[TensorBox]], bucket_bytes: int, rooms: Rooms
) -> Sequence[LaidOut]:
    writer = BucketWriter(bucket_bytes=bucket_bytes, rooms=rooms)
    for name, value in (named for laid_out in laid_outs for named in laid_out.named()):
        if name in boxes:
            writer.add_parts(name, value, [_checked(name, value, box) for box in boxes[name]])
        else:
            writer.add(name, value, dtype=value.dtype)
    return writer.buckets()


def _checked(name: str, value: torch.Tensor, box: TensorBox) -> TensorBox:
    fits = len(box.start) == len(box.shape) == value.dim() and all(
        start >= 0 and size > 0 and start + size <= whole
        for start, size, whole in zip(box.start, box.shape, value.shape, strict=True)
    )
    if not fits:
        raise SlicesUnfit(
            f"{name} has shape {list(value.shape)}, and a generator reads {list(box.shape)} from {list(box.start)} on"
        )
    return box
