"""Worker processes for one verifier: started at need, killed at a deadline, replaced after.

    Scorer -> run(job) -> an idle worker takes the job -> its reply, or the worker is killed -> the worker is idle again

`run` waits for an idle worker (freed when another job ends or is killed), for that worker to have loaded its verifier
(bounded by `start_timeout_s`) and for the reply (bounded by `compute_timeout_s`); each wait also ends at the item's own
deadline.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from pydantic import Field, JsonValue

from protocol.model import WireModel
from protocol.rewards import ScoreError
from reward_service.verifier.submission import InfrastructureError, Outcome, Score
from services.worker_process import WorkerDied, WorkerProcess, WorkerUnavailable, worker_environment

logger = logging.getLogger(__name__)


class VerifierJob(WireModel):
    """A submission to be judged, with the verifier's arguments as they came; of a group, the first, and `beside` it
    the others.
    """

    completion: str
    prompt: str
    arguments: dict[str, JsonValue]
    beside: "tuple[VerifierJob, ...]" = ()


class WorkerReply(WireModel):
    """A worker's answer to a job; of a group, that to the first, and `beside` it those to the others."""

    reward: float | None = None
    components: dict[str, float] = Field(default_factory=dict)
    error: ScoreError | None = None
    explanation: str = ""
    beside: "tuple[WorkerReply, ...]" = ()


@dataclass(frozen=True, kw_only=True)
class WorkerPoolSettings:
    """Limits of the workers of one verifier. `inherit_environment`: they see the service's environment variables."""

    workers: int
    compute_timeout_s: float
    start_timeout_s: float
    memory_limit_mib: int
    max_attempts: int
    inherit_environment: bool


class WorkerPool:
    """The workers of one verifier. A context manager: leaving it kills them all."""

    def __init__(self, *, path: str, settings: WorkerPoolSettings, on_kill: Callable[[], None]) -> None:
        self._path = path
        self._settings = settings
        self._on_kill = on_kill
        self._workers = tuple(_worker(path, settings) for _ in range(settings.workers))
        # Last in, first out: a worker that has started is preferred to one that has not.
        self._idle = asyncio.LifoQueue[WorkerProcess](maxsize=settings.workers)
        for worker in self._workers:
            self._idle.put_nowait(worker)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for worker in self._workers:
            await worker.stop()

    @property
    def size(self) -> int:
        return len(self._workers)

    @property
    def busy(self) -> int:
        """Workers that have a job now."""
        return len(self._workers) - self._idle.qsize()

    async def prewarm(self) -> None:
        """Start all workers; returns before they have loaded."""
        for worker in self._workers:
            await worker.start()

    async def run(self, *, job: VerifierJob, deadline: float) -> Outcome:
        """The outcome of a job. `deadline` is on the event loop's clock; a job that kills its worker is tried again."""
        (outcome,) = await self.run_together(job=job, deadline=deadline)
        return outcome

    async def run_together(self, *, job: VerifierJob, deadline: float) -> Sequence[Outcome]:
        """The outcomes of a job and of those beside it, as `run`."""
        for attempt in range(1, self._settings.max_attempts + 1):
            try:
                reply = await self._attempt(job=job, deadline=deadline)
                return [Outcome(result=_result_of(each), attempts=attempt) for each in (reply, *reply.beside)]
            except WorkerDied:
                logger.warning("a worker of %s died in the middle of a job (attempt %d)", self._path, attempt)
            except (InfrastructureError, WorkerUnavailable) as error:
                why = str(error)
                break
        else:
            why = f"the worker died at each of {attempt} attempts"
        failed = Outcome(result=ScoreError(kind="infrastructure", message=why), attempts=attempt)
        return [failed] * (1 + len(job.beside))

    async def _attempt(self, *, job: VerifierJob, deadline: float) -> WorkerReply:
        try:
            async with asyncio.timeout_at(deadline):
                worker = await self._idle.get()
        except TimeoutError:
            raise InfrastructureError("deadline: no worker was free in time") from None
        try:
            if asyncio.get_running_loop().time() >= deadline:  # nothing was waited for, so nothing has timed out
                raise InfrastructureError("deadline: it had passed before a worker was free")
            return await self._judge(worker=worker, job=job, deadline=deadline)
        finally:
            self._idle.put_nowait(worker)

    async def _judge(self, *, worker: WorkerProcess, job: VerifierJob, deadline: float) -> WorkerReply:
        try:
            async with asyncio.timeout_at(deadline):
                await worker.ready()
        except TimeoutError:
            raise InfrastructureError("deadline: the worker was still starting") from None
        limit = asyncio.get_running_loop().time() + self._settings.compute_timeout_s
        completed = False
        try:
            async with asyncio.timeout_at(min(limit, deadline)):
                reply = _reply_of(await worker.exchange(job.model_dump_json().encode()), count=1 + len(job.beside))
            completed = True
            return reply
        except TimeoutError:
            raise InfrastructureError("deadline: the verifier took too long, and was killed") from None
        finally:
            if not completed:
                self._on_kill()
                await worker.stop()
                await worker.start()


def _worker(path: str, settings: WorkerPoolSettings) -> WorkerProcess:
    return WorkerProcess(
        command=("reward_service.verifier.worker", path, str(settings.memory_limit_mib)),
        environment=worker_environment(inherit=settings.inherit_environment),
        start_timeout_s=settings.start_timeout_s,
        what="its verifier",
    )


def _reply_of(line: bytes, *, count: int) -> WorkerReply:
    try:
        reply = WorkerReply.model_validate_json(line)
    except ValueError as error:  # no reply of ours
        raise WorkerDied("its answer is none of ours") from error
    if 1 + len(reply.beside) != count:
        raise WorkerDied(f"it answered {1 + len(reply.beside)} of {count} submissions")
    return reply


def _result_of(reply: WorkerReply) -> Score | ScoreError:
    if reply.error is not None:
        return reply.error
    if reply.reward is None:
        return ScoreError(kind="infrastructure", message="the worker sent a reply without a reward")
    return Score(reward=reply.reward, components=reply.components, explanation=reply.explanation)
