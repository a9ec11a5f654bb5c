"""Other ranks' shares of a version, as rank 0 has them hashed, sent and read: whatever it publishes or is asked for.

The order of buckets lets the ranks take turns, by the share of its own that each has sent.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from learner.weights.process_group import Bucket, LaidOut, ProcessGroupError, send_each
from learner.weights.rank_sender import (
    HashedCopy,
    HashOrder,
    SenderAnswer,
    SenderMeeting,
    SenderPlace,
    SendOrder,
    SlicedCopy,
    SliceOrder,
)
from learner.weights.slices import SlicedWeights, Slicer, SlicesUnfit
from protocol.fleet import Backend, BucketSpec, SliceLayout
from services.http.client import HttpClient, R, ServiceError, ServiceRefused
from services.process import DaemonThreads

if TYPE_CHECKING:
    from learner.weights.process_group import BroadcastGroup
    from learner.weights.published import PackedWeights

READ_BYTES = 4 << 20
"""Most bytes that are read of another rank at once."""
_ASK_S = 10.0
_HASH_BYTES_PER_S = 1e8
"""Least rate of hashing on a busy machine."""


class SenderLost(ProcessGroupError):
    """A rank of the learner does not do its part: no generator is to blame for that."""


class CopyTicket:
    """While it is alive the ranks keep the copy of its number."""

    def __init__(self, number: int) -> None:
        self.number = number


@dataclass(frozen=True, eq=False)
class CopyShare:
    """Share of a copy that another rank keeps: about `nbytes`, and the place of that rank's sender."""

    rank: int
    nbytes: int
    place: SenderPlace
    ticket: CopyTicket


@dataclass(frozen=True)
class MeetingTerms:
    """Meeting of an epoch, as all senders are told of it."""

    host: str
    port: int
    epoch: int
    world_size: int
    backend: Backend
    timeout_s: float
    sliced: int = 0


@dataclass(frozen=True, eq=False)
class SenderLink:
    """Requests to the sender of a rank's share."""

    share: CopyShare
    client: HttpClient = field(repr=False)

    @property
    def rank(self) -> int:
        return self.share.rank

    @property
    def url(self) -> str:
        return self.share.place.url

    async def hashed(self, *, for_devices: bool = False) -> tuple[Sequence["RemoteBucket"], dict[str, str]]:
        """Its buckets, and the digests of their tensors by name. Raises SenderLost."""
        found = await self._ask(
            "hash", HashOrder(for_devices=for_devices), HashedCopy, deadline_s=hashing_s(self.share.nbytes)
        )
        return [RemoteBucket(spec, self, index) for index, spec in enumerate(found.buckets)], dict(found.digests)

    async def meet(self, meeting: MeetingTerms) -> None:
        """Returns when it has met all generators. Raises ProcessGroupError."""
        body = SenderMeeting(**vars(meeting))
        await self._post(f"{self.url}/v1/group", body, SenderAnswer, deadline_s=2 * meeting.timeout_s + _ASK_S)

    async def send(self, buckets: Sequence["RemoteBucket"], *, epoch: int, timeout_s: float) -> None:
        """Returns when all generators have taken these. Raises ProcessGroupError."""
        body = SendOrder(epoch=epoch, buckets=tuple(bucket.index for bucket in buckets), timeout_s=timeout_s)
        await self._ask("send", body, SenderAnswer, deadline_s=timeout_s * (len(buckets) + 1) + _ASK_S)

    async def sliced(self, layout: SliceLayout) -> "Sequence[Sequence[RemoteBucket]]":
        """Slices of its copy, for each worker. Raises SenderLost, and SlicesUnfit."""
        deadline_s = hashing_s(self.share.nbytes * len(layout.workers))
        found = await self._ask("slices", SliceOrder(layout=layout), SlicedCopy, deadline_s=deadline_s)
        return [[RemoteBucket(spec, self, at) for at, spec in enumerate(specs)] for specs in found.workers]

    async def send_slices(self, *, count: int, epoch: int, timeout_s: float) -> None:
        """Returns when all generators have taken the slices that it cut, `count` buckets. Raises ProcessGroupError."""
        body = SendOrder(epoch=epoch, buckets=(), timeout_s=timeout_s, sliced=True)
        await self._ask("send", body, SenderAnswer, deadline_s=timeout_s * (count + 1) + _ASK_S)

    async def check(self, *, deadline_s: float) -> None:
        """Returns if it answers at all. Raises SenderLost."""
        try:
            await self.client.download(f"{self.url}/healthz", deadline_s=deadline_s, headers=self._headers)
        except ServiceError as error:
            raise SenderLost(f"rank {self.rank} of the learner does not answer: {error}") from error

    async def read(self, index: int, offset: int, length: int) -> bytes:
        """A part of a bucket. Raises ServiceError."""
        url = f"{self._copy}/buckets/{index}?offset={offset}&length={length}"
        data, _ = await self.client.download(url, deadline_s=_ASK_S, headers=self._headers)
        return data

    @property
    def _copy(self) -> str:
        return f"{self.url}/v1/copies/{self.share.ticket.number}"

    @property
    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.share.place.token}"}

    async def _ask(self, what: str, body: Any, answer: type[R], *, deadline_s: float) -> R:
        return await self._post(f"{self._copy}/{what}", body, answer, deadline_s=deadline_s)

    async def _post(self, url: str, body: Any, answer: type[R], *, deadline_s: float) -> R:
        try:
            return await self.client.post(url, body, answer, deadline_s=deadline_s, headers=self._headers)
        except ServiceRefused as error:
            if error.kind == "slices_unfit":
                raise SlicesUnfit(error.message) from error
            kind = ProcessGroupError if error.kind in ("group_failed", "send_failed") else SenderLost
            raise kind(f"rank {self.rank}: {error.message}") from error
        except ServiceError as error:
            raise SenderLost(f"rank {self.rank} of the learner does not answer: {error}") from error


@dataclass(frozen=True, eq=False)
class RemoteBucket:
    """A bucket whose bytes another rank has."""

    spec: BucketSpec
    link: SenderLink
    index: int

    async def read(self, offset: int, length: int) -> bytes:
        """A part of the bytes. Raises ServiceError."""
        return await self.link.read(self.index, offset, length)

    async def brought_here(self) -> Bucket:
        """The bucket as rank 0's own. Raises ServiceError."""
        data = torch.empty(self.spec.nbytes, dtype=torch.uint8)
        for offset in range(0, self.spec.nbytes, READ_BYTES):
            part = await self.read(offset, min(READ_BYTES, self.spec.nbytes - offset))
            data[offset : offset + len(part)] = torch.frombuffer(bytearray(part), dtype=torch.uint8)
        return Bucket(spec=self.spec.model_copy(update={"sender": 0}), data=data)


AnyBucket = Bucket | RemoteBucket


async def brought_here(buckets: Iterable[AnyBucket]) -> Sequence[Bucket]:
    """All of them as rank 0's own, in their order: for a disk. Raises ServiceError."""
    return [bucket if isinstance(bucket, Bucket) else await bucket.brought_here() for bucket in buckets]


def own_buckets(buckets: Iterable[AnyBucket]) -> Sequence[Bucket]:
    """The buckets whose bytes rank 0 has itself."""
    return [bucket for bucket in buckets if isinstance(bucket, Bucket)]


def in_turns(shares: Iterable[Sequence[AnyBucket]]) -> Sequence[AnyBucket]:
    """All buckets in an order in which each sender is as far with its own as the others are with theirs."""
    placed = [
        ((at + 1) / len(share), bucket.spec.sender, bucket) for share in shares for at, bucket in enumerate(share)
    ]
    return [bucket for _, _, bucket in sorted(placed, key=lambda each: each[:2])]


@dataclass(frozen=True, eq=False)
class SendingGroups:
    """The groups of an epoch: rank 0's own, and those of other ranks with all generators."""

    own: "Sequence[BroadcastGroup]"
    """A group with all workers, or for each worker's slices one."""
    epoch: int
    links: Sequence[SenderLink] = ()

    async def send(self, buckets: Sequence[AnyBucket], *, timeout_s: float, threads: DaemonThreads) -> None:
        """Broadcasts them all, each by the rank that has it. Raises ProcessGroupError."""
        mine = own_buckets(buckets)
        theirs = [bucket for bucket in buckets if isinstance(bucket, RemoteBucket)]
        works: list[Coroutine[Any, Any, None]] = [send_each(self.own, [mine], timeout_s=timeout_s, threads=threads)]
        links = {bucket.link for bucket in theirs}
        assert len({link.rank for link in links}) == len(links), "a rank sends what one copy of it has"
        for link in links:
            share = [bucket for bucket in theirs if bucket.link is link]
            works.append(link.send(share, epoch=self.epoch, timeout_s=timeout_s))
        await together(works)

    async def send_slices(
        self, shares: Sequence[Sequence[AnyBucket]], *, timeout_s: float, threads: DaemonThreads
    ) -> None:
        """Broadcasts each worker's slices, in groups of their own, each bucket by the rank that has it. Raises
        ProcessGroupError.
        """
        mine = [own_buckets(share) for share in shares]
        theirs = Counter(bucket.link for share in shares for bucket in share if isinstance(bucket, RemoteBucket))
        works: list[Coroutine[Any, Any, None]] = [send_each(self.own, mine, timeout_s=timeout_s, threads=threads)]
        works += [
            link.send_slices(count=count, epoch=self.epoch, timeout_s=timeout_s) for link, count in theirs.items()
        ]
        await together(works)

    def close(self) -> None:
        """Lets go of rank 0's; may block. The other ranks let go of theirs at the next meeting, or after a failure."""
        for group in self.own:
            group.close()


async def sliced_weights(
    packed: "PackedWeights", layout: SliceLayout, *, slicer: Slicer, threads: DaemonThreads
) -> SlicedWeights:
    """Slices of a version for each worker, of all ranks, in the order of sending. Raises SenderLost and SlicesUnfit."""
    here = [LaidOut(tensors=bucket.spec.tensors, data=bucket.data) for bucket in own_buckets(packed.buckets)]
    own = slicer.hashed(here, layout, threads=threads)
    shares = await together([own, *(link.sliced(layout) for link in packed.links)])
    return SlicedWeights(layout, [in_turns(each) for each in zip(*shares, strict=True)])


async def together(works: Sequence[Awaitable[Any]]) -> list[Any]:
    """The results of all. Raises the error of a sender that is lost, or else the first: others may follow from it."""
    results = await asyncio.gather(*works, return_exceptions=True)
    errors = [result for result in results if isinstance(result, BaseException)]
    if errors:
        raise next((error for error in errors if isinstance(error, SenderLost)), errors[0])
    return results


async def silent_sender(links: Sequence[SenderLink], *, deadline_s: float) -> SenderLost | None:
    """The error of a rank whose sender does not answer at all, in so many seconds; None if they all do."""
    found = await asyncio.gather(*(link.check(deadline_s=deadline_s) for link in links), return_exceptions=True)
    return next((error for error in found if isinstance(error, SenderLost)), None)


def hashing_s(nbytes: int) -> float:
    """Longest time in which a rank hashes so much."""
    return _ASK_S + nbytes / _HASH_BYTES_PER_S
