"""A rank's part in publishing, on the ranks other than 0: it keeps its share of the weights, and hashes and sends it.

    rank 0, event loop ── hash, meet, send, read ──▶ HTTP, a thread of its own ──▶ copies ◀── the trainer's thread
                                                                  └─ broadcasts to all generators, in its own group

No rank and no host needs the whole model for that. Rank 0 asks; nothing is decided here. The server is the ranks' own,
on the interface towards rank 0, with a token that only they know.
"""

import asyncio
import contextlib
import json
import logging
import secrets
import threading
from collections.abc import Collection, Sequence
from datetime import timedelta
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated

from fastapi import Depends, FastAPI, Query, Response
from pydantic import SecretStr
from torch._C._distributed_c10d import Store

from learner.weights.digests import hashed
from learner.weights.process_group import Bucket, LaidOut, MeetingElsewhere, ProcessGroupError, joined, send_each
from learner.weights.slices import Slicer, SlicesUnfit
from protocol.fleet import Backend, BucketSpec, SliceLayout
from protocol.model import WireModel
from protocol.status import Readiness
from services.http.app import create_app
from services.http.bodies import json_answer, json_body
from services.http.metrics import Metrics
from services.http.refusals import RequestRefused
from services.http.server import Listener, serve_http
from services.process import DaemonThreads

if TYPE_CHECKING:
    from learner.weights.process_group import BroadcastGroup

logger = logging.getLogger(__name__)

_REGISTERED_WITHIN = timedelta(seconds=20)
_CLOSED_WITHIN_S = 5.0


class HashedCopy(WireModel):
    """The buckets of a rank's copy, and the digests of their tensors by name."""

    buckets: tuple[BucketSpec, ...]
    digests: dict[str, str]


class HashOrder(WireModel):
    """Request to hash a copy; `for_devices` as in `LaidOut.hashed`."""

    for_devices: bool


class SliceOrder(WireModel):
    """Request to cut slices of a copy, and to hash them."""

    layout: SliceLayout


class SlicedCopy(WireModel):
    """The buckets of slices of a rank's copy, for each worker."""

    workers: tuple[tuple[BucketSpec, ...], ...]


class SenderMeeting(WireModel):
    """Request to meet all generators of an epoch, in a group whose rank 0 is the rank that is asked; or in `sliced`
    groups, one for each worker of a generator.
    """

    host: str
    port: int
    epoch: int
    world_size: int
    backend: Backend
    timeout_s: float
    sliced: int = 0


class SendOrder(WireModel):
    """Request to broadcast these buckets of a copy, in order, in the group of an epoch; or its slices, in theirs."""

    epoch: int
    buckets: tuple[int, ...]
    timeout_s: float
    sliced: bool = False


class SenderAnswer(WireModel):
    """The end of what was asked for."""

    nbytes: int = 0


class SenderPlace(WireModel):
    """The address of a rank's server, and its token."""

    url: str
    token: str


class RankCopies:
    """Copies of a rank's share of the weights by number, written by the trainer's thread and read by the sender's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._copies: dict[int, tuple[LaidOut, ...]] = {}

    def keep_only(self, numbers: Collection[int]) -> None:
        """Forgets all others, whose memory is then free for the next copy."""
        with self._lock:
            self._copies = {number: copy for number, copy in self._copies.items() if number in numbers}

    def put(self, number: int, copy: tuple[LaidOut, ...]) -> None:
        """Keeps a copy until it is not among those to be kept."""
        with self._lock:
            self._copies[number] = copy

    def of(self, number: int) -> tuple[LaidOut, ...]:
        """The copy of that number. Raises LookupError."""
        with self._lock:
            return self._copies[number]


class RankSender:
    """Sends what is in `copies` for rank `rank`. `close` ends its server; a process that ends need not wait for it."""

    def __init__(self, copies: RankCopies, *, rank: int, host: str) -> None:
        self._copies = copies
        self._rank = rank
        self._threads = DaemonThreads(name="rank-sender")
        self._epoch = 0
        self._groups: Sequence[BroadcastGroup] = ()
        self._slicer = Slicer()
        self._slices: Sequence[Sequence[Bucket]] = ()
        self._listener = Listener(host=host, port=0)
        self.place = SenderPlace(url=self._listener.url, token=secrets.token_urlsafe(24))
        self._loop = asyncio.new_event_loop()
        self._ended = asyncio.Event()
        app = self._app()  # FastAPI's ways with warnings are not those of several threads
        self._thread = threading.Thread(target=self._serve, args=(app,), name="rank-sender", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the server; of one that has ended, nothing."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._ended.set)
            self._thread.join(timeout=_CLOSED_WITHIN_S)

    def register(self, store: Store) -> None:
        """Tells rank 0 the place of this server, over the ranks' store."""
        store.set(_key(self._rank), self.place.model_dump_json())

    def _serve(self, app: FastAPI) -> None:
        with self._listener, asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._until_the_end(app))

    async def _until_the_end(self, app: FastAPI) -> None:
        serving = asyncio.create_task(serve_http(app, self._listener, finish_s=1))
        ended = asyncio.create_task(self._ended.wait())
        await asyncio.wait({serving, ended}, return_when=asyncio.FIRST_COMPLETED)
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving
        self._drop()

    def _app(self) -> FastAPI:
        app = create_app(
            service="learner", version=version("headway"), token=SecretStr(self.place.token),
            readiness=lambda: Readiness(ready=True), metrics=Metrics("learner"),
        )  # fmt: skip

        @app.post("/v1/copies/{number}/hash")
        async def hash_copy(number: int, body: Annotated[HashOrder, Depends(json_body(HashOrder))]) -> Response:
            buckets, digests = await hashed(
                self._copy(number), threads=self._threads, sender=self._rank, for_devices=body.for_devices
            )
            return json_answer(HashedCopy(buckets=tuple(bucket.spec for bucket in buckets), digests=digests))

        @app.post("/v1/copies/{number}/slices")
        async def cut(number: int, body: Annotated[SliceOrder, Depends(json_body(SliceOrder))]) -> Response:
            self._slices = ()
            try:
                self._slices = await self._slicer.hashed(
                    self._copy(number), body.layout, threads=self._threads, sender=self._rank
                )
            except SlicesUnfit as error:
                raise RequestRefused(409, "slices_unfit", str(error)) from error
            specs = tuple(tuple(bucket.spec for bucket in share) for share in self._slices)
            return json_answer(SlicedCopy(workers=specs))

        @app.get("/v1/copies/{number}/buckets/{index}")
        async def read(
            number: int, index: int, offset: Annotated[int, Query(ge=0)], length: Annotated[int, Query(gt=0)]
        ) -> Response:
            data = self._copy(number)[index].data[offset : offset + length]
            return Response(data.numpy().tobytes(), media_type="application/octet-stream")

        @app.post("/v1/group")
        async def meet(body: Annotated[SenderMeeting, Depends(json_body(SenderMeeting))]) -> Response:
            await self._meet(body)
            return json_answer(SenderAnswer())

        @app.post("/v1/copies/{number}/send")
        async def send(number: int, body: Annotated[SendOrder, Depends(json_body(SendOrder))]) -> Response:
            sending = self._send_slices(body) if body.sliced else self._send(self._copy(number), body)
            return json_answer(SenderAnswer(nbytes=await sending))

        return app

    def _copy(self, number: int) -> tuple[LaidOut, ...]:
        try:
            return self._copies.of(number)
        except LookupError:
            message = f"rank {self._rank} does not keep copy {number} of the weights any more, or not yet"
            raise RequestRefused(404, "not_kept", message) from None

    async def _meet(self, asked: SenderMeeting) -> None:
        self._drop()
        self._epoch = asked.epoch
        meeting = MeetingElsewhere(
            host=asked.host, port=asked.port, epoch=asked.epoch, sender=self._rank, world_size=asked.world_size,
            timeout_s=asked.timeout_s,
        )  # fmt: skip
        try:
            groups = await joined(meeting, backend=asked.backend, sliced=asked.sliced, threads=self._threads)
        except ProcessGroupError as error:
            raise RequestRefused(409, "group_failed", str(error)) from error
        if self._epoch == asked.epoch:
            self._groups = groups
        else:  # rank 0 has moved on
            self._close(groups)

    async def _send(self, copy: Sequence[LaidOut], asked: SendOrder) -> int:
        return await self._broadcast([[_unhashed(copy[index]) for index in asked.buckets]], asked)

    async def _send_slices(self, asked: SendOrder) -> int:
        slices, self._slices = self._slices, ()
        return await self._broadcast(slices, asked)

    async def _broadcast(self, shares: Sequence[Sequence[Bucket]], asked: SendOrder) -> int:
        groups = self._groups
        if len(groups) != len(shares) or self._epoch != asked.epoch:
            raise RequestRefused(409, "wrong_epoch", f"rank {self._rank} has no group of epoch {asked.epoch}")
        try:
            await send_each(groups, shares, timeout_s=asked.timeout_s, threads=self._threads)
        except ProcessGroupError as error:
            self._drop()
            raise RequestRefused(409, "send_failed", str(error)) from error
        return sum(bucket.spec.nbytes for share in shares for bucket in share)

    def _drop(self) -> None:
        self._close(self._groups)
        self._groups = ()

    def _close(self, groups: "Sequence[BroadcastGroup]") -> None:
        for group in groups:
            self._threads.start(group.close)


def _unhashed(laid_out: LaidOut) -> Bucket:
    """For sending, which looks at the bytes alone."""
    return Bucket(spec=BucketSpec(nbytes=laid_out.data.numel(), xxh3="", tensors=laid_out.tensors), data=laid_out.data)


def _key(rank: int) -> str:
    return f"sender/{rank}"


def sender_place(store: Store, *, rank: int) -> SenderPlace:
    """The place that a rank's sender has registered. Raises torch.distributed.DistError if it has not within 20 s."""
    store.wait([_key(rank)], _REGISTERED_WITHIN)
    return SenderPlace.model_validate(json.loads(store.get(_key(rank))))
