"""Sync verifiers in worker processes, which are killed at a deadline."""

from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager

from pydantic import BaseModel

from protocol.rewards import ScoreItem
from reward_service.config import RewardServiceConfig
from reward_service.jobs import Job
from reward_service.lanes.contract import Lane, Opener, Surroundings
from reward_service.pool import PoolSettings, WorkerPool
from reward_service.verifier import Outcome, UserError, error_of, validate_arguments


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


def pool_settings(config: RewardServiceConfig, *, trusted: bool) -> PoolSettings:
    """The limits of one verifier's workers. Only a trusted one's see the service's environment variables."""
    return PoolSettings(
        workers=config.workers.count,
        compute_timeout_s=config.workers.compute_timeout_s,
        start_timeout_s=config.workers.start_timeout_s,
        memory_limit_mib=config.workers.memory_limit_mib,
        max_attempts=config.workers.max_attempts,
        inherit_environment=trusted,
    )
