"""The learner's end of the broadcast: weights laid out in buckets, sent over a process group by threads of its own.

A bucket is one tensor of bytes: the tensors' contiguous bytes one after another, each at the offset that its
`TensorSpec` names. The process group is private: not torch's default group, on the configured address only, and
thrown away after any failure. It carries no authentication and belongs on a private network.
"""

import asyncio
import datetime
import importlib
import math
import os
import socket
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from operator import add
from typing import Any, Protocol, Self, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, ProcessGroupGloo, Store, TCPStore, Work

from learner.weights.shared_files import SharedFile, SharedFiles
from protocol.fleet import BUCKET_ALIGNMENT, MEETING_BYTES, Backend, BucketSpec, TensorBox, TensorSpec, group_name
from services.collective_errors import in_plain_words
from services.nccl import environment_of_nccl, failure_of
from services.network import BACKLOG, local_address, wait_for_listener
from services.process import DaemonThreads, WrongSettings
from services.tensor_hash import tensor_hash

_NCCL_POLL_S = 0.001

NamedTensors = Sequence[tuple[str, torch.Tensor]]
T = TypeVar("T")


class ProcessGroupError(RuntimeError):
    """A broadcast, or the meeting before it, failed or took too long."""


@dataclass(frozen=True)
class Bucket:
    """The content of a broadcast: its plan, and its bytes [nbytes] uint8; with a `file`, that begins with them."""

    spec: BucketSpec
    data: torch.Tensor
    file: SharedFile | None = None

    async def read(self, offset: int, length: int) -> bytes:
        """A part of the bytes."""
        return self.data[offset : offset + length].numpy().tobytes()


@dataclass(frozen=True)
class LaidOut:
    """A bucket whose hash is not known yet: where its tensors lie, and its bytes [nbytes] uint8; `file` as of it."""

    tensors: tuple[TensorSpec, ...]
    data: torch.Tensor
    file: SharedFile | None = None

    def named(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Its tensors where they lie."""
        for spec in self.tensors:
            yield spec.name, _place(self.data, spec)

    def hashed(self, *, sender: int = 0, for_devices: bool = False) -> Bucket:
        """The same bytes, with their hash, and with that which devices compute."""
        digest = xxhash.xxh3_64_hexdigest(self.data.numpy().data)
        there = _hash_for_devices(self.data) if for_devices else ""
        spec = BucketSpec(nbytes=self.data.numel(), xxh3=digest, tensors=self.tensors, sender=sender, device_hash=there)
        return Bucket(spec=spec, data=self.data, file=self.file)


@dataclass(frozen=True)
class BucketRoom:
    """Memory of a bucket, uint8, which is that of a `file` if there is one."""

    data: torch.Tensor
    file: SharedFile | None = None


@dataclass(frozen=True)
class _FreeRoom:
    """Memory that nobody uses."""

    bytes: npt.NDArray[np.uint8]
    file: SharedFile | None = None


class Rooms:
    """Host memory of buckets, which comes back when the last tensor in it is let go of, from whatever thread.

    Kept is that of one version, beside what is in use. Freed and asked for anew it would come in other places each
    time, since smaller things take theirs between: a heap that grows to several versions, and is touched for the first
    time in each step. With `shared` it is such that generators of this host can map, as far as there is any: what one
    may still read is not used again, and is freed with the last tensor in it.
    """

    def __init__(self, *, shared: bool = False) -> None:
        self._free: deque[_FreeRoom] = deque()
        self._most = 0
        self._files = SharedFiles() if shared else None

    def __len__(self) -> int:
        """Number of buffers that are kept and not in use."""
        return len(self._free)

    def take(self, nbytes: int) -> BucketRoom:
        """So much uninitialised memory; pinned if there is a GPU, which copies by way of such, unless it is shared."""
        if torch.cuda.is_available() and self._files is None:
            # torch keeps what is freed of it
            return BucketRoom(torch.empty(nbytes, dtype=torch.uint8, pin_memory=True))
        room = self._returned(nbytes)
        lent = room.bytes[:]
        weakref.finalize(lent, self._give_back, room).atexit = False
        return BucketRoom(torch.from_numpy(lent), room.file)

    def keep(self, most: int) -> None:
        """From now on at most so many are kept."""
        self._most = most

    def _returned(self, nbytes: int) -> _FreeRoom:
        for _ in range(len(self._free)):
            room = self._free.popleft()
            if room.bytes.nbytes == nbytes:
                return room
            self._free.append(room)
        file = None if self._files is None else self._files.make(nbytes)
        return _FreeRoom(np.empty(nbytes, dtype=np.uint8) if file is None else file.mapped(), file)

    def _give_back(self, room: _FreeRoom) -> None:
        is_read = room.file is not None and room.file.is_lent
        if len(self._free) < self._most and not is_read:
            self._free.append(room)


class BucketWriter:
    """Copies tensors, one after another, to where they are sent from: buckets of about `bucket_bytes`, in `rooms`.

    A tensor is never split over two; one that is larger has a bucket to itself.
    """

    def __init__(self, *, bucket_bytes: int, rooms: Rooms | None = None) -> None:
        self._bucket_bytes = bucket_bytes
        self._rooms = Rooms() if rooms is None else rooms
        self._ended: list[LaidOut] = []
        self._specs: list[TensorSpec] = []
        self._room = BucketRoom(torch.empty(0, dtype=torch.uint8))
        self._used = 0

    def add(self, name: str, value: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
        """The copy of `value`, from whatever device, as `dtype`: contiguous, on the CPU, within a bucket."""
        self._make_room(_padded(value, dtype))
        return self._put(
            TensorSpec(name=name, dtype=_name_of(dtype), shape=tuple(value.shape), offset=self._used), value
        )

    def add_parts(self, name: str, value: torch.Tensor, boxes: Sequence[TensorBox]) -> None:
        """Copies of these parts of a tensor, one after another within a bucket."""
        parts = [value[tuple(map(slice, box.start, map(add, box.start, box.shape)))] for box in boxes]
        self._make_room(sum(_padded(part, value.dtype) for part in parts))
        for box, part in zip(boxes, parts, strict=True):
            spec = TensorSpec(
                name=name, dtype=_name_of(value.dtype), shape=box.shape, offset=self._used, start=box.start,
                whole=tuple(value.shape),
            )  # fmt: skip
            self._put(spec, part)

    def _make_room(self, padded: int) -> None:
        if self._specs and self._used + padded > self._bucket_bytes:
            self._end()
        if not self._specs:
            # Of one size, so that the next version fits into it: what is not used of it is never touched.
            self._room = self._rooms.take(max(padded, self._bucket_bytes))

    def _put(self, spec: TensorSpec, value: torch.Tensor) -> torch.Tensor:
        place = _place(self._room.data, spec)
        place.copy_(value.detach())
        end = self._used + _padded(place, place.dtype)
        self._room.data[self._used + place.nbytes : end].zero_()  # the padding is hashed and sent, too
        self._specs.append(spec)
        self._used = end
        return place

    def buckets(self) -> tuple[LaidOut, ...]:
        """All that was added. Nothing can be added any more."""
        if self._specs:
            self._end()
        self._room = BucketRoom(torch.empty(0, dtype=torch.uint8))
        self._rooms.keep(len(self._ended))
        return tuple(self._ended)

    def _end(self) -> None:
        data = self._room.data[: self._used]
        self._ended.append(LaidOut(tensors=tuple(self._specs), data=data, file=self._room.file))
        self._specs, self._used = [], 0


def lay_out(tensors: NamedTensors, *, bucket_bytes: int) -> tuple[LaidOut, ...]:
    """Copies of these tensors in order, in buckets of about `bucket_bytes`."""
    writer = BucketWriter(bucket_bytes=bucket_bytes)
    for name, tensor in tensors:
        writer.add(name, tensor, dtype=tensor.dtype)
    return writer.buckets()


def pack_buckets(tensors: NamedTensors, *, bucket_bytes: int) -> list[Bucket]:
    """As `lay_out`, with hashes: what can be sent."""
    return [bucket.hashed() for bucket in lay_out(tensors, bucket_bytes=bucket_bytes)]


def _hash_for_devices(data: torch.Tensor) -> str:
    """On the GPU if there is one: the way there and back takes less time than a CPU does."""
    return tensor_hash(data.to("cuda") if torch.cuda.is_available() else data)


def _padded(value: torch.Tensor, dtype: torch.dtype) -> int:
    return -(-value.numel() * dtype.itemsize // BUCKET_ALIGNMENT) * BUCKET_ALIGNMENT


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _place(data: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, spec.dtype)
    end = spec.offset + math.prod(spec.shape) * dtype.itemsize
    return data[spec.offset : end].view(dtype).view(spec.shape)


class MeetingPlace:
    """A store that listens on one address, at `port`; 0: the system chooses.

    Epochs may share one: what is left of a former epoch, which may still be closing, is under a name of its own.
    """

    def __init__(self, *, host: str, port: int = 0, timeout_s: float) -> None:
        self.host = host
        timeout = datetime.timedelta(seconds=timeout_s)
        # A TCPStore that opens its own socket listens on every address of the machine.
        with _listening(host, port) as listener:
            self.port = int(listener.getsockname()[1])
            self.store = TCPStore(
                host, self.port, None, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach()
            )


def _listening(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), backlog=BACKLOG)
    except OSError as error:
        if not port:
            raise
        remedy = "stop what listens there, or set another weights.port (0: any that is free)"
        message = (
            f"cannot listen on {host}:{port} for meetings with generators: {os.strerror(error.errno or 0)}: {remedy}"
        )
        raise WrongSettings(message) from error


class Meeting:
    """Meeting of the members of one epoch: at `place`, or else at one of its own, at any port."""

    def __init__(
        self, *, host: str, epoch: int, world_size: int, timeout_s: float, place: MeetingPlace | None = None
    ) -> None:
        self.host = host
        self.epoch = epoch
        self.world_size = world_size
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self._place = place or MeetingPlace(host=host, timeout_s=timeout_s)
        self.port = self._place.port
        # A connection of its own: one in which a former epoch still waits for somebody would keep this one waiting.
        self._store = self._place.store if place is None else self._connected()

    def _connected(self) -> Store:
        return TCPStore(self.host, self.port, None, False, self._timeout, wait_for_workers=False)

    def join(self, *, backend: Backend, worker: int | None = None) -> "BroadcastGroup":
        """Blocks until all members have come; to the group for one worker's slices, if that is given. Raises
        ProcessGroupError after the timeout.
        """
        try:
            # A wait in a store keeps all that use the connection waiting.
            kept = self._store if not worker else self._connected()
            store = PrefixStore(group_name(self.epoch, worker=worker), kept)
            group = _process_group(store, backend, self.host, self.world_size, self._timeout)
        except (RuntimeError, ValueError) as error:
            message = (
                f"connection {self.epoch}: of the learner and its generators, {self.world_size} processes, not all "
                f"came to {self.host}:{self.port}: {in_plain_words(error)}"
            )
            raise ProcessGroupError(message) from error
        return _met(group, backend, kept, self._timeout)


@dataclass(frozen=True)
class MeetingElsewhere:
    """Meeting of one more `sender` of an epoch, another rank of the learner, with all generators: at rank 0's place."""

    host: str
    port: int
    epoch: int
    sender: int
    world_size: int
    timeout_s: float

    def join(self, *, backend: Backend, worker: int | None = None) -> "BroadcastGroup":
        """As of a `Meeting`."""
        timeout = datetime.timedelta(seconds=self.timeout_s)
        try:
            wait_for_listener(host=self.host, port=self.port, timeout_s=self.timeout_s)
            store = TCPStore(self.host, self.port, None, False, timeout, wait_for_workers=False)
            own = local_address(host=self.host, port=self.port)
            named = PrefixStore(group_name(self.epoch, self.sender, worker), store)
            group = _process_group(named, backend, own, self.world_size, timeout)
        except (RuntimeError, ValueError, OSError) as error:
            message = (
                f"connection {self.epoch}: of the learner's rank {self.sender} and the generators, {self.world_size} "
                f"processes, not all came to {self.host}:{self.port}: {in_plain_words(error)}"
            )
            raise ProcessGroupError(message) from error
        return _met(group, backend, store, timeout)


def _met(group: "_Broadcaster", backend: Backend, store: Store, timeout: datetime.timedelta) -> "BroadcastGroup":
    made = BroadcastGroup(group=group, device="cuda" if backend == "nccl" else "cpu", store=store)
    if backend == "nccl":
        with environment_of_nccl(timeout_s=timeout.total_seconds()):
            made.meet(timeout_s=timeout.total_seconds())
    return made


class _Broadcaster(Protocol):
    """The used part of torch's process groups; their stubs leave it out."""

    def broadcast(self, tensors: list[torch.Tensor], options: BroadcastOptions) -> Work: ...

    def abort(self) -> None: ...


def _process_group(
    store: Store, backend: Backend, host: str, world_size: int, timeout: datetime.timedelta
) -> _Broadcaster:
    # By name: a build of torch without CUDA has no ProcessGroupNCCL, and the stubs know neither's options.
    kinds = importlib.import_module("torch.distributed")
    if backend == "nccl":
        kind = kinds.ProcessGroupNCCL
        options = kind.Options()
        options._timeout = timeout
        with environment_of_nccl(timeout_s=timeout.total_seconds()):
            return cast("Callable[..., _Broadcaster]", kind)(store, 0, world_size, options)
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
        """Broadcasts the buckets in order; blocks. Raises ProcessGroupError at the first that takes over `timeout_s`.

        After an error the group must not be used again: its members are at different buckets.
        """
        for index, bucket in enumerate(buckets):
            try:
                self._broadcast(bucket.data.to(self._device), timeout_s=timeout_s)
            except RuntimeError as error:
                raise ProcessGroupError(
                    f"bucket {index + 1} of {len(buckets)} was not taken by all: {in_plain_words(error)}"
                ) from error

    def meet(self, *, timeout_s: float) -> None:
        """NCCL connects at the first broadcast, and not when the group is made: a tiny one belongs to the meeting."""
        try:
            self._broadcast(torch.zeros(MEETING_BYTES, dtype=torch.uint8, device=self._device), timeout_s=timeout_s)
        except RuntimeError as error:
            raise ProcessGroupError(
                f"the members of the process group did not all meet: {in_plain_words(error)}"
            ) from error

    def _broadcast(self, data: torch.Tensor, *, timeout_s: float) -> None:
        """Raises RuntimeError."""
        if self._group is None:
            raise ProcessGroupError("the process group was closed")
        options = BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        # The group's own timeout is that of the meeting. A wait that gives up earlier leaves gloo's thread in the
        # broadcast until then, and dropping the group waits for that thread.
        options.timeout = datetime.timedelta(seconds=timeout_s)
        work = self._group.broadcast([data], options)
        if self._device == "cpu":
            work.wait(datetime.timedelta(seconds=timeout_s))
            return
        # NCCL's own wait blocks a stream and not this thread.
        deadline = time.monotonic() + timeout_s
        while not work.is_completed():
            if time.monotonic() > deadline:
                self._group.abort()  # its kernel would wait on the GPU for ever
                raise RuntimeError(f"it was not through after {timeout_s:g} s")
            time.sleep(_NCCL_POLL_S)
        if failure := failure_of(work):
            self._group.abort()
            raise RuntimeError(failure)

    def close(self) -> None:
        """Lets go of the group; may block until a broadcast that failed has come to its own timeout.

        Never `abort()` for gloo: it releases nobody who waits in a broadcast.
        """
        self._group = None
        self._store = None


async def joined(
    meeting: "Meeting | MeetingElsewhere", *, backend: Backend, sliced: int, threads: DaemonThreads
) -> "Sequence[BroadcastGroup]":
    """The group of a meeting, or those for the slices of so many workers. Raises ProcessGroupError."""
    workers = range(sliced) if sliced else (None,)
    works = [in_thread(partial(meeting.join, backend=backend, worker=worker), threads=threads) for worker in workers]
    found = await asyncio.gather(*works, return_exceptions=True)
    groups = [group for group in found if isinstance(group, BroadcastGroup)]
    for error in found:
        if isinstance(error, BaseException):
            for group in groups:
                threads.start(group.close)
            raise error
    return groups


async def send_each(
    groups: "Sequence[BroadcastGroup]", shares: Sequence[Sequence[Bucket]], *, timeout_s: float, threads: DaemonThreads
) -> None:
    """Broadcasts a share in each group, beside each other. Raises ProcessGroupError when all have ended."""
    works = [
        in_thread(partial(group.send, share, timeout_s=timeout_s), threads=threads)
        for group, share in zip(groups, shares, strict=True)
    ]
    for error in await asyncio.gather(*works, return_exceptions=True):
        if isinstance(error, BaseException):
            raise error


async def in_thread(work: Callable[[], T], *, threads: DaemonThreads) -> T:
    """Runs `work` in a daemon thread: a stop waits for no collective, which ends by its own timeout, unheard."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def call() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - it crosses to the awaiting task, which raises it
            future.set_exception(error)

    threads.start(call)
    return await asyncio.wrap_future(future)


async def collective_beside(
    collective: Coroutine[Any, Any, T],
    asked: "Collection[asyncio.Future[object]]",
    *,
    answer_s: float,
    grace_s: float,
) -> T | Exception:
    """The learner's part of a collective, beside the members' requests; its result or its error.

    Returns when all have answered; or else `answer_s` seconds after the collective went through, and `grace_s` after it
    failed. A request that has no answer by then is cancelled.
    """
    ours = asyncio.ensure_future(collective)
    try:
        answers = asyncio.gather(*asked, return_exceptions=True)
        either: set[asyncio.Future[Any]] = {ours, answers}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if ours.done():
            await asyncio.wait({answers}, timeout=grace_s if ours.exception() else answer_s)
        failed = any(not one.done() or one.exception() for one in asked)
        if failed and not ours.done():
            return TimeoutError("not all members take part")  # without them it can only time out
        return await ours
    except Exception as error:  # noqa: BLE001 - what a collective raises is its caller's to judge
        return error
    finally:
        for one in asked:
            one.cancel()
        ours.cancel()
        ours.add_done_callback(_heard)


def _heard(task: "asyncio.Future[T]") -> None:
    """Its error is known or of no interest; asyncio complains of errors that nobody looks at."""
    if not task.cancelled():
        task.exception()
