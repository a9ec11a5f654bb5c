"""Worker processes for one verifier: started at need, killed at a deadline, replaced after.

    Scorer -> run(job) -> an idle worker takes the job -> its reply, or the worker is killed -> the worker is idle again

`run` waits for an idle worker (freed when another job ends or is killed), for that worker to have loaded its verifier
(bounded by `start_timeout_s`) and for the reply (bounded by `compute_timeout_s`); each wait also ends at the item's own
deadline.
"""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from protocol.rewards import ScoreError
from reward_service.jobs import MAX_LINE_BYTES, Job, Reply
from reward_service.verifier import InfrastructureError, Outcome, Score

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PoolSettings:
    """Limits of the workers of one verifier. `inherit_environment`: they see the service's environment variables."""

    workers: int
    compute_timeout_s: float
    start_timeout_s: float
    memory_limit_mib: int
    max_attempts: int
    inherit_environment: bool


class WorkerDied(Exception):
    """The process ended, or broke the exchange, without a reply."""


class Worker:
    """One process that serves one job at a time. It must be stopped after an exchange that did not complete."""

    def __init__(self, *, path: str, settings: PoolSettings) -> None:
        self._path = path
        self._settings = settings
        self._process: asyncio.subprocess.Process | None = None
        self._loaded = False
        self._start_deadline = 0.0

    async def start(self) -> None:
        """Start the process if there is none alive. Does not wait until it has loaded the verifier.

        Raises InfrastructureError if the system can start no process.
        """
        if self._process is not None and self._process.returncode is None:
            return
        await self.stop()
        try:
            self._process = await self._spawn()
        except OSError as error:
            raise InfrastructureError(f"cannot start a worker process: {error}") from error
        self._start_deadline = asyncio.get_running_loop().time() + self._settings.start_timeout_s

    async def _spawn(self) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            # -P: a folder named like one of our packages in the working directory must not be imported.
            *(sys.executable, "-P", "-m", "reward_service.worker"),
            *(self._path, str(self._settings.memory_limit_mib), str(os.getpid())),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=_environment(inherit=self._settings.inherit_environment),
            start_new_session=True,
            limit=MAX_LINE_BYTES,
        )

    async def ready(self) -> None:
        """Wait until the verifier is loaded. May be cancelled and called again: the process goes on loading."""
        await self.start()
        if self._loaded:
            return
        try:
            async with asyncio.timeout_at(self._start_deadline):
                reply = await self._read()
        except TimeoutError:
            await self.stop()
            raise InfrastructureError(f"a worker did not start in {self._settings.start_timeout_s:g} s") from None
        except WorkerDied:
            await self.stop()
            raise
        if reply.error is not None:
            await self.stop()
            raise InfrastructureError(f"a worker could not load its verifier: {reply.error.message}")
        self._loaded = True

    async def exchange(self, job: Job) -> Reply:
        """Send a job and wait for its reply. Raises WorkerDied."""
        pipe = None if self._process is None else self._process.stdin
        assert pipe is not None, "exchange before start"
        try:
            pipe.write(job.model_dump_json().encode() + b"\n")
            await pipe.drain()
        except (OSError, RuntimeError) as error:  # uvloop raises RuntimeError for a pipe that has closed
            raise WorkerDied from error
        return await self._read()

    async def stop(self) -> None:
        """Kill the process, and what it has started, and wait for its end."""
        process, self._process, self._loaded = self._process, None, False
        if process is None:
            return
        if process.returncode is None:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                logger.debug("worker %d had ended by itself", process.pid)
        await process.wait()

    async def _read(self) -> Reply:
        pipe = None if self._process is None else self._process.stdout
        assert pipe is not None, "read before start"
        try:
            line = await pipe.readline()
            return Reply.model_validate_json(line)
        except ValueError as error:  # a line beyond the limit, an empty one at the end, or no reply of ours
            raise WorkerDied from error


class WorkerPool:
    """The workers of one verifier. A context manager: leaving it kills them all."""

    def __init__(self, *, path: str, settings: PoolSettings, on_kill: Callable[[], None]) -> None:
        self._path = path
        self._settings = settings
        self._on_kill = on_kill
        self._workers = tuple(Worker(path=path, settings=settings) for _ in range(settings.workers))
        # Last in, first out: a worker that has started is preferred to one that has not.
        self._idle = asyncio.LifoQueue[Worker](maxsize=settings.workers)
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

    async def run(self, *, job: Job, deadline: float) -> Outcome:
        """The outcome of a job. `deadline` is on the event loop's clock; a job that kills its worker is tried again."""
        for attempt in range(1, self._settings.max_attempts + 1):
            try:
                reply = await self._attempt(job=job, deadline=deadline)
                return Outcome(result=_result_of(reply), attempts=attempt)
            except WorkerDied:
                logger.warning("a worker of %s died in the middle of a job (attempt %d)", self._path, attempt)
            except InfrastructureError as error:
                return Outcome(result=ScoreError(kind="infrastructure", message=str(error)), attempts=attempt)
        message = f"the worker died at each of {attempt} attempts"
        return Outcome(result=ScoreError(kind="infrastructure", message=message), attempts=attempt)

    async def _attempt(self, *, job: Job, deadline: float) -> Reply:
        try:
            async with asyncio.timeout_at(deadline):
                worker = await self._idle.get()
        except TimeoutError:
            raise InfrastructureError("deadline: no worker was free in time") from None
        try:
            return await self._judge(worker=worker, job=job, deadline=deadline)
        finally:
            self._idle.put_nowait(worker)

    async def _judge(self, *, worker: Worker, job: Job, deadline: float) -> Reply:
        try:
            async with asyncio.timeout_at(deadline):
                await worker.ready()
        except TimeoutError:
            raise InfrastructureError("deadline: the worker was still starting") from None
        limit = asyncio.get_running_loop().time() + self._settings.compute_timeout_s
        completed = False
        try:
            async with asyncio.timeout_at(min(limit, deadline)):
                reply = await worker.exchange(job)
            completed = True
            return reply
        except TimeoutError:
            raise InfrastructureError("deadline: the verifier took too long, and was killed") from None
        finally:
            if not completed:
                self._on_kill()
                await worker.stop()
                await worker.start()


def _result_of(reply: Reply) -> Score | ScoreError:
    if reply.error is not None:
        return reply.error
    if reply.reward is None:
        return ScoreError(kind="infrastructure", message="the worker sent a reply without a reward")
    return Score(reward=reply.reward, components=reply.components)


def _environment(*, inherit: bool) -> dict[str, str]:
    """What a worker sees: what it needs to import the same modules as the service, and no secret of the service."""
    own = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1", "LC_ALL": "C.UTF-8"}
    return {**os.environ, **own} if inherit else {"PATH": os.environ.get("PATH", os.defpath), **own}
