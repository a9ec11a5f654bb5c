"""Verifiers and their lanes: a verifier is a description, and opens a lane in its surroundings; a registry by name.

A function is judged in one of three lanes: in the service's process, in an event loop beside the service's, or in
workers that are killed at a deadline. All of them are counted in ScoringMetrics.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import ClassVar, Protocol, Self, TypeVar, cast, get_args

from prometheus_client import Counter, Gauge, Histogram
from pydantic import BaseModel

from protocol.rewards import ScoreError, ScoreItem, VerifierInfo
from protocol.trajectories import ErrorKind
from reward_service.verifier.config import ScoringConfig
from reward_service.verifier.program import Sandbox
from reward_service.verifier.submission import (
    DataError,
    InfrastructureError,
    Outcome,
    Submission,
    Together,
    UserError,
    error_of,
    outcome_of,
    to_score,
    validate_arguments,
)
from reward_service.verifier.worker_pool import VerifierJob, WorkerPool, WorkerPoolSettings
from services.http.metrics import Metrics
from services.user_code import LetOut
from services.user_loop import HeldUp, TookTooLong, user_loop

_LATENCY_BUCKETS_S = (0.0001, 0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0, 300.0, 1000.0, 3600.0)
_BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)

# The label of items that name no verifier of ours: their own words would make labels without bound.
UNKNOWN = "unknown"
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class ScoringMetrics:
    """`latency` has one observation for each item, and each part of one, those that end in an error included."""

    latency: Histogram
    errors: Counter
    killed_workers: Counter
    pending_items: Gauge
    waiting_items: Gauge
    cached: Counter
    repeated_requests: Counter
    batch_items: Histogram
    asked_requests: Counter
    asked_tokens: Counter

    def know(self, verifiers: Iterable[str]) -> None:
        """Shows the series of these, and of unknown ones, before their first item."""
        for verifier in (*verifiers, UNKNOWN):
            for kind in get_args(ErrorKind):
                self.errors.labels(verifier, kind)
            for counter in (self.killed_workers, self.cached):
                counter.labels(verifier)

    def count(self, outcome: Outcome, *, verifier: str, latency_s: float) -> None:
        """An item, or a part of one, that a verifier has judged."""
        self.latency.labels(verifier).observe(latency_s)
        if isinstance(outcome.result, ScoreError):
            self.errors.labels(verifier, outcome.result.kind).inc()
        if outcome.cached:
            self.cached.labels(verifier).inc()


def make_metrics(metrics: Metrics) -> ScoringMetrics:
    """Register the service's metrics."""
    return ScoringMetrics(
        latency=metrics.histogram(
            "score_seconds",
            "Time from an item's arrival to its result.",
            buckets=_LATENCY_BUCKETS_S,
            labels=["verifier"],
        ),
        errors=metrics.counter("errors", "Items without a reward, by whose fault it was.", labels=["verifier", "kind"]),
        killed_workers=metrics.counter(
            "killed_workers", "Worker processes killed or lost in a job.", labels=["verifier"]
        ),
        pending_items=metrics.gauge("pending_items", "Items that have arrived and have no result yet."),
        waiting_items=metrics.gauge(
            "waiting_items",
            "Items of each verifier that have arrived and whose request is not answered yet.",
            labels=["verifier"],
        ),
        cached=metrics.counter("cached_items", "Items judged from what was judged before.", labels=["verifier"]),
        repeated_requests=metrics.counter(
            "repeated_requests", "Requests answered by the answer to the same request before, by its idempotency key."
        ),
        batch_items=metrics.histogram(
            "batch_items",
            "Items that were scored together, by a reward model or another service.",
            buckets=_BATCH_BUCKETS,
            labels=["verifier"],
        ),
        asked_requests=metrics.counter(
            "asked_requests",
            "Requests to services that verifiers ask: answered, failed, or not sent since they were over budget.",
            labels=["verifier", "outcome"],
        ),
        asked_tokens=metrics.counter(
            "asked_tokens", "Tokens, in and out, that services say were used.", labels=["verifier"]
        ),
    )


class Lane(ABC):
    """Lane of a verifier, which judges its items. One without processes of its own needs only `judge`.

    `at_once`: `judge` never returns an outcome to wait for.
    """

    at_once: ClassVar[bool] = False

    @abstractmethod
    def judge(self, item: ScoreItem, *, deadline: float) -> Outcome | Awaitable[Outcome]:
        """The outcome at once, or one to wait for; neither raises. `deadline` is on the event loop's clock.

        What is to be waited for is awaited once, or closed if nobody wants it any more; being cancelled, it stops.
        """

    @property
    def takes_groups(self) -> bool:
        """True if the items of a group are judged at once, by `judge_together`."""
        return False

    @property
    def needs_whole_groups(self) -> bool:
        """True if it cannot judge a part of a group; asked of a lane that takes groups."""
        return True

    async def judge_together(self, items: Sequence[ScoreItem], *, deadline: float) -> Sequence[Outcome]:
        """The outcomes of a group, whole if that is needed, of a lane that takes groups; as `judge`."""
        raise NotImplementedError(f"{type(self).__name__} takes no groups")

    def share(self) -> int:
        """Most items of one request in the lane at once: the others wait, so that requests take turns."""
        return 64

    async def loaded(self) -> None:  # noqa: B027  most lanes have nothing to load
        """Wait until items need not wait for the lane itself. Raises UserError if that will never be."""

    async def prewarm(self) -> None:
        """Start all workers. Raises UserError if the lane has none."""
        raise UserError("it runs in no worker processes, which `workers.prewarm` could start")

    def workers(self) -> tuple[int, int]:
        """Number of worker processes at work, and of all."""
        return 0, 0


class JudgeItem(Protocol):
    """The lane of whichever verifier an item names; an unknown one is an error of the item."""

    def __call__(self, item: ScoreItem, *, deadline: float) -> Outcome | Awaitable[Outcome]:
        """As `Lane.judge`."""
        ...


class SharedResources:
    """Resources that several lanes use, such as an HTTP session: opened at first use, closed after all lanes.

    A context manager. Each is known by the function that opens it: the same function, the same resource.
    """

    def __init__(self) -> None:
        self._opened: dict[object, object] = {}
        self._stack = AsyncExitStack()

    async def get(self, open: Callable[[], AbstractAsyncContextManager[T]]) -> T:
        """The object that `open` opened. To be called while lanes are opened, which is one after the other."""
        if open not in self._opened:
            self._opened[open] = await self._stack.enter_async_context(open())
        return cast(T, self._opened[open])

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._stack.aclose()


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """Everything that the lane of `verifier` may use. Without a `sandbox`, what needs one answers with a UserError.

    `judge` and `version_of`, which knows a verifier by its name, work as soon as all lanes are open, not before.
    """

    verifier: "Verifier"
    config: ScoringConfig
    metrics: ScoringMetrics
    sandbox: Sandbox | None
    judge: JudgeItem
    version_of: Callable[[str], str]
    shared: SharedResources


@dataclass(frozen=True, kw_only=True)
class Verifier:
    """A named verifier. `open` is called once, when the service starts, and may raise UserError.

    `packages`: the distributions without which it is not offered; their versions become part of its own.
    """

    name: str
    version: str
    description: str
    arguments: type[BaseModel]
    open: Callable[[Surroundings], AbstractAsyncContextManager[Lane]]
    packages: tuple[str, ...] = ()

    def info(self) -> VerifierInfo:
        """Description of the verifier on the wire."""
        schema = self.arguments.model_json_schema()
        return VerifierInfo(name=self.name, version=self.version, description=self.description, arguments_schema=schema)


Opener = Callable[[Surroundings], AbstractAsyncContextManager[Lane]]


class Registry:
    """The verifiers that this service offers. Raises UserError if two have one name."""

    def __init__(self, verifiers: Iterable[Verifier]) -> None:
        self._verifiers: dict[str, Verifier] = {}
        for verifier in verifiers:
            if verifier.name in self._verifiers:
                raise UserError(f"two verifiers are named {verifier.name!r}; give yours another name")
            self._verifiers[verifier.name] = verifier

    def get(self, name: str) -> Verifier:
        """The verifier of that name. Raises UserError that lists the names there are."""
        verifier = self._verifiers.get(name)
        if verifier is None:
            raise UserError(f"unknown verifier {name!r}; this service offers: {', '.join(sorted(self._verifiers))}")
        return verifier

    def all(self) -> tuple[Verifier, ...]:
        """All verifiers, by name."""
        return tuple(sorted(self._verifiers.values(), key=lambda verifier: verifier.name))


AsyncFunction = Callable[..., Awaitable[object]]


class UserLoopLane(Lane):
    """Awaits users' code in an event loop beside the service's. At most `concurrency` items are judged at a time;
    others wait, up to their deadlines. One that blocks the loop for longer than `block_s` is at its end.
    """

    def __init__(
        self,
        *,
        function: AsyncFunction,
        arguments: type[BaseModel],
        concurrency: int,
        block_s: float,
        together: Together | None = None,
    ) -> None:
        self._block_s = block_s
        self._function = function
        self._together = together
        self._arguments = arguments
        self._concurrency = concurrency
        self._places = asyncio.Semaphore(concurrency)

    def share(self) -> int:
        """As many as are judged at a time."""
        return self._concurrency

    @property
    def takes_groups(self) -> bool:
        """If its function does."""
        return self._together is not None

    async def judge(self, item: ScoreItem, *, deadline: float) -> Outcome:
        """The outcome, at the deadline at the latest."""

        async def judged() -> Outcome:
            arguments = validate_arguments(model=self._arguments, arguments=item.arguments)
            value = await self._value(lambda: self._function(_submission(item), arguments), deadline=deadline)
            return Outcome(result=to_score(value))

        found = await _judgement(judged)
        return Outcome(result=found) if isinstance(found, ScoreError) else found

    async def judge_together(self, items: Sequence[ScoreItem], *, deadline: float) -> Sequence[Outcome]:
        """The outcomes, at the deadline at the latest."""
        together = self._together
        assert together is not None, "a function that takes one submission"

        async def judged() -> Sequence[Outcome]:
            arguments = [validate_arguments(model=self._arguments, arguments=item.arguments) for item in items]
            submissions = [_submission(item) for item in items]
            values = await self._value(lambda: together(submissions, arguments), deadline=deadline)
            return [outcome_of(value) for value in values]

        found = await _judgement(judged)
        return [Outcome(result=found)] * len(items) if isinstance(found, ScoreError) else found

    async def _value(self, make: Callable[[], Awaitable[T]], *, deadline: float) -> T:
        """Awaits what the function returns by the deadline. Begun again where others' code kept it from that."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout_at(deadline):
                await self._places.acquire()
        except TimeoutError:
            raise InfrastructureError("deadline: other items of the verifier were before it") from None
        try:
            while True:
                try:
                    left_s = max(0.0, deadline - loop.time())
                    return await user_loop().run(make, limit_s=left_s, block_s=self._block_s)
                except HeldUp as error:
                    if loop.time() >= deadline:
                        raise InfrastructureError(f"deadline: {error}") from error
        except TookTooLong as error:
            raise InfrastructureError(_too_long(str(error), block_s=self._block_s)) from error
        except LetOut as error:
            raise DataError(f"the verifier {error}") from error
        finally:
            self._places.release()


async def _judgement(judged: Callable[[], Awaitable[T]]) -> T | ScoreError:
    """The outcome, or why there is none."""
    try:
        return await judged()
    except Exception as error:  # noqa: BLE001  whatever a verifier raises becomes an error of its items alone
        return error_of(error)


def _too_long(blocked: str, *, block_s: float) -> str:
    said = "deadline: the verifier took too long"
    hint = f"for longer than workers.compute_timeout_s ({block_s:g}): what waits or computes there is to be awaited"
    return f"{said}: {blocked} {hint}, as by asyncio.to_thread" if blocked else said


def _submission(item: ScoreItem) -> Submission:
    return Submission(completion=item.completion, prompt=item.prompt)


def in_user_loop(function: AsyncFunction, *, together: Together | None = None) -> Opener:
    """Judge with an async function, in the event loop of users' code; it is cancelled at the item's deadline, and left
    to itself where it blocks for longer than workers' time. `together` judges the items of a group.
    """

    @asynccontextmanager
    async def opened(surroundings: Surroundings) -> AsyncIterator[Lane]:
        yield UserLoopLane(
            function=function,
            arguments=surroundings.verifier.arguments,
            concurrency=surroundings.config.async_concurrency,
            block_s=surroundings.config.workers.compute_timeout_s,
            together=together,
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
            return Outcome(result=to_score(self._function(_submission(item), arguments)))
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

    def __init__(self, *, pool: WorkerPool, arguments: type[BaseModel], takes_groups: bool = False) -> None:
        self._pool = pool
        self._arguments = arguments
        self._takes_groups = takes_groups

    @property
    def takes_groups(self) -> bool:
        """If the workers' function does."""
        return self._takes_groups

    def judge(self, item: ScoreItem, *, deadline: float) -> Outcome | Awaitable[Outcome]:
        """The outcome of a worker, at the deadline at the latest."""
        try:
            validate_arguments(model=self._arguments, arguments=item.arguments)
        except UserError as error:
            return Outcome(result=error_of(error))
        return self._pool.run(job=_job(item), deadline=deadline)

    async def judge_together(self, items: Sequence[ScoreItem], *, deadline: float) -> Sequence[Outcome]:
        """The outcomes of one worker, at the deadline at the latest."""
        try:
            for item in items:
                validate_arguments(model=self._arguments, arguments=item.arguments)
        except UserError as error:
            return [Outcome(result=error_of(error))] * len(items)
        first, *others = map(_job, items)
        return await self._pool.run_together(job=first.model_copy(update={"beside": tuple(others)}), deadline=deadline)

    def share(self) -> int:
        """Counts one in each worker, and one for each that waits for it."""
        return 2 * self._pool.size

    async def prewarm(self) -> None:
        """Start all workers; returns before they have loaded."""
        await self._pool.prewarm()

    def workers(self) -> tuple[int, int]:
        """Number of the pool's processes with a job, and of all."""
        return self._pool.busy, self._pool.size


def _job(item: ScoreItem) -> VerifierJob:
    return VerifierJob(completion=item.completion, prompt=item.prompt, arguments=item.arguments)


def in_workers(path: str, *, unsafe: str | None = None, trusted: bool = False, takes_groups: bool = False) -> Opener:
    """Judge in worker processes by the function at the import path `package.module:function`, which may take groups.

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
            yield WorkerLane(pool=pool, arguments=verifier.arguments, takes_groups=takes_groups)

    return opened


def pool_settings(config: ScoringConfig, *, trusted: bool) -> WorkerPoolSettings:
    """The limits of one verifier's workers. Only a trusted one's see the service's environment variables."""
    return WorkerPoolSettings(
        workers=config.workers.count,
        compute_timeout_s=config.workers.compute_timeout_s,
        start_timeout_s=config.workers.start_timeout_s,
        memory_limit_mib=config.workers.memory_limit_mib,
        max_attempts=config.workers.max_attempts,
        inherit_environment=trusted,
    )
