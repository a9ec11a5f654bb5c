"""Calls of task sources and environments: one after the other, in a thread beside the event loop, and never for ever.

    rollouts ──jobs──▶ queue ──▶ worker thread ──results──▶ rollouts
                                    └─ stuck for longer than the limit: left to itself, and a new one takes the queue

Code of an environment that never returns would otherwise stop heartbeats, and with them every lease of the process.
"""

import asyncio
import logging
import math
import queue
import threading
import time
import traceback
import weakref
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import isawaitable, iscoroutine, iscoroutinefunction
from typing import Generic, TypeVar, cast

from env_service.environments.interface import EnvironmentFailed, EnvironmentUnavailable
from env_service.rollouts.outcomes import DataFailure
from services.user_code import LetOut, is_being_cancelled, let_out
from services.user_loop import HeldUp, TookTooLong, user_loop

logger = logging.getLogger(__name__)

T = TypeVar("T")
Call = Callable[[], T | Awaitable[T]]

_NOT_CLOSED = "an environment could not be closed"
_AT_ONCE = 16
"""Openings of a group that are awaited side by side: a server's, or a process that starts."""


class DidNotReturn(DataFailure):
    """An environment took longer than it may."""


class EnvironmentCalls:
    """An environment has `timeout_s` seconds for all calls that are made together; then its task is at fault.

    Calls of different rollouts do not overlap, so that environments need no locks; what their coroutines await does.
    The thread that makes them ends with this object.
    """

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._jobs: queue.SimpleQueue[_Job[object] | None] = queue.SimpleQueue()
        self._worker: _Worker | None = None
        weakref.finalize(self, self._jobs.put, None).atexit = False

    async def one(
        self,
        call: Call[T],
        *,
        what: str,
        timeout_s: float | None = None,
        at_once: bool = False,
        own_loop: bool = False,
    ) -> T:
        """The result of the call, awaited if need be. Raises what it raises, and DidNotReturn when it takes too long:
        longer than `timeout_s`, if that is given. One `at_once` is made here: its code is known not to block. With
        `own_loop` its coroutine is awaited in the users' loop, since that code may block: EnvironmentUnavailable is
        raised if it could not be, for others' code.
        """
        if at_once:
            made = call()
            return cast("T", await resolved_by_others(made)) if isawaitable(made) else made
        (result,) = await self.all([call], what=what, timeout_s=timeout_s, own_loop=own_loop)
        return result

    async def all(
        self,
        calls: Sequence[Call[T]],
        *,
        what: str,
        timeout_s: float | None = None,
        at_once: bool = False,
        own_loop: bool = False,
    ) -> list[T]:
        """The same for several calls, in order."""
        if at_once:
            return await _resolved([call() for call in calls])
        job = _Job(calls, asyncio.get_running_loop(), timeout_s=timeout_s or self._timeout_s)
        self._jobs.put(job)  # type: ignore[arg-type]
        try:
            await self._until_returned(job, what)
            if not any(map(isawaitable, job.returned.result())):
                return cast("list[T]", job.returned.result())
            if own_loop:
                return await _resolved(job.handed_over(), partial(_resolved_in_own_loop, job, what))
            limit = asyncio.timeout(job.due - _now())
            try:
                async with limit:
                    return await _resolved(job.returned.result())
            except TimeoutError as error:
                if not limit.expired():
                    raise
                raise _did_not_return(job, what) from error
        finally:
            job.give_up()

    async def _until_returned(self, job: "_Job[T]", what: str) -> None:
        """Whoever waits in the queue looks after the worker: the caller of a stuck one may have been cancelled."""
        while not job.returned.done():
            worker = self._worker = self._worker or _Worker(self._jobs, self._timeout_s)
            # It may begin meanwhile, and nobody says so: a thread that wakes the event loop twice costs twice as much.
            due = job.due if job.begun else min(worker.due, _now() + job.timeout_s)
            await asyncio.wait([job.returned], timeout=max(0.01, due - _now()))
            if not job.returned.done():
                self._replace_stuck()
                if job.begun and _now() >= job.due:
                    raise _did_not_return(job, what)

    def _replace_stuck(self) -> None:
        worker = self._worker
        if worker is not None and worker.busy and _now() >= worker.due:
            logger.warning("a call of an environment does not return: its thread is abandoned, a new one takes over")
            worker.left = True
            self._worker = None


def _sendable(error: BaseException) -> Exception:
    """As a future takes it: no StopIteration, and nothing that ends a thread or an event loop."""
    if isinstance(error, StopIteration):
        return RuntimeError(repr(error))
    return error if isinstance(error, Exception) else as_fault(error)


class _Job(Generic[T]):
    """Calls, and what became of them. Futures are the event loop's; the rest may be read by both sides."""

    def __init__(self, calls: Sequence[Call[T]], loop: asyncio.AbstractEventLoop, *, timeout_s: float) -> None:
        self.calls = calls
        self.timeout_s = timeout_s
        self.loop = loop
        self.begun = False
        self.due = math.inf
        self.returned: asyncio.Future[list[T | Awaitable[T]]] = loop.create_future()
        self.unwanted = False
        self._handed_over = False
        self._telling = threading.Lock()

    def run(self) -> None:
        """In the worker's thread."""
        try:
            results = [call() for call in self.calls]
        except BaseException as error:  # noqa: BLE001 - it crosses to the awaiting rollout, which judges it
            fault = _sendable(error)
            self._tell(lambda: None if self.unwanted else self.returned.set_exception(fault))
            return
        if not self._tell(lambda: _close(results) if self.unwanted else self.returned.set_result(results)):
            _close(results)

    def give_up(self) -> None:
        """In the event loop, when nobody waits any more: what has been returned meanwhile is closed."""
        with self._telling:
            self.unwanted = True
        # A caller that is cancelled in the moment in which its job returns sees only the cancellation.
        if self.returned.done() and self.returned.exception() is None and not self._handed_over:
            _close(self.returned.result())

    def handed_over(self) -> list[T | Awaitable[T]]:
        """In the event loop: what was returned, which somebody else sees to the end."""
        self._handed_over = True
        return self.returned.result()

    def _tell(self, say: Callable[[], None]) -> bool:
        """True if the event loop will hear it. Once nobody waits the loop may be closed, too."""
        with self._telling:
            if not self.unwanted:
                self.loop.call_soon_threadsafe(say)
            return not self.unwanted


@dataclass(eq=False)
class _Worker:
    """A thread that nobody waits for at the end of the process; None among its jobs ends it. What it does is to be done
    by `due`.
    """

    jobs: "queue.SimpleQueue[_Job[object] | None]"
    timeout_s: float
    busy: bool = False
    left: bool = False

    def __post_init__(self) -> None:
        self.due = _now() + self.timeout_s
        threading.Thread(target=self._work, name="environments", daemon=True).start()

    def _work(self) -> None:
        while not self.left:
            if (job := self.jobs.get()) is None:
                return
            self.due, self.busy = _now() + job.timeout_s, True
            if not job.unwanted:
                job.due, job.begun = self.due, True
                job.run()
            del job
            self.busy = False


def _did_not_return(job: _Job[T], what: str) -> DidNotReturn:
    return DidNotReturn(f"{what} did not come back within {job.timeout_s:g} s")


async def _resolved(
    results: Sequence[T | Awaitable[T]], resolve: "Callable[[Awaitable[T]], Awaitable[T]] | None" = None
) -> list[T]:
    """Results of the coroutines, in order, each by `resolve`. Several coroutines go on side by side, at most `_AT_ONCE`
    of them; of those that raise, the first in order counts, and the others are broken off.
    """
    places = asyncio.Semaphore(_AT_ONCE)
    by = resolve or resolved_by_others
    begun: set[int] = set()

    async def in_its_place(each: Awaitable[T]) -> T:
        async with places:
            begun.add(id(each))
            return await by(each)

    works: list[Awaitable[T] | T] = [in_its_place(each) if isawaitable(each) else each for each in results]
    if len(works) > 1:
        works = [asyncio.ensure_future(each) if isawaitable(each) else each for each in works]
    try:
        return [await each if isawaitable(each) else each for each in works]
    finally:
        running = [each for each in works if isinstance(each, asyncio.Task)]
        for work in running:
            work.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        _close(works)
        # What another loop has begun is that one's to close.
        _close([each for each in results if resolve is None or id(each) not in begun])


async def _resolved_in_own_loop(job: _Job[T], what: str, each: Awaitable[T]) -> T:
    try:
        return await user_loop().run(lambda: each, limit_s=job.timeout_s)
    except TookTooLong as error:
        raise _did_not_return(job, what) from error
    except HeldUp as error:
        raise EnvironmentUnavailable(f"{what} could not go on: {error}") from error
    except LetOut as error:
        raise as_fault(error.error) from error


async def resolved_by_others(given: Awaitable[T]) -> T:
    """Awaits others' code. Raises EnvironmentFailed where it wants to end more than itself: a SystemExit, or a
    CancelledError of its own, such as that of a task which it cancelled, while nobody cancels who waits for it.
    """
    try:
        return await given
    except SystemExit as error:
        raise as_fault(error) from error
    except asyncio.CancelledError as error:
        if is_being_cancelled():
            raise
        raise as_fault(error) from error


def as_fault(error: BaseException) -> EnvironmentFailed:
    """Stands for what code of an environment's or agent's let out to end more than itself."""
    whole = "".join(traceback.format_exception(error))
    return EnvironmentFailed("raised", f"its code {let_out(error)}", traceback=whole)


def _close(results: Sequence[object]) -> None:
    """Coroutines that nobody will await must not be left open; one that has ended stays as it is."""
    for each in results:
        if iscoroutine(each):
            each.close()


def _now() -> float:
    return time.monotonic()


def closed(environment: object) -> Awaitable[None] | None:
    """Calls its `close`, if it has one; it does not keep others from being closed."""
    close = getattr(environment, "close", None)
    if iscoroutinefunction(close):  # made when it is awaited: if nobody comes to that, none is left open
        return _waited(close)
    try:
        closing = close() if callable(close) else None
    except (Exception, SystemExit, asyncio.CancelledError):
        logger.warning(_NOT_CLOSED, exc_info=True)
        return None
    return _waited(lambda: closing) if isawaitable(closing) else None


async def _waited(close: Callable[[], Awaitable[object]]) -> None:
    try:
        await resolved_by_others(close())
    except Exception:
        logger.warning(_NOT_CLOSED, exc_info=True)
