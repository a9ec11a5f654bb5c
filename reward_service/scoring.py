"""Scores a batch: every item in the lane of its own verifier, beside each other, each with a reward or an error.

request -> lane of the item's verifier: an outcome at once, or one to wait for -> result
"""

import asyncio
import time
from collections.abc import Awaitable, Iterator
from contextlib import AsyncExitStack, contextmanager
from types import TracebackType
from typing import Self

from protocol.rewards import ScoreError, ScoreItem, ScoreRequest, ScoreResponse, ScoreResult
from reward_service.config import RewardServiceConfig
from reward_service.lanes.contract import Lane, Shared, Surroundings
from reward_service.metrics import UNKNOWN, ScoringMetrics
from reward_service.registry import Registry
from reward_service.sandbox.program import Sandbox
from reward_service.verifier import Outcome, Score, UserError, error_of
from services.http_app import RequestRefused


class Scorer:
    """The scoring of batches with the verifiers of a registry. A context manager: leaving it kills the workers.

    `service_id` is the name of this instance in its answers.
    """

    def __init__(
        self,
        *,
        registry: Registry,
        config: RewardServiceConfig,
        metrics: ScoringMetrics,
        service_id: str,
        sandbox: Sandbox | None = None,
    ) -> None:
        self._registry = registry
        self._config = config
        self._metrics = metrics
        self._service_id = service_id
        self._sandbox = sandbox
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._lanes: dict[str, Lane] = {}
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
        shared = await self._stack.enter_async_context(Shared())
        for verifier in self._registry.all():
            surroundings = Surroundings(
                verifier=verifier,
                config=self._config,
                metrics=self._metrics,
                sandbox=self._sandbox,
                judge=self._judge,
                shared=shared,
            )
            with _naming(verifier.name):
                self._lanes[verifier.name] = await self._stack.enter_async_context(verifier.open(surroundings))
        for name in self._config.workers.prewarm:
            with _naming(name, of="workers.prewarm: "):
                self._registry.get(name)
                await self._lanes[name].prewarm()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def loaded(self) -> None:
        """Wait until all lanes have loaded what they need; until then their items wait. Raises UserError."""
        for name, lane in self._lanes.items():
            with _naming(name):
                await lane.loaded()

    @property
    def pending(self) -> int:
        """Items that have arrived and have no result yet."""
        return self._pending

    def workers(self) -> tuple[int, int]:
        """How many worker processes are at work, and of how many."""
        counts = [lane.workers() for lane in self._lanes.values()]
        return sum(busy for busy, _ in counts), sum(size for _, size in counts)

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
            verifier_version=outcome.version or (self._registry.get(item.verifier).version if known else ""),
            reward=None if score is None else score.reward,
            components={} if score is None else dict(score.components),
            latency_s=latency_s,
            attempts=outcome.attempts,
            error=error,
        )

    def _count_pending(self, change: int) -> None:
        self._pending += change
        if self._pending == 0:
            self._idle.set()
        else:
            self._idle.clear()
        self._metrics.pending_items.set(self._pending)


@contextmanager
def _naming(verifier: str, *, of: str = "") -> Iterator[None]:
    """An error at the start says which verifier it is about."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{of}verifier {verifier!r}: {error}") from error
