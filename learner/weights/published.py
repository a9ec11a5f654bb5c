"""Weights to be published, as the trainer offers them and as they are kept, packed in host memory.

Beside them the reports of what became of them, and the routes where generators announce themselves and download them.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Protocol

import torch
import xxhash
from fastapi import Depends, FastAPI, Query, Response

from learner.weights.fleet import JoinRefused
from learner.weights.probe import Probe
from learner.weights.process_group import Bucket, LaidOut, NamedTensors, in_thread
from protocol.fleet import (
    CHUNK_HASH_HEADER,
    SLOWEST_BYTES_PER_S,
    Announcement,
    AnnouncementAnswer,
    Backend,
    LowRank,
    PullPlan,
    WeightForm,
)
from protocol.model import PolicyVersion
from services.http.bodies import json_answer, json_body
from services.http.refusals import RequestRefused
from services.process import DaemonThreads

CHUNK_BYTES = 4 << 20
_DIGEST_ELEMENTS = 1 << 20


@dataclass(frozen=True, eq=False)
class BaseWeights:
    """Weights that adapters are added to, which stay as they are: `alpha / rank` * up @ down is added to them."""

    buckets: Sequence[LaidOut]
    rank: int
    alpha: float


@dataclass(frozen=True)
class Snapshot:
    """Weights to be published, deduplicated by tie, where they will be sent from; and the learner's probe of them.

    With a `base` they are the factors of an adapter to it.
    """

    version: int
    buckets: Sequence[LaidOut]
    probe: Probe
    base: BaseWeights | None = None


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
    """Received by each of its generators."""


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
    buckets: Sequence[Bucket]
    digest: str
    probe: Probe
    adapter: LowRank | None = None
    base: Sequence[Bucket] = ()

    def in_form(self, form: WeightForm) -> Sequence[Bucket]:
        """The buckets to be sent."""
        return (*self.base, *self.buckets) if form == "based" else self.buckets

    def nbytes(self, form: WeightForm) -> int:
        """The bytes to be sent."""
        return sum(bucket.spec.nbytes for bucket in self.in_form(form))

    @property
    def merge_s(self) -> float:
        """Longest time in which a generator adds the adapter to its base weights, however little it was sent."""
        return sum(bucket.spec.nbytes for bucket in self.base) / SLOWEST_BYTES_PER_S

    def form_for(self, held: Iterable[str]) -> WeightForm:
        """The smallest form for receivers that hold these base weights."""
        if self.adapter is None:
            return "whole"
        return "alone" if all(base == self.adapter.base for base in held) else "based"


def digest_of(tensors: NamedTensors) -> str:
    """XXH3 over names and values at half precision, hexadecimal.

    Versions of different digests have to be different in an engine of whatever type; a change that is finer may be lost
    there in rounding.
    """
    digest = xxhash.xxh3_64()
    _add_to_digest(digest, tensors)
    return str(digest.hexdigest())


def _add_to_digest(digest: xxhash.xxh3_64, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    for name, tensor in tensors:
        digest.update(name.encode())
        flat = tensor.detach().contiguous().view(-1)
        for start in range(0, flat.numel(), _DIGEST_ELEMENTS):  # not all of it twice
            part = flat[start : start + _DIGEST_ELEMENTS]
            value = part.to(torch.bfloat16) if part.is_floating_point() else part
            digest.update(value.view(torch.uint8).numpy().data)


class Packer:
    """Makes snapshots ready to be sent, hashing base weights once."""

    def __init__(self, *, incarnation: int, threads: DaemonThreads) -> None:
        self._incarnation = incarnation
        self._threads = threads
        self._base: tuple[BaseWeights, Sequence[Bucket], LowRank] | None = None

    async def pack(self, snapshot: Snapshot) -> PackedWeights:
        """The snapshot's own buckets with their hashes, and its digest. Nothing is copied."""
        buckets, digest = await self._hashed(snapshot.buckets)
        packed = PackedWeights(
            version=PolicyVersion(self._incarnation, snapshot.version), buckets=buckets, digest=digest,
            probe=snapshot.probe,
        )  # fmt: skip
        if snapshot.base is None:
            return packed
        if self._base is None or self._base[0] is not snapshot.base:
            base = snapshot.base
            hashed, _ = await self._hashed(base.buckets)
            known = xxhash.xxh3_64_hexdigest("".join(bucket.spec.xxh3 for bucket in hashed).encode())
            self._base = base, hashed, LowRank(base=known, rank=base.rank, alpha=base.alpha)
        return replace(packed, base=self._base[1], adapter=self._base[2])

    async def _hashed(self, laid_outs: Sequence[LaidOut]) -> tuple[Sequence[Bucket], str]:
        """Buckets and digest, made beside each other by two threads, since both let go of the GIL."""
        digest = xxhash.xxh3_64()
        buckets = []
        for laid_out in laid_outs:
            bucket, _ = await asyncio.gather(
                in_thread(laid_out.hashed, threads=self._threads),
                in_thread(partial(_add_to_digest, digest, laid_out.named()), threads=self._threads),
            )
            buckets.append(bucket)
        return buckets, str(digest.hexdigest())


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

    def chunk(self, version: str, *, index: int, offset: int, length: int, form: WeightForm = "whole") -> bytes:
        """A part of a bucket. Raises VersionNotPublished."""
        buckets = self._find(version, form).in_form(form)
        if not 0 <= index < len(buckets):
            raise VersionNotPublished(f"version {version} has no bucket {index}; it has {len(buckets)}")
        size = buckets[index].spec.nbytes
        if not (0 <= offset < size and 0 < length <= CHUNK_BYTES and offset + length <= size):
            raise VersionNotPublished(
                f"bucket {index} of version {version} has no {length} bytes at {offset}: it has {size}, and at most "
                f"{CHUNK_BYTES} are served at once"
            )
        return buckets[index].data[offset : offset + length].numpy().tobytes()

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

    def chunk(self, version: str, *, index: int, offset: int, length: int, form: WeightForm = "whole") -> bytes:
        """A part of a bucket. Raises VersionNotPublished."""
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
            data = shelf.chunk(version, index=index, offset=offset, length=length, form=form)
        except VersionNotPublished as error:
            raise RequestRefused(404, "not_kept", str(error)) from error
        headers = {CHUNK_HASH_HEADER: xxhash.xxh3_64_hexdigest(data)}
        return Response(data, media_type="application/octet-stream", headers=headers)
