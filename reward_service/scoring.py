"""Scores a batch: every item by its own verifier, beside each other, each with a reward or an error.

    request -> lane of the item's verifier -> in the service: exact_match and other cheap sync code, at once
                                           -> on the event loop: async verifiers, a bounded number at a time
                                           -> in a worker process: sync verifiers that can hang
                                           -> in the process of a reward model: batches from all requests

A lane belongs to one verifier, so a slow verifier holds up no other.
"""

import asyncio
import time
from collections.abc import Awaitable
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Protocol, Self, cast

from protocol.rewards import ScoreError, ScoreItem, ScoreRequest, ScoreResponse, ScoreResult
from reward_service.config import RewardServiceConfig
from reward_service.jobs import Job
from reward_service.metrics import UNKNOWN, ScoringMetrics
from reward_service.pool import PoolSettings, WorkerPool
from reward_service.registry import Registry, Verifier
from reward_service.reward_models.folder import RewardModel
from reward_service.reward_models.lane import LaneEvents, RewardModelLane, open_lane
from reward_service.verifier import Outcome, Score, Submission, UserError, error_of, to_score, validate_arguments
from services.http_app import RequestRefused


class Lane(Protocol):
    """How the items of one verifier are judged."""

    def judge(self, item: ScoreItem, *, deadline: float) -> Outcome | Awaitable[Outcome]:
        """The outcome at once, or one to wait for; neither raises. `deadline` is on the event loop's clock."""
        ...


class InlineLane:
    """A sync verifier of ours that is cheap and cannot hang; it has no deadline."""

    def __init__(self, verifier: Verifier) -> None:
        self._verifier = verifier

    def judge(self, item: ScoreItem, *, deadline: float) -> Outcome:
        """The outcome, at once."""
        assert self._verifier.function is not None, self._verifier.name
        try:
            arguments = validate_arguments(model=self._verifier.arguments, arguments=item.arguments)
            return Outcome(result=to_score(self._verifier.function(_submission(item), arguments)))
        except Exception as error:  # noqa: BLE001  whatever a verifier raises becomes an error of this item alone
            return Outcome(result=error_of(error))


class AsyncLane:
    """An async verifier on the service's event loop, `concurrency` items at a time."""

    def __init__(self, verifier: Verifier, *, concurrency: int) -> None:
        self._verifier = verifier
        self._places = asyncio.Semaphore(concurrency)

    async def judge(self, item: ScoreItem, *, deadline: float) -> Outcome:
        """The outcome, at the deadline at the latest."""
        limit = asyncio.timeout_at(deadline)
        try:
            arguments = validate_arguments(model=self._verifier.arguments, arguments=item.arguments)
            async with limit, self._places:
                assert self._verifier.function is not None, self._verifier.name
                value = await cast(Awaitable[object], self._verifier.function(_submission(item), arguments))
            return Outcome(result=to_score(value))
        except Exception as error:  # noqa: BLE001  whatever a verifier raises becomes an error of this item alone
            if limit.expired():
                late = ScoreError(kind="infrastructure", message="deadline: the verifier took too long")
                return Outcome(result=late)
            return Outcome(result=error_of(error))


class WorkerLane:
    """A sync verifier in worker processes. Arguments that do not fit are refused without troubling a worker."""

    def __init__(self, verifier: Verifier, *, pool: WorkerPool) -> None:
        self._verifier = verifier
        self._pool = pool

    def judge(self, item: ScoreItem, *, deadline: float) -> Outcome | Awaitable[Outcome]:
        """The outcome of a worker, at the deadline at the latest."""
        try:
            validate_arguments(model=self._verifier.arguments, arguments=item.arguments)
        except UserError as error:
            return Outcome(result=error_of(error))
        job = Job(completion=item.completion, prompt=item.prompt, arguments=item.arguments)
        return self._pool.run(job=job, deadline=deadline)


class Scorer:
    """The scoring of batches with the verifiers of a registry. A context manager: leaving it kills the workers.

    `service_id` is the name of this instance in its answers.
    """

    def __init__(
        self, *, registry: Registry, config: RewardServiceConfig, metrics: ScoringMetrics, service_id: str
    ) -> None:
        self._registry = registry
        self._config = config
        self._metrics = metrics
        self._service_id = service_id
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._lanes: dict[str, Lane] = {}
        self._pools: dict[str, WorkerPool] = {}
        self._models: dict[str, RewardModelLane] = {}
        self._pending = 0
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        try:
            await self._open()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def _open(self) -> None:
        for verifier in self._registry.all():
            self._lanes[verifier.name] = await self._open_lane(verifier)
        for name in self._config.workers.prewarm:
            if name not in self._pools:
                known = ", ".join(self._pools)
                raise UserError(f"workers.prewarm names {name!r}, which has no workers; those that do: {known}")
            await self._pools[name].prewarm()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def loaded(self) -> None:
        """Wait until all reward models are loaded; until then their items wait. Raises UserError if one cannot be."""
        for lane in self._models.values():
            await lane.loaded()

    @property
    def pending(self) -> int:
        """Items that have arrived and have no result yet."""
        return self._pending

    def workers(self) -> tuple[int, int]:
        """How many worker processes are at work, and of how many."""
        pools, models = self._pools.values(), self._models.values()
        busy = sum(pool.busy for pool in pools) + sum(model.busy for model in models)
        return busy, sum(pool.size for pool in pools) + len(models)

    async def score(self, request: ScoreRequest) -> ScoreResponse:
        """A result for each item, in order. Every item has one by the request's deadline, at most the service's own.

        Raises RequestRefused if it takes no more items, for the moment or since it is to end.
        """
        self._check_room(len(request.items))
        self._count_pending(len(request.items))
        try:
            return ScoreResponse(service_id=self._service_id, results=await self._score_all(request))
        finally:
            self._count_pending(-len(request.items))

    async def drain(self, *, timeout_s: float) -> bool:
        """Take nothing new, and wait for what runs. Whether all of it has ended in time."""
        self._draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def _check_room(self, items: int) -> None:
        if self._draining:
            raise RequestRefused(503, "draining", "this reward service is stopping: try another one")
        most = self._config.max_pending_items
        if items > most:
            raise RequestRefused(
                413, "too_many_items", f"{items} items in one request: send at most {most}", expected=most, got=items
            )
        if self._pending + items > most:
            raise RequestRefused(
                429, "busy", f"{self._pending} items are here already, and at most {most} are taken: try another one"
            )

    async def _score_all(self, request: ScoreRequest) -> tuple[ScoreResult, ...]:
        started = time.perf_counter()
        deadline = asyncio.get_running_loop().time() + min(request.deadline_s, self._config.max_deadline_s)
        results: list[ScoreResult | asyncio.Task[ScoreResult]] = []
        # A task is made only for what has to wait: a batch of exact matches pays for none.
        async with asyncio.TaskGroup() as group:
            for item in request.items:
                judged = self._judge(item, deadline=deadline)
                if isinstance(judged, Outcome):
                    results.append(self._result(item, judged, started=started))
                else:
                    results.append(group.create_task(self._wait(item, judged, started=started)))
        return tuple(result.result() if isinstance(result, asyncio.Task) else result for result in results)

    def _judge(self, item: ScoreItem, *, deadline: float) -> Outcome | Awaitable[Outcome]:
        lane = self._lanes.get(item.verifier)
        if lane is not None:
            return lane.judge(item, deadline=deadline)
        try:
            self._registry.get(item.verifier)
        except UserError as error:
            return Outcome(result=error_of(error))
        raise AssertionError(f"no lane was opened for {item.verifier}")

    async def _wait(self, item: ScoreItem, judged: Awaitable[Outcome], *, started: float) -> ScoreResult:
        return self._result(item, await judged, started=started)

    def _result(self, item: ScoreItem, outcome: Outcome, *, started: float) -> ScoreResult:
        latency_s = time.perf_counter() - started
        known = item.verifier in self._lanes
        label = item.verifier if known else UNKNOWN
        self._metrics.latency.labels(label).observe(latency_s)
        score = outcome.result if isinstance(outcome.result, Score) else None
        error = outcome.result if isinstance(outcome.result, ScoreError) else None
        if error is not None:
            self._metrics.errors.labels(label, error.kind).inc()
        return ScoreResult(
            id=item.id,
            verifier=item.verifier,
            verifier_version=self._registry.get(item.verifier).version if known else "",
            reward=None if score is None else score.reward,
            components={} if score is None else dict(score.components),
            latency_s=latency_s,
            attempts=outcome.attempts,
            error=error,
        )

    async def _open_lane(self, verifier: Verifier) -> Lane:
        if verifier.reward_model is not None:
            return await self._open_model(verifier.name, verifier.reward_model)
        if verifier.function is None:
            pool = WorkerPool(
                path=verifier.path,
                settings=pool_settings(self._config, trusted=verifier.trusted),
                on_kill=self._metrics.killed_workers.labels(verifier.name).inc,
            )
            self._pools[verifier.name] = await self._stack.enter_async_context(pool)
            return WorkerLane(verifier, pool=pool)
        if verifier.is_async:
            return AsyncLane(verifier, concurrency=self._config.async_concurrency)
        return InlineLane(verifier)

    async def _open_model(self, name: str, model: RewardModel) -> Lane:
        events = LaneEvents(
            killed=self._metrics.killed_workers.labels(name).inc,
            batch=self._metrics.batch_items.labels(name).observe,
        )
        opened = open_lane(model=model, events=events, max_waiting=self._config.max_pending_items)
        self._models[name] = await self._stack.enter_async_context(opened)
        return self._models[name]

    def _count_pending(self, change: int) -> None:
        self._pending += change
        if self._pending == 0:
            self._idle.set()
        else:
            self._idle.clear()
        self._metrics.pending_items.set(self._pending)


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


def _submission(item: ScoreItem) -> Submission:
    return Submission(completion=item.completion, prompt=item.prompt)
