"""The generator's side of weight sync: broadcasts, the learner's memory, or downloads in chunks with hashes; then a
commit.

group ─▶ prepare ─┐
 host ─▶ prepare ─┤
            pull ─┴▶ commit ─▶ probe, if the engine did not come to it in the commit
"""

import asyncio
import logging
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import xxhash

from generator.engine.engine import Engine
from generator.engine.gated_llm import HandedBack
from generator.engine.refusals import RequestUntimely
from generator.serving import GeneratorMetrics, Serving
from generator.weights.plan import WeightSyncError
from generator.weights.tree_download import ObjectMissing, TreeDownloads
from protocol.fleet import (
    CHUNK_HASH_HEADER,
    PROBE_TIMEOUT_S,
    PULL_TOOK_TOO_LONG,
    PULLED_EPOCH,
    Commit,
    CommitResult,
    FormerLoad,
    JoinedGroup,
    JoinGroup,
    Prepare,
    PrepareResult,
    Pull,
    PullPlan,
    Reprobe,
    ReprobeResult,
    SharedMemory,
    SharedMemoryAnswer,
    WeightForm,
)
from protocol.model import PolicyVersion
from services.http.client import HttpClient, ServiceError, ServiceRefused
from services.http.refusals import RequestRefused

logger = logging.getLogger(__name__)

CHUNK_TIMEOUT_S = 10.0
FIRST_REST_S = 0.1
MAX_REST_S = 2.0
_SECRET_BYTES = 64


class Puller:
    """Downloads from one learner. A chunk that fails is asked for again until the caller's own deadline."""

    def __init__(self, *, client: HttpClient, learner: str) -> None:
        self._client = client
        self.learner = learner.rstrip("/")

    async def download(
        self, version: str, folder: Path, *, form: WeightForm = "whole"
    ) -> tuple[Prepare, Sequence[str]]:
        """Writes one file for each bucket of `version` in that form to `folder`; their plan and their paths.

        Raises WeightSyncError if the learner does not have the version, and OSError if there is no room.
        """
        url = f"{self.learner}/v1/weights/{version}"
        try:
            plan = await self._client.get(f"{url}/plan?form={form}", PullPlan, deadline_s=CHUNK_TIMEOUT_S, retries=3)
        except ServiceError as error:
            raise WeightSyncError(f"the learner gave no plan of version {version}: {error}") from error
        paths = [str(folder / f"{index}.bucket") for index in range(len(plan.buckets))]
        for index, (bucket, path) in enumerate(zip(plan.buckets, paths, strict=True)):
            place = f"{url}/buckets/{index}?form={form}"
            await self._bucket(place, path, nbytes=bucket.nbytes, chunk_bytes=plan.chunk_bytes)
        return Prepare(version=version, epoch=PULLED_EPOCH, buckets=plan.buckets, adapter=plan.adapter), paths

    async def bucket(self, version: str, index: int, path: str, nbytes: int) -> None:
        """Writes one bucket of a version of whole weights to a file. Raises WeightSyncError, OSError."""
        url = f"{self.learner}/v1/weights/{version}"
        try:
            plan = await self._client.get(f"{url}/plan?form=whole", PullPlan, deadline_s=CHUNK_TIMEOUT_S, retries=3)
        except ServiceError as error:
            raise WeightSyncError(f"the learner gave no plan of version {version}: {error}") from error
        await self._bucket(f"{url}/buckets/{index}?form=whole", path, nbytes=nbytes, chunk_bytes=plan.chunk_bytes)

    async def _bucket(self, url: str, path: str, *, nbytes: int, chunk_bytes: int) -> None:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600))
        for offset in range(0, nbytes, chunk_bytes):
            length = min(chunk_bytes, nbytes - offset)
            chunk = await self._chunk(f"{url}&offset={offset}&length={length}", length=length)
            await asyncio.to_thread(_write, path, chunk, offset)

    async def _chunk(self, url: str, *, length: int) -> bytes:
        rest_s = FIRST_REST_S
        while True:
            try:
                chunk, headers = await self._client.download(url, deadline_s=CHUNK_TIMEOUT_S)
            except ServiceRefused as error:
                raise WeightSyncError(f"the learner refused a chunk: {error}") from error
            except ServiceError as error:
                logger.info("requesting a chunk again: %s", error)
            else:
                if len(chunk) == length and headers.get(CHUNK_HASH_HEADER) == xxhash.xxh3_64_hexdigest(chunk):
                    return chunk
                logger.warning("requesting a chunk again: %s: it arrived damaged, %d bytes", url, len(chunk))
            await asyncio.sleep(rest_s)
            rest_s = min(2 * rest_s, MAX_REST_S)


def _write(path: str, chunk: bytes, offset: int) -> None:
    """Opens the file for itself: a download that is given up leaves this thread behind, and must not close under it
    what it writes to.
    """
    file = os.open(path, os.O_WRONLY)
    try:
        rest = memoryview(chunk)
        while rest:
            written = os.pwrite(file, rest, offset)
            rest, offset = rest[written:], offset + written
    finally:
        os.close(file)


class WeightSync:
    """Takes one sync at a time. A step of an epoch that is not the current one is refused: its learner has moved on. So
    is a connection or a download during which another one began, whichever ends first.

    While the generator is not able (it leaves, or its engine does not answer) only a commit is taken. The probe has
    `probe_s` seconds.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        serving: Serving,
        metrics: GeneratorMetrics,
        puller: Puller,
        folder: Path | None,
        probe_s: float = PROBE_TIMEOUT_S,
        tree: TreeDownloads | None = None,
    ) -> None:
        self._probe_s = probe_s
        self._tree = tree
        self._probes = 0
        self._engine = engine
        self._serving = serving
        self._metrics = metrics
        self._puller = puller
        self._folder = folder
        self._epoch: int | None = None
        self._staged: str | None = None
        self._newest = 0
        self._loaded: FormerLoad | None = None
        self._pulling: asyncio.Task[PrepareResult] | None = None

    async def join(self, request: JoinGroup) -> JoinedGroup:
        """Joins the process group of an epoch. Raises RequestRefused."""
        self._check_able()
        number = self._begin()
        try:
            await self._engine.join_group(request)
        except WeightSyncError as error:
            raise self._failed("group", error) from error
        self._check_newest(number, f"connection {request.epoch}")
        self._epoch = request.epoch
        return JoinedGroup(epoch=request.epoch)

    def host(self, request: SharedMemory) -> SharedMemoryAnswer:
        """Tells the secret in the learner's file; nothing if it is not to be seen here."""
        try:
            # Of another process the path may lead to anything, a pipe that nobody writes to, say.
            if os.readlink(request.path) == request.link:
                with open(request.path, "rb") as file:
                    return SharedMemoryAnswer(secret=file.read(_SECRET_BYTES).decode("ascii"))
        except (OSError, UnicodeDecodeError) as error:
            logger.debug("the learner's memory is not to be seen here: %s", error)
        return SharedMemoryAnswer(secret="")

    async def prepare(self, request: Prepare) -> PrepareResult:
        """Receives or maps all buckets while serving goes on. Raises RequestRefused; the old weights serve on."""
        self._check_able()
        if request.files:
            self._begin()
            self._epoch = request.epoch
        self._check_epoch(request.epoch)
        self._staged = None
        number, began = self._newest, time.monotonic()
        try:
            if request.files:
                await self._engine.stage_files(request, paths=request.files)
            else:
                await self._engine.stage(request)
        except WeightSyncError as error:
            self._end(number)
            raise self._failed("prepare", error) from error
        self._check_newest(number, f"version {request.version}")
        self._staged = request.version
        return PrepareResult(version=request.version, receive_s=time.monotonic() - began)

    async def pull(self, request: Pull) -> PrepareResult:
        """Downloads a version while serving goes on. Raises RequestRefused; a later request ends an earlier one."""
        self._check_able()
        self._begin()
        self._pulling = task = asyncio.ensure_future(self._pull(request))
        try:
            return await task
        except asyncio.CancelledError:
            if self._pulling is task:
                raise
            raise _superseded(f"the download of version {request.version}") from None
        finally:
            task.cancel()
            if self._pulling is task:
                self._pulling = None

    def _begin(self) -> int:
        """Begins a sync, with which all that was staged is void, and what still goes on for a former one. Returns its
        number.
        """
        self._give_up_pull()
        self._epoch, self._staged = None, None
        self._newest += 1
        return self._newest

    def _end(self, number: int) -> None:
        """Nothing comes after what has failed, unless another sync has begun since."""
        if number == self._newest:
            self._epoch = None

    def _check_newest(self, number: int, what: str) -> None:
        if number != self._newest:
            raise _superseded(what)

    def _give_up_pull(self) -> None:
        if self._pulling is not None:
            self._pulling.cancel()
            self._pulling = None

    async def _pull(self, request: Pull) -> PrepareResult:
        began = time.monotonic()
        try:
            async with asyncio.timeout(request.deadline_s):
                received = await self._download(request)
        except WeightSyncError as error:
            raise self._failed("pull", error) from error
        except OSError as error:  # a TimeoutError is one
            why = f"it took more than {request.deadline_s:g} s" if isinstance(error, TimeoutError) else str(error)
            source = self._puller.learner
            failure = WeightSyncError(f"the download of version {request.version} from {source} failed: {why}")
            kind = PULL_TOOK_TOO_LONG if isinstance(error, TimeoutError) else "pull_failed"
            raise self._failed("pull", failure, kind=kind) from error
        self._epoch, self._staged = PULLED_EPOCH, request.version
        return PrepareResult(version=request.version, receive_s=time.monotonic() - began, received_bytes=received)

    async def _download(self, request: Pull) -> int | None:
        """Bytes that came, where they are counted."""
        if request.manifest is not None and self._tree is not None:
            try:
                plan, paths, received = await self._tree.download(request.version, request.manifest)
            except ObjectMissing as error:
                logger.warning("version %s is downloaded whole: %s", request.version, error)
            else:
                await self._engine.stage_files(plan, paths=paths)
                return received
        with tempfile.TemporaryDirectory(prefix="headway-pull-", dir=self._folder) as folder:
            plan, paths = await self._puller.download(request.version, Path(folder), form=request.form)
            await self._engine.stage_files(plan, paths=paths)
        return None

    async def commit(self, request: Commit) -> CommitResult:
        """Loads what is staged and serves it; then its checksum, and the probe's logprobs beside that. Raises
        RequestRefused.
        """
        self._check_epoch(request.epoch)
        if self._staged != request.version:
            message = f"version {request.version} is not staged here; staged is {self._staged}: prepare it first"
            raise RequestRefused(409, "not_staged", message)
        self._staged = None
        number = self._newest
        former, self._loaded = self._loaded, None
        try:
            report = await self._engine.commit(version=request.version)
            self._serving.holds(request.version)
            fingerprint, probe_logprobs = await asyncio.gather(
                self._engine.fingerprint(version=request.version), self._probe(request.version, request.probe)
            )
        except WeightSyncError as error:
            self._end(number)
            if error.unloaded:
                self._serving.holds(None)
            elif self._engine.version == request.version:
                self._serving.holds(request.version)
            else:
                self._loaded = former
            raise self._failed("commit", error) from error
        if former is not None and former.fingerprint == fingerprint:
            self._loaded = former  # whatever was sent: a load that did not take place is no later one's measure
        elif request.digest:
            self._loaded = FormerLoad(version=request.version, digest=request.digest, fingerprint=fingerprint)
        committed = CommitResult(
            version=request.version,
            fingerprint=fingerprint,
            probe_logprobs=probe_logprobs,
            load_s=report.load_s,
            pause_s=report.pause_s,
            slices=report.slices,
            former=former,
        )
        self._metrics.committed(committed, number=PolicyVersion.parse(request.version).number)
        return committed

    async def probe(self, request: Reprobe) -> ReprobeResult:
        """Scores texts under the version that is served, which the engine did not come to in its commit. Raises
        RequestRefused if it is another version.
        """
        self._check_able()
        if self._serving.version != request.version:
            message = f"version {request.version} is not served here, but {self._serving.version}: commit it first"
            raise RequestRefused(409, "not_served", message)
        logprobs = await self._probe(request.version, request.probe)
        if self._serving.version != request.version:
            raise RequestRefused(409, "not_served", f"version {request.version} is not served here any more")
        return ReprobeResult(version=request.version, probe_logprobs=logprobs)

    async def _probe(self, version: str, texts: Sequence[Sequence[int]]) -> tuple[float, ...]:
        """Nothing if the engine does not come to it: the weights are loaded and served all the same."""
        self._probes += 1
        name = f"probe-{version}-{self._probes}"
        works = [
            self._engine.score(request_id=f"{name}-{number}", token_ids=text, before_others=True)
            for number, text in enumerate(texts)
        ]
        try:
            async with asyncio.timeout(self._probe_s):
                scored = await asyncio.gather(*works)
        except (HandedBack, RequestUntimely, TimeoutError) as error:
            why = str(error) or f"the engine did not come to it within {self._probe_s:.0f} s"
            logger.warning("the probe of version %s has no answer: %s", version, why)
            return ()
        except ValueError as error:
            why = f"the engine refused the probe of version {version}: {error}"
            raise self._failed("probe", WeightSyncError(why)) from error
        return tuple(logprob for one in scored for logprob in one.logprobs)

    def _check_able(self) -> None:
        condition = self._serving.condition
        if condition != "able":
            raise RequestRefused(503, condition, f"this generator is {condition}, and takes no weights")

    def _check_epoch(self, epoch: int) -> None:
        if epoch != self._epoch:
            holds = "none" if self._epoch is None else f"connection {self._epoch}"
            message = f"this generator holds {holds} to the learner, and not connection {epoch}: connect again first"
            raise RequestRefused(409, "wrong_epoch", message)

    def _failed(self, step: str, error: WeightSyncError, *, kind: str = "") -> RequestRefused:
        self._metrics.sync_failed(step)
        logger.warning("weight sync failed at %s: %s", step, error)
        return RequestRefused(409, kind or f"{step}_failed", str(error))


def _superseded(what: str) -> RequestRefused:
    return RequestRefused(409, "superseded", f"{what} was given up: another sync began meanwhile")
