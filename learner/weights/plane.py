"""The learner's end of the weight plane: weights laid out in buckets, broadcast over a process group of their own.

A bucket is one tensor of bytes: the tensors' contiguous bytes one after another, each at the offset that its
`TensorSpec` names. The process group is private: not torch's default group, on the configured address only, and
thrown away after any failure. It carries no authentication and belongs on a private network.
"""

import datetime
import importlib
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, Self, cast

import torch
import xxhash
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, ProcessGroupGloo, Store, TCPStore, Work

from protocol.fleet import Backend, BucketSpec, TensorSpec

ALIGNMENT = 16
"""Offsets are multiples of this many bytes, so that any element type can be viewed in place."""

NamedTensors = Sequence[tuple[str, torch.Tensor]]


class WeightPlaneError(RuntimeError):
    """A broadcast, or the meeting before it, failed or took too long."""


@dataclass(frozen=True)
class Bucket:
    """What one broadcast carries: its plan, and its bytes [nbytes] uint8."""

    spec: BucketSpec
    data: torch.Tensor


def pack_buckets(tensors: NamedTensors, *, bucket_bytes: int) -> list[Bucket]:
    """All tensors in order, in buckets of about `bucket_bytes`; a tensor is never split over two."""
    return [_pack(part) for part in _split(tensors, bucket_bytes)]


def _split(tensors: NamedTensors, bucket_bytes: int) -> Iterator[NamedTensors]:
    part: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in tensors:
        if part and size + _padded(tensor.nbytes) > bucket_bytes:
            yield part
            part, size = [], 0
        part.append((name, tensor))
        size += _padded(tensor.nbytes)
    if part:
        yield part


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _pack(part: NamedTensors) -> Bucket:
    data = torch.zeros(sum(_padded(tensor.nbytes) for _, tensor in part), dtype=torch.uint8)
    specs = []
    offset = 0
    for name, tensor in part:
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        data[offset : offset + flat.numel()].copy_(flat)
        dtype = str(tensor.dtype).removeprefix("torch.")
        specs.append(TensorSpec(name=name, dtype=dtype, shape=tuple(tensor.shape), offset=offset))
        offset += _padded(flat.numel())
    digest = xxhash.xxh3_64_hexdigest(data.numpy().data)
    return Bucket(spec=BucketSpec(nbytes=data.numel(), xxh3=digest, tensors=tuple(specs)), data=data)


class Meeting:
    """Where the members of one epoch meet: a listening store on one address. `port` is chosen by the system."""

    def __init__(self, *, host: str, epoch: int, world_size: int, timeout_s: float) -> None:
        self.host = host
        self.epoch = epoch
        self.world_size = world_size
        self._timeout = datetime.timedelta(seconds=timeout_s)
        # A TCPStore that opens its own socket listens on every address of the machine.
        with socket.create_server((host, 0)) as listener:
            self.port = int(listener.getsockname()[1])
            self._store = TCPStore(
                host, self.port, world_size, True, self._timeout, wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )  # fmt: skip

    def join(self, *, backend: Backend) -> "BroadcastGroup":
        """Blocks until all members have come. Raises WeightPlaneError after the timeout."""
        store = PrefixStore(f"headway-{self.epoch}", self._store)
        try:
            group = _process_group(store, backend, self.host, self.world_size, self._timeout)
        except (RuntimeError, ValueError) as error:
            message = (
                f"epoch {self.epoch}: the {self.world_size} members of the process group did not all meet: {error}"
            )
            raise WeightPlaneError(message) from error
        return BroadcastGroup(group=group, device="cuda" if backend == "nccl" else "cpu", store=self._store)


class _Broadcaster(Protocol):
    """What is used of torch's process groups; their stubs leave it out."""

    def broadcast(self, tensors: list[torch.Tensor], options: BroadcastOptions) -> Work: ...


def _process_group(
    store: Store, backend: Backend, host: str, world_size: int, timeout: datetime.timedelta
) -> _Broadcaster:
    # By name: a build of torch without CUDA has no ProcessGroupNCCL, and the stubs know neither's options.
    kinds = importlib.import_module("torch.distributed")
    if backend == "nccl":
        kind = kinds.ProcessGroupNCCL
        options = kind.Options()
    else:
        kind = kinds.ProcessGroupGloo
        options = kind._Options()
        options._devices = [ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timeout
    return cast("Callable[..., _Broadcaster]", kind)(store, 0, world_size, options)


class BroadcastGroup:
    """The learner (rank 0) and the workers of the generators of one epoch."""

    def __init__(self, *, group: _Broadcaster, device: str, store: Store) -> None:
        self._group: _Broadcaster | None = group
        self._device = device
        self._store: Store | None = store  # lives as long as the group: members look each other up in it

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, buckets: Sequence[Bucket], *, timeout_s: float) -> None:
        """Broadcasts the buckets in order; blocks. Raises WeightPlaneError at the first that takes over `timeout_s`.

        After an error the group must not be used again: its members are at different buckets.
        """
        if self._group is None:
            raise WeightPlaneError("the process group was closed")
        options = BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        # The group's own timeout is that of the meeting. A wait that gives up earlier leaves gloo's thread in the
        # broadcast until then, and dropping the group waits for that thread.
        options.timeout = datetime.timedelta(seconds=timeout_s)
        for index, bucket in enumerate(buckets):
            try:
                work = self._group.broadcast([bucket.data.to(self._device)], options)
                work.wait(datetime.timedelta(seconds=timeout_s))
            except RuntimeError as error:
                raise WeightPlaneError(f"bucket {index + 1} of {len(buckets)} was not taken by all: {error}") from error

    def close(self) -> None:
        """Lets go of the group; may block until a broadcast that failed has come to its own timeout.

        Never `abort()`: it releases nobody who waits in a gloo broadcast.
        """
        self._group = None
        self._store = None
