"""The generator's side of weight sync: meet, prepare, commit, as the learner asks for them over HTTP."""

import logging
import time

from generator.engine import Engine
from generator.measures import Measures
from generator.serving import Serving
from generator.weight_plan import WeightSyncError
from protocol.fleet import Commit, Committed, JoinedGroup, JoinGroup, Prepare, Prepared
from protocol.versions import PolicyVersion
from services.http_app import RequestRefused

log = logging.getLogger(__name__)


class WeightSync:
    """One sync at a time. A step of an epoch that is not the current one is refused: its learner has moved on."""

    def __init__(self, *, engine: Engine, serving: Serving, measures: Measures) -> None:
        self._engine = engine
        self._serving = serving
        self._measures = measures
        self._epoch = 0
        self._staged: str | None = None

    async def join(self, request: JoinGroup) -> JoinedGroup:
        """Joins the process group of an epoch. Raises RequestRefused."""
        self._epoch, self._staged = 0, None
        try:
            await self._engine.join_group(request)
        except WeightSyncError as error:
            raise self._failed("group", error) from error
        self._epoch = request.epoch
        return JoinedGroup(epoch=request.epoch)

    async def prepare(self, request: Prepare) -> Prepared:
        """Receives all buckets while serving goes on. Raises RequestRefused; the old weights serve on."""
        self._check_epoch(request.epoch)
        self._staged = None
        began = time.monotonic()
        try:
            await self._engine.stage(request)
        except WeightSyncError as error:
            self._epoch = 0
            raise self._failed("prepare", error) from error
        self._staged = request.version
        return Prepared(version=request.version, receive_s=time.monotonic() - began)

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
            self._epoch = 0
            if error.unloaded:
                self._serving.holds(None)
            raise self._failed("commit", error) from error
        self._serving.holds(request.version)
        probe = await self._probe(request)
        committed = Committed(
            version=request.version,
            fingerprint=report.fingerprint,
            probe_logprobs=probe,
            load_s=report.load_s,
            pause_s=report.pause_s,
        )
        self._measures.committed(committed, number=PolicyVersion.parse(request.version).number)
        return committed

    async def _probe(self, request: Commit) -> tuple[float, ...]:
        if len(request.probe_token_ids) < 2:
            return ()
        return await self._engine.score(request_id=f"probe-{request.version}", token_ids=request.probe_token_ids)

    def _check_epoch(self, epoch: int) -> None:
        if epoch != self._epoch:
            message = f"this generator is in the group of epoch {self._epoch}, not {epoch}: meet again first"
            raise RequestRefused(409, "wrong_epoch", message)

    def _failed(self, step: str, error: WeightSyncError) -> RequestRefused:
        self._measures.sync_failed(step)
        log.warning("weight sync failed at %s: %s", step, error)
        return RequestRefused(409, f"{step}_failed", str(error))
