"""Scripted generators: HTTP servers in this process that meet the learner and take broadcasts for real, over gloo."""

import asyncio
import contextlib
import datetime
import os
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from fastapi import Depends, FastAPI, Request, Response
from numpy.typing import NDArray
from starlette.types import Receive, Scope, Send

from protocol.fleet import (
    CHUNK_HASH_HEADER,
    INSTANCE_HEADER,
    PULL_TOOK_TOO_LONG,
    Announcement,
    BucketSpec,
    Commit,
    CommitResult,
    Condition,
    Fingerprints,
    JoinedGroup,
    JoinGroup,
    LowRank,
    Prepare,
    PrepareResult,
    Pull,
    PullPlan,
    Reprobe,
    ReprobeResult,
    SharedMemory,
    SharedMemoryAnswer,
    SliceLayout,
    TensorSpec,
    WeightForm,
    WeightWay,
    group_name,
    is_factor,
)
from protocol.model import PROTOCOL_VERSION, PolicyVersion
from protocol.status import Readiness
from services.http.app import create_app
from services.http.bodies import json_answer, json_body
from services.http.client import HttpClient
from services.http.metrics import Metrics
from services.http.refusals import RequestRefused
from services.http.server import Listener, serve_http

FINGERPRINTS = Fingerprints(model="m", tokenizer="t", chat_template="c")
c10d: Any = dist
"""torch's stubs lack the parts that are used here."""


def announcement(
    name: str,
    url: str,
    *,
    serving_version: str | None = None,
    instance: str = "1",
    condition: Condition = "able",
    protocol_version: int = PROTOCOL_VERSION,
    fingerprints: Fingerprints = FINGERPRINTS,
    started_at: float = 0.0,
    world_size: int = 1,
) -> Announcement:
    return Announcement(
        generator_id=name,
        instance=f"{name}-{instance}",
        started_at=started_at,
        condition=condition,
        url=url,
        protocol_version=protocol_version,
        fingerprints=fingerprints,
        world_size=world_size,
        backend="gloo",
        max_model_len=64,
        serving_version=serving_version,
    )


def gloo_group(
    *,
    host: str,
    port: int,
    epoch: int,
    rank: int,
    world_size: int,
    timeout_s: float,
    sender: int = 0,
    worker: int | None = None,
) -> Any:
    """Joins a sender's private process group, as a generator's worker does; with a `worker`, that of its slices."""
    timeout = datetime.timedelta(seconds=timeout_s)
    store = c10d.TCPStore(host, port, world_size, is_master=False, timeout=timeout)
    options = c10d.ProcessGroupGloo._Options()
    options._timeout = timeout
    options._devices = [c10d.ProcessGroupGloo.create_device(hostname=host)]
    return c10d.ProcessGroupGloo(c10d.PrefixStore(group_name(epoch, sender, worker), store), rank, world_size, options)


def gloo_groups(body: JoinGroup, *, worker: int) -> list[Any]:
    """A worker's groups, one for each sender."""
    return [
        gloo_group(
            host=body.host,
            port=body.port,
            epoch=body.epoch,
            rank=body.rank_offset + (0 if body.sliced else worker),
            world_size=body.world_size,
            timeout_s=body.meet_timeout_s,
            sender=sender,
            worker=worker if body.sliced else None,
        )
        for sender in range(body.senders)
    ]


def receive_bucket(group: Any, spec: BucketSpec, *, timeout_s: float) -> dict[str, torch.Tensor]:
    """The tensors of the next bucket, if its hash agrees."""
    return put_together(receive_parts(group, spec, timeout_s=timeout_s))


def receive_parts(group: Any, spec: BucketSpec, *, timeout_s: float) -> list[tuple[TensorSpec, torch.Tensor]]:
    """The tensors of the next bucket, or parts of them, if its hash agrees."""
    timeout = datetime.timedelta(seconds=timeout_s)
    data = torch.empty(spec.nbytes, dtype=torch.uint8)
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    options.timeout = timeout
    group.broadcast([data], options).wait(timeout)
    return parts_in(data, spec)


def unpacked(data: torch.Tensor, spec: BucketSpec) -> dict[str, torch.Tensor]:
    """The tensors in the bytes of a bucket, if its hash agrees."""
    return {tensor.name: value for tensor, value in parts_in(data, spec)}


def put_together(parts: Sequence[tuple[TensorSpec, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Tensors of parts that workers were sent; zeros where none was."""
    tensors: dict[str, torch.Tensor] = {}
    for spec, value in parts:
        if spec.whole is None:
            tensors[spec.name] = value
            continue
        whole = tensors.setdefault(spec.name, torch.zeros(spec.whole, dtype=value.dtype))
        ends = [start + size for start, size in zip(spec.start, spec.shape, strict=True)]
        whole[tuple(map(slice, spec.start, ends))] = value
    return tensors


def parts_in(data: torch.Tensor, spec: BucketSpec) -> list[tuple[TensorSpec, torch.Tensor]]:
    """The tensors in the bytes of a bucket, or parts of them, with their places, if its hash agrees."""
    if xxhash.xxh3_64_hexdigest(data.numpy().data) != spec.xxh3:
        raise RuntimeError("the bucket's hash differs")
    tensors = []
    for tensor in spec.tensors:
        dtype: torch.dtype = getattr(torch, tensor.dtype)
        count = int(torch.Size(tensor.shape).numel())
        flat = data[tensor.offset : tensor.offset + count * dtype.itemsize].view(dtype)
        tensors.append((tensor, flat.view(tensor.shape).clone()))
    return tensors


def _content(path: str) -> str:
    return Path(path).read_text(encoding="ascii")


def probe_logprobs(texts: tuple[tuple[int, ...], ...]) -> tuple[float, ...]:
    """Logprobs of the probe on which learner and generators agree."""
    return tuple(-0.1 * token for text in texts for token in text[1:])


class _BrokenAnswer(Response):
    """Ends in the middle, upon which the server closes the connection."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"99")]})


@dataclass
class DownloadLink:
    """The link that generators download over: with more than `most` at once none of them is done in time."""

    most: int
    now: int = 0
    largest: int = 0
    downloads: int = 0

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        self.now += 1
        self.downloads += 1
        self.largest = max(self.largest, self.now)
        try:
            yield
        finally:
            self.now -= 1

    async def check(self) -> None:
        """Raises RequestRefused if it is too slow for all who are on it now."""
        await asyncio.sleep(0.02)
        if self.now > self.most:
            await asyncio.sleep(0.02)  # those that came on it with this one shall see it too
            raise RequestRefused(409, PULL_TOOK_TOO_LONG, "the download took more than 0.02 s")


@dataclass
class ScriptedGenerator:
    """`gap` is added to its logprobs of the probe, or of every `each`th token; `says` gives them all by version.

    Of its next `misses` probes it says nothing. `loads_wrong` changes its checksum, `stale_checksum` is always told.

    At a step (`group`, `prepare`, `merge`, `pull`, `commit`) it waits for the event in `hold`, and fails if `refuses`
    says so, or says that it takes nothing now if `stalls` does. It has so many `workers`, each a rank of a broadcast.
    `dies_in_prepare` is asked at each prepare. `learner` is where it downloads from. If it `maps`, it tells the secret
    in the learner's file; `files` are the names of all that it has mapped, and `mapped` those of the last version.
    """

    name: str
    gap: float = 0.0
    each: int = 1
    misses: int = 0
    loads_wrong: bool = False
    learner: str = ""
    link: DownloadLink = field(default_factory=lambda: DownloadLink(most=1000))
    instance: str = "1"
    condition: Condition = "able"
    hold: dict[str, asyncio.Event] = field(default_factory=dict)
    refuses: Callable[[str], bool] = lambda _: False
    stalls: Callable[[str], bool] = lambda _: False
    workers: int = 1
    maps: bool = False
    files: list[str] = field(default_factory=list)
    mapped: list[torch.Tensor] = field(default_factory=list)
    weights_way: WeightWay = "broadcast"
    relayed: bool = False
    manifests: list[str | None] = field(default_factory=list)
    """Of each pull."""
    stale_checksum: str = ""
    says: Callable[[int], NDArray[np.float64]] | None = None
    dies_in_prepare: Callable[[Prepare], bool] = lambda _: False
    url: str = ""
    preparing: asyncio.Event = field(default_factory=asyncio.Event)
    pulls: list[str] = field(default_factory=list)
    base: str = ""
    """Digest of the base weights that it holds."""
    brought: list[tuple[str, set[str]]] = field(default_factory=list)
    """Versions, and the names of the tensors that came for each."""
    limits: list[float] = field(default_factory=list)
    joins: list[JoinGroup] = field(default_factory=list)
    commits: list[Commit] = field(default_factory=list)
    probed: list[str] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    received: dict[int, int] = field(default_factory=dict)
    """Bytes that broadcasts have brought, by sender; of all workers together."""
    slices: SliceLayout | None = None
    """Told with each version that came whole."""
    version: str | None = None
    _staged: dict[str, torch.Tensor] = field(default_factory=dict)
    _group: Any = None
    _server: "asyncio.Task[None] | None" = None

    @property
    def versions(self) -> list[str]:
        return [commit.version for commit in self.commits]

    def announcement(self) -> Announcement:
        return announcement(
            self.name,
            self.url,
            serving_version=self.version,
            instance=self.instance,
            condition=self.condition,
            world_size=self.workers,
        ).model_copy(update={"weights": self.weights_way, "relayed": self.relayed})

    @asynccontextmanager
    async def running(self) -> AsyncIterator["ScriptedGenerator"]:
        """Serves while the body runs, or until it dies."""
        with Listener(host="127.0.0.1", port=0) as listener:
            self.url = listener.url
            self._server = asyncio.create_task(serve_http(self._app(), listener, finish_s=0))
            try:
                yield self
            finally:
                await self.die()

    async def die(self) -> None:
        """Closes its connections, those of the process group included."""
        self._group = None
        assert self._server is not None
        self._server.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._server

    def restart(self) -> None:
        """Forgets everything, as a new process under the same name and address."""
        self._group, self.version, self.weights, self.base = None, None, {}, ""
        self.instance += "'"

    def _app(self) -> FastAPI:
        app = create_app(
            service="generator",
            version="1",
            token=None,
            readiness=lambda: Readiness(ready=True),
            metrics=Metrics("generator"),
        )
        app.router.dependencies.append(Depends(self._meant_for_it))

        @app.post("/v1/weights/group")
        async def join(body: Annotated[JoinGroup, Depends(json_body(JoinGroup))]) -> Response:
            await self._scripted("group")
            self.joins.append(body)
            try:
                self._group = await asyncio.gather(
                    *(asyncio.to_thread(gloo_groups, body, worker=worker) for worker in range(self.workers))
                )
            except RuntimeError as error:
                raise RequestRefused(409, "group_failed", str(error)) from error
            return json_answer(JoinedGroup(epoch=body.epoch))

        @app.post("/v1/weights/host")
        async def host(body: Annotated[SharedMemory, Depends(json_body(SharedMemory))]) -> Response:
            await self._scripted("host")
            return json_answer(SharedMemoryAnswer(secret=_content(body.path) if self.maps else "another"))

        @app.post("/v1/weights/prepare")
        async def prepare(body: Annotated[Prepare, Depends(json_body(Prepare))]) -> Response:
            return await self._prepare(body)

        @app.post("/v1/weights/pull")
        async def pull(body: Annotated[Pull, Depends(json_body(Pull))]) -> Response:
            self.pulls.append(body.version)
            self.limits.append(body.deadline_s)
            self.manifests.append(body.manifest)
            await self._scripted("pull")
            with self.link.used():
                await self.link.check()
                self._staged = await self._download(body.version, form=body.form)
            return json_answer(PrepareResult(version=body.version, receive_s=0.01))

        @app.post("/v1/weights/commit")
        async def commit(body: Annotated[Commit, Depends(json_body(Commit))]) -> Response:
            await self._scripted("commit")
            return self._commit(body)

        @app.post("/v1/weights/probe")
        async def probe(body: Annotated[Reprobe, Depends(json_body(Reprobe))]) -> Response:
            self.probed.append(body.version)
            return json_answer(ReprobeResult(version=body.version, probe_logprobs=self._probe(body)))

        return app

    async def _meant_for_it(self, request: Request) -> None:
        if (meant := request.headers.get(INSTANCE_HEADER)) != (own := self.announcement().instance):
            raise RequestRefused(409, "another_process", f"a step for {meant} came to {own}")

    async def _scripted(self, step: str) -> None:
        """Waits, or refuses, if it was told to at this step."""
        if step in self.hold:
            await self.hold[step].wait()
        if self.stalls(step):
            raise RequestRefused(503, "stalled", "it takes nothing now")
        if self.refuses(step):
            raise RequestRefused(409, f"{step}_failed", "it does not want to")

    def _came(self, version: str, adapter: LowRank | None) -> None:
        """Raises RequestRefused for an adapter to other base weights than it holds."""
        names = set(self._staged)
        self.brought.append((version, names))
        if adapter is not None and all(map(is_factor, names)) and adapter.base != self.base:
            raise RequestRefused(409, "prepare_failed", "other base weights are held")
        self.base = "" if adapter is None else adapter.base

    async def _download(self, version: str, *, form: WeightForm = "whole") -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {}
        async with HttpClient() as client:
            url = f"{self.learner}/v1/weights/{version}"
            plan = await client.get(f"{url}/plan?form={form}", PullPlan, deadline_s=5)
            for index, bucket in enumerate(plan.buckets):
                data = b""
                while len(data) < bucket.nbytes:
                    length = min(plan.chunk_bytes, bucket.nbytes - len(data))
                    where = f"{url}/buckets/{index}?form={form}&offset={len(data)}&length={length}"
                    chunk, headers = await client.download(where, deadline_s=5)
                    assert headers[CHUNK_HASH_HEADER] == xxhash.xxh3_64_hexdigest(chunk)
                    data += chunk
                tensors |= unpacked(torch.frombuffer(bytearray(data), dtype=torch.uint8), bucket)
        self._staged = tensors
        self._came(version, plan.adapter)
        return tensors

    async def _prepare(self, body: Prepare) -> Response:
        self.preparing.set()
        if not body.files and (self._group is None or body.epoch != self.joins[-1].epoch):
            raise RequestRefused(409, "wrong_epoch", "meet again first")
        if self.dies_in_prepare(body):
            self._group = None
            assert self._server is not None
            self._server.cancel()
            return _BrokenAnswer()
        await self._scripted("prepare")
        try:
            ranks = () if body.files else self._group
            received = await asyncio.gather(
                *(asyncio.to_thread(self._receive, body, rank, worker) for worker, rank in enumerate(ranks))
            )
            received += [self._map(body)] if body.files else []
            self._staged = put_together(list(chain(*received)) if body.slices else received[0])
        except RuntimeError as error:
            self._group = None
            raise RequestRefused(409, "prepare_failed", str(error)) from error
        self._came(body.version, body.adapter)
        await self._scripted("merge")
        return json_answer(PrepareResult(version=body.version, receive_s=0.01))

    def _map(self, body: Prepare) -> list[tuple[TensorSpec, torch.Tensor]]:
        self.files += map(os.readlink, body.files)
        self.mapped = data = [
            torch.from_file(path, size=bucket.nbytes, dtype=torch.uint8)
            for path, bucket in zip(body.files, body.buckets, strict=True)
        ]
        return [part for each, bucket in zip(data, body.buckets, strict=True) for part in parts_in(each, bucket)]

    def _receive(self, body: Prepare, group: Any, worker: int) -> list[tuple[TensorSpec, torch.Tensor]]:
        staged: list[tuple[TensorSpec, torch.Tensor]] = []
        for bucket in body.arriving(worker):
            staged += receive_parts(group[bucket.sender], bucket, timeout_s=self.joins[-1].bucket_timeout_s)
            self.received[bucket.sender] = self.received.get(bucket.sender, 0) + bucket.nbytes
        return staged

    def _probe(self, body: Commit | Reprobe) -> tuple[float, ...]:
        if self.misses:
            self.misses -= 1
            return ()
        if self.says is not None:
            return tuple(map(float, self.says(PolicyVersion.parse(body.version).number)))
        right = probe_logprobs(body.probe)
        return tuple(logprob + (0.0 if number % self.each else self.gap) for number, logprob in enumerate(right))

    def _commit(self, body: Commit) -> Response:
        alone = bool(self.base) and all(map(is_factor, self._staged))
        self.weights = {**self.weights, **self._staged} if alone else self._staged
        self.version = body.version
        self.commits.append(body)
        digest = xxhash.xxh3_64_hexdigest(
            b"".join(t.view(torch.uint8).numpy().tobytes() for t in self.weights.values())
        )
        return json_answer(
            CommitResult(
                version=body.version,
                fingerprint=self.stale_checksum or (f"wrong {digest}" if self.loads_wrong else digest),
                probe_logprobs=self._probe(body),
                load_s=0.01,
                pause_s=0.002,
                slices=None if self.joins and self.joins[-1].sliced else self.slices,
            )
        )
