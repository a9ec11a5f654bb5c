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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from pydantic import Field, JsonValue

from protocol.model import WireModel
from protocol.rewards import ScoreError
from reward_service.verifier.submission import InfrastructureError, Outcome, Score
from services.process import seal_descriptors

MAX_LINE_BYTES = 1 << 22


class Job(WireModel):
    """One submission to be judged, with the verifier's arguments as they came."""

    completion: str
    prompt: str
    arguments: dict[str, JsonValue]


class Reply(WireModel):
    """A worker's answer to a job; its first line, without a reward, says that it is ready or why it cannot be."""

    reward: float | None = None
    components: dict[str, float] = Field(default_factory=dict)
    error: ScoreError | None = None


logger = logging.getLogger(__name__)


class WorkerDied(Exception):
    """The process ended, or broke the exchange, without a reply."""


class WorkerProcess:
    """One process that serves one request at a time. It must be stopped after an exchange that did not complete.

    `command` is a module and its arguments, to which the id of this process is added. Its first line, a `Reply`, says
    that it has loaded what it needs, or why it cannot.
    """

    def __init__(self, *, command: Sequence[str], environment: Mapping[str, str], start_timeout_s: float) -> None:
        self._command = tuple(command)
        self._environment = dict(environment)
        self._start_timeout_s = start_timeout_s
        self._process: asyncio.subprocess.Process | None = None
        self._loaded = False
        self._start_deadline = 0.0

    @property
    def process_id(self) -> int | None:
        """Of the process, if there is one."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Start the process if there is none alive. Does not wait until it has loaded.

        Raises InfrastructureError if the system can start no process.
        """
        if self._process is not None and self._process.returncode is None:
            return
        await self.stop()
        try:
            self._process = await self._spawn()
        except OSError as error:
            raise InfrastructureError(f"cannot start a worker process: {error}") from error
        self._start_deadline = asyncio.get_running_loop().time() + self._start_timeout_s

    async def _spawn(self) -> asyncio.subprocess.Process:
        seal_descriptors()
        return await asyncio.create_subprocess_exec(
            # -P: a folder named like one of our packages in the working directory must not be imported.
            *(sys.executable, "-P", "-m", *self._command, str(os.getpid())),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=self._environment,
            start_new_session=True,
            limit=MAX_LINE_BYTES,
        )

    async def ready(self) -> None:
        """Wait until the process has loaded. May be cancelled and called again: it goes on loading.

        Raises InfrastructureError if it cannot load or takes too long, WorkerDied.
        """
        await self.start()
        if self._loaded:
            return
        try:
            async with asyncio.timeout_at(self._start_deadline):
                reply = await self._first_reply()
        except TimeoutError:
            await self.stop()
            raise InfrastructureError(f"a worker did not start in {self._start_timeout_s:g} s") from None
        except WorkerDied:
            await self.stop()
            raise
        if reply.error is not None:
            await self.stop()
            raise InfrastructureError(f"a worker could not load its verifier: {reply.error.message}")
        self._loaded = True

    async def exchange(self, line: bytes) -> bytes:
        """Send a line, given without its end, and wait for the reply. Raises WorkerDied."""
        pipe = None if self._process is None else self._process.stdin
        assert pipe is not None, "exchange before start"
        try:
            pipe.write(line + b"\n")
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

    async def _first_reply(self) -> Reply:
        try:
            return Reply.model_validate_json(await self._read())
        except ValueError as error:
            raise WorkerDied from error

    async def _read(self) -> bytes:
        pipe = None if self._process is None else self._process.stdout
        assert pipe is not None, "read before start"
        try:
            line = await pipe.readline()
        except ValueError as error:  # a line beyond the limit
            raise WorkerDied from error
        if not line.endswith(b"\n"):
            raise WorkerDied
        return line


def worker_environment(*, inherit: bool, threads: int = 1) -> dict[str, str]:
    """What a worker sees: what it needs to import the same modules as the service, and no secret of the service."""
    own = {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "OMP_NUM_THREADS": str(threads),
        "LC_ALL": "C.UTF-8",
    }
    return {**os.environ, **own} if inherit else {"PATH": os.environ.get("PATH", os.defpath), **own}


@dataclass(frozen=True, kw_only=True)
class PoolSettings:
    """Limits of the workers of one verifier. `inherit_environment`: they see the service's environment variables."""

    workers: int
    compute_timeout_s: float
    start_timeout_s: float
    memory_limit_mib: int
    max_attempts: int
    inherit_environment: bool


class WorkerPool:
    """The workers of one verifier. A context manager: leaving it kills them all."""

    def __init__(self, *, path: str, settings: PoolSettings, on_kill: Callable[[], None]) -> None:
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
            if asyncio.get_running_loop().time() >= deadline:  # nothing was waited for, so nothing has timed out
                raise InfrastructureError("deadline: it had passed before a worker was free")
            return await self._judge(worker=worker, job=job, deadline=deadline)
        finally:
            self._idle.put_nowait(worker)

    async def _judge(self, *, worker: WorkerProcess, job: Job, deadline: float) -> Reply:
        try:
            async with asyncio.timeout_at(deadline):
                await worker.ready()
        except TimeoutError:
            raise InfrastructureError("deadline: the worker was still starting") from None
        limit = asyncio.get_running_loop().time() + self._settings.compute_timeout_s
        completed = False
        try:
            async with asyncio.timeout_at(min(limit, deadline)):
                reply = _reply_of(await worker.exchange(job.model_dump_json().encode()))
            completed = True
            return reply
        except TimeoutError:
            raise InfrastructureError("deadline: the verifier took too long, and was killed") from None
        finally:
            if not completed:
                self._on_kill()
                await worker.stop()
                await worker.start()


def _worker(path: str, settings: PoolSettings) -> WorkerProcess:
    return WorkerProcess(
        command=("reward_service.verifier.worker", path, str(settings.memory_limit_mib)),
        environment=worker_environment(inherit=settings.inherit_environment),
        start_timeout_s=settings.start_timeout_s,
    )


def _reply_of(line: bytes) -> Reply:
    try:
        return Reply.model_validate_json(line)
    except ValueError as error:  # no reply of ours
        raise WorkerDied from error


def _result_of(reply: Reply) -> Score | ScoreError:
    if reply.error is not None:
        return reply.error
    if reply.reward is None:
        return ScoreError(kind="infrastructure", message="the worker sent a reply without a reward")
    return Score(reward=reply.reward, components=reply.components)
