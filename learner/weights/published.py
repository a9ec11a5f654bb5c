"""Weights to be published, as the trainer offers them and as they are kept, packed in host memory.

Beside them the reports of what became of them, and the routes where generators announce themselves and download them.
"""

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Annotated, Protocol

import xxhash
from fastapi import Depends, FastAPI, Query, Response

from learner.weights.digests import combined_digest, hashed
from learner.weights.fleet import JoinRefused
from learner.weights.probe import Probe
from learner.weights.process_group import LaidOut
from learner.weights.senders import (
    READ_BYTES,
    AnyBucket,
    CopyShare,
    SenderLink,
    brought_here,
    in_turns,
    together,
)
from protocol.fleet import CHUNK_HASH_HEADER, Announcement, AnnouncementAnswer, Backend, LowRank, PullPlan, WeightForm
from protocol.model import PolicyVersion
from services.http.bodies import json_answer, json_body
from services.http.client import HttpClient, ServiceError
from services.http.refusals import RequestRefused
from services.model_folder import SLOWEST_BYTES_PER_S
from services.process import DaemonThreads

CHUNK_BYTES = READ_BYTES


@dataclass(frozen=True, eq=False)
class BaseWeights:
    """Weights that adapters are added to, which stay as they are: `alpha / rank` * up @ down is added to them."""

    buckets: Sequence[LaidOut]
    rank: int
    alpha: float
    shares: Sequence[CopyShare] = ()


@dataclass(frozen=True)
class Snapshot:
    """Weights to be published, deduplicated by tie, where they will be sent from; and the learner's probe of them.

    With a `base` they are the factors of an adapter to it. `shares` are those parts that other ranks have.
    """

    version: int
    buckets: Sequence[LaidOut]
    probe: Probe
    base: BaseWeights | None = None
    shares: Sequence[CopyShare] = ()


@dataclass(frozen=True)
class PublishReport:
    """The time until a version was served, in seconds, and the largest mean gap of the probe, in nats, of its
    generators.

    `members` counts those that served it at the end of its broadcast; others catch up by a download.
    """

    version: int
    members: int
    total_s: float
    prepare_s: float
    commit_s: float
    pause_s: float
    probe_gap: float
    sent_bytes: int = 0
    """Received by each of its generators; of this host's, which map the learner's memory, by none."""


@dataclass(frozen=True)
class JoinReport:
    """A generator that caught up by a download: what it serves now, what that took, its probe's mean gap in nats."""

    generator_id: str
    version: int
    seconds: float
    probe_gap: float


@dataclass(frozen=True)
class PublisherOptions:
    """Times in seconds. `probe_tolerance` bounds the mean gap in nats between the learner's and a generator's logprobs
    of the probe; if None, the type of their numbers does. `dtype` is that of what is published; `as_computed` says that
    the learner computes with the same numbers, not with those before they were rounded or adapters merged.
    """

    incarnation: int
    backend: Backend
    host: str
    bucket_timeout_s: float
    meet_timeout_s: float
    commit_timeout_s: float
    pull_timeout_s: float
    probe_tolerance: float | None
    dtype: str = "float32"
    as_computed: bool = True
    port: int = 0
    """Of the meetings before broadcasts; 0: each at one that the system chooses."""
    parallel_pulls: int = 4
    """Downloads at once, at most."""
    slowest_pull_bytes_per_s: float = 20e6
    """Least rate of all downloads together, in bytes a second; `pull_timeout_s` comes on top."""
    pull_backoff_s: float = 0.5
    """Before the second try of a download; twice as long each time."""
    pull_attempts: int = 5
    """Failures in a row after which a generator is expelled."""
    anchor_every: int = 50
    """Versions after which the tree for those that pull has the weights as they are again."""
    slices: bool = True
    """Workers of tensor-parallel generators are sent what they read, and not whole tensors."""
    most_behind: int = 1
    """Versions that one which pulls may be behind the newest before others do without it."""


class VersionNotPublished(LookupError):
    """The requested bytes are not kept, or lies outside of its bucket. The text says what there is."""


@dataclass(frozen=True, eq=False)
class PackedWeights:
    """A version, ready to be sent, and the proof of it. `digest` is that of `digest_of`.

    With an `adapter` its buckets are the factors, and `base` those of the weights that they are added to.
    """

    version: PolicyVersion
    buckets: Sequence[AnyBucket]
    digest: str
    probe: Probe
    adapter: LowRank | None = None
    base: Sequence[AnyBucket] = ()
    links: Sequence[SenderLink] = ()
    """To the other ranks that have parts of it, in their order."""

    def in_form(self, form: WeightForm) -> Sequence[AnyBucket]:
        """The buckets to be sent."""
        return (*self.base, *self.buckets) if form == "based" else self.buckets

    def nbytes(self, form: WeightForm) -> int:
        """The bytes to be sent."""
        return sum(bucket.spec.nbytes for bucket in self.in_form(form))

    async def brought_here(self) -> "PackedWeights":
        """The same, all of it rank 0's own: for a disk. Raises ServiceError."""
        if not self.links:
            return self
        return replace(self, buckets=await brought_here(self.buckets), base=await brought_here(self.base), links=())

    @property
    def merge_s(self) -> float:
        """Longest time in which a generator adds the adapter to its base weights, however little it was sent."""
        return sum(bucket.spec.nbytes for bucket in self.base) / SLOWEST_BYTES_PER_S

    def form_for(self, held: Iterable[str]) -> WeightForm:
        """The smallest form for receivers that hold these base weights."""
        if self.adapter is None:
            return "whole"
        return "alone" if all(base == self.adapter.base for base in held) else "based"


class Packer:
    """Makes snapshots ready to be sent, hashing base weights once. Without a `client` they are rank 0's alone.

    `for_devices` as in `LaidOut.hashed`.
    """

    def __init__(
        self, *, incarnation: int, threads: DaemonThreads, client: HttpClient | None = None, for_devices: bool = False
    ) -> None:
        self._incarnation = incarnation
        self._threads = threads
        self._client = client
        self._for_devices = for_devices
        self._base: tuple[BaseWeights, Sequence[AnyBucket], LowRank, Sequence[SenderLink]] | None = None

    async def pack(self, snapshot: Snapshot) -> PackedWeights:
        """The snapshot's own buckets with their hashes, and its digest. Nothing is copied. Raises SenderLost."""
        links = self._links(snapshot.shares)
        buckets, digests = await self._hashed(snapshot.buckets, links)
        packed = PackedWeights(
            version=PolicyVersion(self._incarnation, snapshot.version), buckets=buckets,
            digest=combined_digest(digests), probe=snapshot.probe, links=links,
        )  # fmt: skip
        if snapshot.base is None:
            return packed
        if self._base is None or self._base[0] is not snapshot.base:
            base, links = snapshot.base, self._links(snapshot.base.shares)
            made, _ = await self._hashed(base.buckets, links)
            known = xxhash.xxh3_64_hexdigest("".join(bucket.spec.xxh3 for bucket in made).encode())
            self._base = base, made, LowRank(base=known, rank=base.rank, alpha=base.alpha), links
        return replace(packed, base=self._base[1], adapter=self._base[2], links=self._base[3])

    def _links(self, shares: Sequence[CopyShare]) -> Sequence[SenderLink]:
        assert not shares or self._client is not None, "other ranks are asked over HTTP"
        return [SenderLink(share, self._client) for share in shares if self._client is not None]

    async def _hashed(
        self, laid_outs: Sequence[LaidOut], links: Sequence[SenderLink]
    ) -> tuple[Sequence[AnyBucket], Mapping[str, str]]:
        """Buckets of all ranks in the order of sending, and the digests of all tensors; each rank hashes its own."""
        own = hashed(laid_outs, threads=self._threads, for_devices=self._for_devices)
        shares = await together([own, *(link.hashed(for_devices=self._for_devices) for link in links)])
        digests = {name: digest for _, share in shares for name, digest in share.items()}
        return in_turns(buckets for buckets, _ in shares), digests


class PublishedWeights:
    """Keeps the newest version, and older ones for as long as somebody still downloads them."""

    def __init__(self) -> None:
        self._kept: dict[str, PackedWeights] = {}
        self._pulled: Counter[str] = Counter()
        self.newest: PackedWeights | None = None

    def put(self, packed: PackedWeights) -> None:
        """This is the newest version from now on."""
        self.newest = packed
        self._kept[str(packed.version)] = packed
        self._clear()

    @contextmanager
    def lent(self, packed: PackedWeights) -> Iterator[None]:
        """Keeps a version while the body runs."""
        version = str(packed.version)
        self._kept.setdefault(version, packed)
        self._pulled[version] += 1
        try:
            yield
        finally:
            self._pulled[version] -= 1
            self._clear()

    def plan(self, version: str, form: WeightForm = "whole") -> PullPlan:
        """The plan of a download. Raises VersionNotPublished."""
        packed = self._find(version, form)
        specs = tuple(bucket.spec for bucket in packed.in_form(form))
        return PullPlan(version=version, chunk_bytes=CHUNK_BYTES, buckets=specs, adapter=packed.adapter)

    async def chunk(self, version: str, *, index: int, offset: int, length: int, form: WeightForm = "whole") -> bytes:
        """A part of a bucket. Raises VersionNotPublished, and ServiceError if another rank does not hand it out."""
        buckets = self._find(version, form).in_form(form)
        if not 0 <= index < len(buckets):
            raise VersionNotPublished(f"version {version} has no bucket {index}; it has {len(buckets)}")
        size = buckets[index].spec.nbytes
        if not (0 <= offset < size and 0 < length <= CHUNK_BYTES and offset + length <= size):
            raise VersionNotPublished(
                f"bucket {index} of version {version} has no {length} bytes at {offset}: it has {size}, and at most "
                f"{CHUNK_BYTES} are served at once"
            )
        return await buckets[index].read(offset, length)

    def _find(self, version: str, form: WeightForm) -> PackedWeights:
        packed = self._kept.get(version)
        if packed is None:
            kept = ", ".join(self._kept) or "none yet"
            raise VersionNotPublished(f"version {version} is not kept here any more, or not yet; kept: {kept}")
        if (form == "whole") != (packed.adapter is None):
            raise VersionNotPublished(f"version {version} is not kept in the form {form!r}")
        return packed

    def _clear(self) -> None:
        self._kept = {
            version: packed
            for version, packed in self._kept.items()
            if packed is self.newest or self._pulled[version] > 0
        }


class TakesGenerators(Protocol):
    """A fleet, or several of which an announcement names one."""

    def announce(self, announcement: Announcement, *, now: float) -> AnnouncementAnswer:
        """Takes a generator in, or notes that it is still there. Raises JoinRefused."""
        ...


class GivesWeights(Protocol):
    """Published weights, of one shelf or of several."""

    def plan(self, version: str, form: WeightForm = "whole") -> PullPlan:
        """The plan of a download. Raises VersionNotPublished."""
        ...

    async def chunk(self, version: str, *, index: int, offset: int, length: int, form: WeightForm = "whole") -> bytes:
        """A part of a bucket. Raises VersionNotPublished, and ServiceError if another rank does not hand it out."""
        ...


def add_routes(app: FastAPI, *, fleet: TakesGenerators, shelf: GivesWeights) -> None:
    """`POST /v1/generators`, which refuses with 409 a generator that does not fit the run; the published weights."""

    @app.post("/v1/generators")
    async def announce(announcement: Annotated[Announcement, Depends(json_body(Announcement))]) -> Response:
        """A generator announces itself, every few seconds; refused with 409 if it does not fit the run."""
        try:
            return json_answer(fleet.announce(announcement, now=time.monotonic()))
        except JoinRefused as error:
            raise RequestRefused(409, error.kind, str(error)) from error

    add_weight_routes(app, shelf=shelf)


def add_weight_routes(app: FastAPI, *, shelf: GivesWeights) -> None:
    """`GET /v1/weights/{version}/plan`, and the chunks of its buckets; 404 for what is not kept."""

    @app.get("/v1/weights/{version}/plan")
    async def plan(version: str, form: Annotated[WeightForm, Query()] = "whole") -> Response:
        """The buckets of a published version, and their tensors and hashes."""
        try:
            return json_answer(shelf.plan(version, form))
        except VersionNotPublished as error:
            raise RequestRefused(404, "not_kept", str(error)) from error

    @app.get("/v1/weights/{version}/buckets/{index}")
    async def chunk(
        version: str,
        index: int,
        offset: Annotated[int, Query()],
        length: Annotated[int, Query()],
        form: Annotated[WeightForm, Query()] = "whole",
    ) -> Response:
        """A part of a bucket: `length` bytes from `offset` on."""
        try:
            data = await shelf.chunk(version, index=index, offset=offset, length=length, form=form)
        except VersionNotPublished as error:
            raise RequestRefused(404, "not_kept", str(error)) from error
        except ServiceError as error:
            raise RequestRefused(503, "rank_silent", f"a rank of the learner does not hand it out: {error}") from error
        headers = {CHUNK_HASH_HEADER: xxhash.xxh3_64_hexdigest(data)}
        return Response(data, media_type="application/octet-stream", headers=headers)
