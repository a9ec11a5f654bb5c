"""The lane of a verifier that asks another service, or a process of its own, about each item.

Jobs of all requests are sent together: as many as there are within a few milliseconds, up to a most.

ask -> gathering -> send, in a task of the group -> each job's answer
                      └─ input refused: each job alone, so that the one at fault takes no others along
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from pydantic import BaseModel

from protocol.rewards import ScoreError, ScoreItem
from reward_service.endpoints.endpoint import InputRefused
from reward_service.verifier.contract import Lane
from reward_service.verifier.submission import Outcome, error_of, to_score, validate_arguments

A = TypeVar("A", bound=BaseModel)


class AskedItem(Protocol):
    """The service, or the process, that is asked; its text names it."""

    @property
    def last_problem(self) -> str:
        """What last went wrong with it."""
        ...


JudgeFunction = Callable[[ScoreItem, A, float], Awaitable[Outcome]]


class AskingLane(Lane, Generic[A]):
    """`function` is called with an item, its arguments and its deadline, and is cancelled then."""

    def __init__(self, *, arguments: type[A], function: JudgeFunction[A], asked: AskedItem) -> None:
        self._arguments = arguments
        self._function = function
        self._asked = asked

    async def judge(self, item: ScoreItem, *, deadline: float) -> Outcome:
        """The outcome, at the deadline at the latest."""
        limit = asyncio.timeout_at(deadline)
        try:
            arguments = validate_arguments(model=self._arguments, arguments=item.arguments)
            assert isinstance(arguments, self._arguments)
            async with limit:
                outcome = await self._function(item, arguments, deadline)
            return replace(outcome, result=to_score(outcome.result))
        except Exception as error:  # noqa: BLE001  whatever a verifier raises becomes an error of this item alone
            return Outcome(result=self._late() if limit.expired() else error_of(error))

    def _late(self) -> ScoreError:
        message = f"deadline: no answer of {self._asked} in time; the last trouble with it: {self._asked.last_problem}"
        return ScoreError(kind="infrastructure", message=message)


J = TypeVar("J")
R = TypeVar("R")

Send = Callable[[Sequence[J], float], Awaitable[Sequence[R]]]


@dataclass(frozen=True, eq=False)
class _WaitingJob(Generic[J, R]):
    """A job on its way. Its answer is cancelled when nobody waits for it any more."""

    job: J
    deadline: float
    answer: asyncio.Future[R]

    def fail(self, error: Exception) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


class Batcher(Generic[J, R]):
    """Made by `open_batcher`. `send` is called with jobs and the last of their deadlines, by which it should end; it
    returns an answer for each job, in order, or raises. `on_batch` hears of the number of jobs in each batch.
    """

    def __init__(
        self,
        *,
        send: Send[J, R],
        tasks: asyncio.TaskGroup,
        most: int,
        wait_s: float,
        on_batch: Callable[[int], None],
    ) -> None:
        self._send = send
        self._tasks = tasks
        self._most = most
        self._wait_s = wait_s
        self._on_batch = on_batch
        self._gathered: list[_WaitingJob[J, R]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._sent: set[asyncio.Task[None]] = set()

    async def ask(self, job: J, *, deadline: float) -> R:
        """The job's answer; to be cancelled at `deadline`. Raises what `send` raises."""
        loop = asyncio.get_running_loop()
        waiting = _WaitingJob[J, R](job, deadline, loop.create_future())
        self._gathered.append(waiting)
        if len(self._gathered) >= self._most:
            self._begin()
        elif self._timer is None:
            self._timer = loop.call_later(self._wait_s, self._begin)
        return await waiting.answer

    def close(self) -> None:
        """End what is on its way."""
        if self._timer is not None:
            self._timer.cancel()
        for task in self._sent:
            task.cancel()

    def _begin(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        batch = [waiting for waiting in self._gathered if not waiting.answer.done()]
        self._gathered = []
        if batch:
            task = self._tasks.create_task(self._run(batch))
            self._sent.add(task)
            task.add_done_callback(self._sent.discard)

    async def _run(self, batch: Sequence[_WaitingJob[J, R]]) -> None:
        self._on_batch(len(batch))
        deadline = max(waiting.deadline for waiting in batch)
        try:
            answers = await self._send([waiting.job for waiting in batch], deadline)
        except InputRefused as refused:
            await self._alone(batch, refused)
        except Exception as error:  # noqa: BLE001  whatever goes wrong becomes an error of these items alone
            _fail(batch, error)
        else:
            for waiting, answer in zip(batch, answers, strict=True):
                if not waiting.answer.done():
                    waiting.answer.set_result(answer)

    async def _alone(self, batch: Sequence[_WaitingJob[J, R]], refused: InputRefused) -> None:
        if len(batch) == 1:
            _fail(batch, refused)
            return
        async with asyncio.TaskGroup() as tasks:
            for waiting in batch:
                if not waiting.answer.done():
                    tasks.create_task(self._run([waiting]))


def _fail(batch: Sequence[_WaitingJob[J, R]], error: Exception) -> None:
    for waiting in batch:
        waiting.fail(error)


@asynccontextmanager
async def open_batcher(
    send: Send[J, R], *, most: int, wait_s: float, on_batch: Callable[[int], None]
) -> AsyncIterator[Batcher[J, R]]:
    """A batcher of at most `most` jobs at a time, for which it waits `wait_s` seconds. Leaving ends what is sent."""
    async with asyncio.TaskGroup() as tasks:
        batcher = Batcher(send=send, tasks=tasks, most=most, wait_s=wait_s, on_batch=on_batch)
        try:
            yield batcher
        finally:
            batcher.close()
