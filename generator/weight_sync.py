"""The generator's side of weight sync, as the learner asks for it over HTTP.

group ─▶ prepare ─┐
            pull ─┴▶ commit
"""

import asyncio
import logging
import tempfile
import time
from pathlib import Path

from generator.engine import Engine
from generator.gated_llm import HandedBack
from generator.measures import Measures
from generator.puller import Puller
from generator.serving import Serving
from generator.weight_plan import WeightSyncError
from protocol.fleet import PULLED_EPOCH, Commit, Committed, JoinedGroup, JoinGroup, Prepare, Prepared, Pull
from protocol.versions import PolicyVersion
from services.refusals import RequestRefused

log = logging.getLogger(__name__)

PROBE_TIMEOUT_S = 15.0


class WeightSync:
    """One sync at a time. A step of an epoch that is not the current one is refused: its learner has moved on.

    While the generator is not able (it leaves, or its engine does not answer) only a commit is taken.
    """

    def __init__(
        self, *, engine: Engine, serving: Serving, measures: Measures, puller: Puller, folder: Path | None
    ) -> None:
        self._engine = engine
        self._serving = serving
        self._measures = measures
        self._puller = puller
        self._folder = folder
        self._epoch: int | None = None
        self._staged: str | None = None
        self._pulling: asyncio.Task[Prepared] | None = None

    async def join(self, request: JoinGroup) -> JoinedGroup:
        """Joins the process group of an epoch. Raises RequestRefused."""
        self._check_able()
        self._epoch, self._staged = None, None
        try:
            await self._engine.join_group(request)
        except WeightSyncError as error:
            raise self._failed("group", error) from error
        self._epoch = request.epoch
        return JoinedGroup(epoch=request.epoch)

    async def prepare(self, request: Prepare) -> Prepared:
        """Receives all buckets while serving goes on. Raises RequestRefused; the old weights serve on."""
        self._check_able()
        self._check_epoch(request.epoch)
        self._staged = None
        began = time.monotonic()
        try:
            await self._engine.stage(request)
        except WeightSyncError as error:
            self._epoch = None
            raise self._failed("prepare", error) from error
        self._staged = request.version
        return Prepared(version=request.version, receive_s=time.monotonic() - began)

    async def pull(self, request: Pull) -> Prepared:
        """Downloads a version while serving goes on. Raises RequestRefused; a later request ends an earlier one."""
        self._check_able()
        if self._pulling is not None:
            self._pulling.cancel()
        self._epoch, self._staged = None, None
        self._pulling = task = asyncio.ensure_future(self._pull(request))
        try:
            return await task
        except asyncio.CancelledError:
            if self._pulling is task:
                raise
            message = f"the download of version {request.version} was given up for another one"
            raise RequestRefused(409, "superseded", message) from None
        finally:
            task.cancel()
            if self._pulling is task:
                self._pulling = None

    async def _pull(self, request: Pull) -> Prepared:
        began = time.monotonic()
        try:
            async with asyncio.timeout(request.deadline_s):
                await self._download(request.version)
        except WeightSyncError as error:
            raise self._failed("pull", error) from error
        except OSError as error:  # a TimeoutError is one
            why = f"it took more than {request.deadline_s:g} s" if isinstance(error, TimeoutError) else str(error)
            source = self._puller.learner
            failure = WeightSyncError(f"the download of version {request.version} from {source} failed: {why}")
            raise self._failed("pull", failure) from error
        self._epoch, self._staged = PULLED_EPOCH, request.version
        return Prepared(version=request.version, receive_s=time.monotonic() - began)

    async def _download(self, version: str) -> None:
        with tempfile.TemporaryDirectory(prefix="headway-pull-", dir=self._folder) as folder:
            plan, paths = await self._puller.download(version, Path(folder))
            await self._engine.stage_files(plan, paths=paths)

    async def commit(self, request: Commit) -> Committed:
        """Loads what is staged and serves it; then the logprobs of the probe. Raises RequestRefused."""
        self._check_epoch(request.epoch)
        if self._staged != request.version:
            message = f"version {request.version} is not staged here; staged is {self._staged}: prepare it first"
            raise RequestRefused(409, "not_staged", message)
        self._staged = None
        try:
            report = await self._engine.commit(version=request.version)
        except WeightSyncError as error:
            self._epoch = None
            if error.unloaded:
                self._serving.holds(None)
            elif self._engine.version == request.version:
                self._serving.holds(request.version)
            raise self._failed("commit", error) from error
        self._serving.holds(request.version)
        committed = Committed(
            version=request.version,
            fingerprint=report.fingerprint,
            probe_logprobs=await self._probe(request),
            load_s=report.load_s,
            pause_s=report.pause_s,
        )
        self._measures.committed(committed, number=PolicyVersion.parse(request.version).number)
        return committed

    async def _probe(self, request: Commit) -> tuple[float, ...]:
        if len(request.probe_token_ids) < 2:
            return ()
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                scored = await self._engine.score(
                    request_id=f"probe-{request.version}", token_ids=request.probe_token_ids
                )
                return scored.logprobs
        except (HandedBack, TimeoutError, ValueError) as error:
            why = f"the probe of version {request.version} had no answer: {str(error) or 'the engine took too long'}"
            raise self._failed("probe", WeightSyncError(why)) from error

    def _check_able(self) -> None:
        condition = self._serving.condition
        if condition != "able":
            raise RequestRefused(503, condition, f"this generator is {condition}, and takes no weights")

    def _check_epoch(self, epoch: int) -> None:
        if epoch != self._epoch:
            holds = "no group" if self._epoch is None else f"epoch {self._epoch}"
            message = f"this generator is in {holds}, not in epoch {epoch}: meet again first"
            raise RequestRefused(409, "wrong_epoch", message)

    def _failed(self, step: str, error: WeightSyncError) -> RequestRefused:
        self._measures.sync_failed(step)
        log.warning("weight sync failed at %s: %s", step, error)
        return RequestRefused(409, f"{step}_failed", str(error))
