"""Micro-batches: what concurrent callers ask for within a few milliseconds is sent together.

add ─▶ gathered, by key ─▶ there is enough, or the first has waited long enough ─▶ send, in a task of its own
                                                              └─ no place: it goes on gathering until one is free
"""

import asyncio
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class BatchJob(Protocol):
    """A job that is sent together with others, unless it is over before."""

    @property
    def is_over(self) -> bool:
        """True if nobody waits for it any more."""
        ...


J = TypeVar("J", bound=BatchJob)


@dataclass(frozen=True, eq=False)
class AskedJob(Generic[T, R]):
    """A job with an answer, which is cancelled when nobody waits for it any more. Made in an event loop."""

    job: T
    answer: asyncio.Future[R] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def is_over(self) -> bool:
        return self.answer.done()

    def settle(self, answer: R) -> None:
        """Answer it, if somebody waits."""
        if not self.answer.done():
            self.answer.set_result(answer)

    def fail(self, error: Exception) -> None:
        """Answer it with an error, if somebody waits."""
        if not self.answer.done():
            self.answer.set_exception(error)


@dataclass(eq=False)
class _Gathering(Generic[J]):
    """Jobs, each with its size, in order, and the sum of these. `due`: they wait for nothing but a place."""

    timer: asyncio.TimerHandle
    jobs: list[tuple[J, int]] = field(default_factory=list)
    size: int = 0
    due: bool = False


class Batches(Generic[J]):
    """Gathers jobs by key until their sizes add up to `most` or the first has waited `wait_s` seconds.

    `send` is called with them in a task of `tasks`, and must not raise; at most `at_once` batches are under way, those
    of all keys together. A key that nobody waits for holds nothing.
    """

    def __init__(
        self,
        *,
        send: Callable[[Sequence[J]], Awaitable[None]],
        tasks: asyncio.TaskGroup,
        most: int,
        wait_s: float,
        at_once: float = inf,
        name: str = "batch",
    ) -> None:
        self._send = send
        self._tasks = tasks
        self._most = most
        self._wait_s = wait_s
        self._at_once = at_once
        self._name = name
        self._gathering: dict[Hashable, _Gathering[J]] = {}
        self._under_way: set[asyncio.Task[None]] = set()

    @property
    def waiting(self) -> int:
        """Jobs that no batch has taken yet."""
        return sum(len(gathering.jobs) for gathering in self._gathering.values())

    @property
    def busy(self) -> bool:
        """True if a batch is under way."""
        return bool(self._under_way)

    def add(self, job: J, *, key: Hashable = None, size: int = 1) -> None:
        """Have a job sent with others of its key, or alone if it is larger than a batch."""
        if key in self._gathering and self._gathering[key].size + size > self._most:
            self._is_due(key)
        gathering = self._gathering.get(key)
        if gathering is None:
            timer = asyncio.get_running_loop().call_later(self._wait_s, self._is_due, key)
            gathering = self._gathering[key] = _Gathering(timer)
        gathering.jobs.append((job, size))
        gathering.size += size
        if gathering.size >= self._most:
            self._is_due(key)

    def close(self) -> list[J]:
        """Cancel what is under way; returns what was not sent."""
        unsent = [job for gathering in self._gathering.values() for job, _ in gathering.jobs]
        for gathering in self._gathering.values():
            gathering.timer.cancel()
        self._gathering.clear()
        for task in self._under_way:
            task.cancel()
        return unsent

    def _is_due(self, key: Hashable) -> None:
        self._gathering[key].due = True
        self._begin()

    def _begin(self) -> None:
        """Send what is due, as far as there are places."""
        for key in [key for key, gathering in self._gathering.items() if gathering.due]:
            while key in self._gathering and len(self._under_way) < self._at_once:
                if batch := self._taken(key):
                    task = self._tasks.create_task(self._run(batch), name=self._name)
                    self._under_way.add(task)
                    task.add_done_callback(self._ended)

    def _taken(self, key: Hashable) -> list[J]:
        """The first jobs of a key that somebody waits for, as many as fit."""
        gathering = self._gathering[key]
        wanted = [(job, size) for job, size in gathering.jobs if not job.is_over]
        sums = list(accumulate(size for _, size in wanted))
        fits = max(1, bisect_right(sums, self._most))
        gathering.jobs = wanted[fits:]
        gathering.size = sum(size for _, size in gathering.jobs)
        if not gathering.jobs:
            gathering.timer.cancel()
            del self._gathering[key]
        return [job for job, _ in wanted[:fits]]

    async def _run(self, batch: Sequence[J]) -> None:
        await self._send(batch)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._under_way.discard(task)
        self._begin()
