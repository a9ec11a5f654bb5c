"""Three ways to run a verifier: in the service's process, on its event loop, or in workers killed at a deadline."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import ClassVar

from pydantic import BaseModel

from protocol.rewards import ScoreError, ScoreItem
from reward_service.verifier.config import ScoringConfig
from reward_service.verifier.contract import Lane, Opener, Surroundings
from reward_service.verifier.submission import Outcome, Submission, UserError, error_of, to_score, validate_arguments
from reward_service.verifier.worker_pool import Job, PoolSettings, WorkerPool

AsyncFunction = Callable[..., Awaitable[object]]


class EventLoopLane(Lane):
    """At most `concurrency` items are judged at a time; others wait, up to their deadlines."""

    def __init__(self, *, function: AsyncFunction, arguments: type[BaseModel], concurrency: int) -> None:
        self._function = function
        self._arguments = arguments
        self._concurrency = concurrency
        self._places = asyncio.Semaphore(concurrency)

    def share(self) -> int:
        """As many as are judged at a time."""
        return self._concurrency

    async def judge(self, item: ScoreItem, *, deadline: float) -> Outcome:
        """The outcome, at the deadline at the latest."""
        limit = asyncio.timeout_at(deadline)
        submission = Submission(completion=item.completion, prompt=item.prompt)
        try:
            arguments = validate_arguments(model=self._arguments, arguments=item.arguments)
            async with limit, self._places:
                value = await self._function(submission, arguments)
            return Outcome(result=to_score(value))
        except Exception as error:  # noqa: BLE001  whatever a verifier raises becomes an error of this item alone
            if limit.expired():
                late = ScoreError(kind="infrastructure", message="deadline: the verifier took too long")
                return Outcome(result=late)
            return Outcome(result=error_of(error))


def on_event_loop(function: AsyncFunction) -> Opener:
    """Judge with an async function that never blocks; it is cancelled at the item's deadline."""

    @asynccontextmanager
    async def opened(surroundings: Surroundings) -> AsyncIterator[Lane]:
        yield EventLoopLane(
            function=function,
            arguments=surroundings.verifier.arguments,
            concurrency=surroundings.config.async_concurrency,
        )

    return opened


class InlineLane(Lane):
    """It has no deadline: an item is judged at once."""

    at_once: ClassVar[bool] = True

    def __init__(self, *, function: Callable[..., object], arguments: type[BaseModel]) -> None:
        self._function = function
        self._arguments = arguments

    def judge(self, item: ScoreItem, *, deadline: float) -> Outcome:
        """The outcome, at once."""
        try:
            arguments = validate_arguments(model=self._arguments, arguments=item.arguments)
            submission = Submission(completion=item.completion, prompt=item.prompt)
            return Outcome(result=to_score(self._function(submission, arguments)))
        except Exception as error:  # noqa: BLE001  whatever a verifier raises becomes an error of this item alone
            return Outcome(result=error_of(error))


def inline(function: Callable[..., object]) -> Opener:
    """Judge in the service itself, one item after the other: for sync functions that take well below a millisecond."""

    @asynccontextmanager
    async def opened(surroundings: Surroundings) -> AsyncIterator[Lane]:
        yield InlineLane(function=function, arguments=surroundings.verifier.arguments)

    return opened


class WorkerLane(Lane):
    """Arguments that do not fit are refused without troubling a worker."""

    def __init__(self, *, pool: WorkerPool, arguments: type[BaseModel]) -> None:
        self._pool = pool
        self._arguments = arguments

    def judge(self, item: ScoreItem, *, deadline: float) -> Outcome | Awaitable[Outcome]:
        """The outcome of a worker, at the deadline at the latest."""
        try:
            validate_arguments(model=self._arguments, arguments=item.arguments)
        except UserError as error:
            return Outcome(result=error_of(error))
        job = Job(completion=item.completion, prompt=item.prompt, arguments=item.arguments)
        return self._pool.run(job=job, deadline=deadline)

    def share(self) -> int:
        """One in each worker, and one for each that waits for it."""
        return 2 * self._pool.size

    async def prewarm(self) -> None:
        """Start all workers; returns before they have loaded."""
        await self._pool.prewarm()

    def workers(self) -> tuple[int, int]:
        """How many of the pool's processes have a job, and how many there are."""
        return self._pool.busy, self._pool.size


def in_workers(path: str, *, unsafe: str | None = None, trusted: bool = False) -> Opener:
    """Judge in worker processes by the function at the import path `package.module:function`.

    `unsafe`: the function in its place where the operator has said sandbox = "unsafe". `trusted`: the workers see the
    service's environment variables. The service itself never imports the module.
    """

    @asynccontextmanager
    async def opened(surroundings: Surroundings) -> AsyncIterator[Lane]:
        config, verifier = surroundings.config, surroundings.verifier
        pool = WorkerPool(
            path=unsafe if unsafe is not None and config.sandbox == "unsafe" else path,
            settings=pool_settings(config, trusted=trusted),
            on_kill=surroundings.metrics.killed_workers.labels(verifier.name).inc,
        )
        async with pool:
            yield WorkerLane(pool=pool, arguments=verifier.arguments)

    return opened


def pool_settings(config: ScoringConfig, *, trusted: bool) -> PoolSettings:
    """The limits of one verifier's workers. Only a trusted one's see the service's environment variables."""
    return PoolSettings(
        workers=config.workers.count,
        compute_timeout_s=config.workers.compute_timeout_s,
        start_timeout_s=config.workers.start_timeout_s,
        memory_limit_mib=config.workers.memory_limit_mib,
        max_attempts=config.workers.max_attempts,
        inherit_environment=trusted,
    )
