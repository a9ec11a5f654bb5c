"""The lane of a verifier that asks another service, or a process of its own, about each item.

Jobs of all requests are sent together: as many as there are within a few milliseconds, up to a most.

ask -> gathering -> send, in a task of the group -> each job's answer
                      └─ input refused: each job alone, so that the one at fault takes no others along
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from math import inf
from typing import Generic, Protocol, TypeVar

from pydantic import BaseModel

from protocol.rewards import ScoreError, ScoreItem
from reward_service.endpoints.endpoint import InputRefused
from reward_service.verifier.lanes import Lane
from reward_service.verifier.submission import Outcome, error_of, to_score, validate_arguments
from services.batching import AskedJob, Batches

A = TypeVar("A", bound=BaseModel)
J = TypeVar("J")
R = TypeVar("R")


class AskedItem(Protocol):
    """The service, or the process, that is asked; its text names it."""

    @property
    def last_problem(self) -> str:
        """Its last problem."""
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


Send = Callable[[Sequence[J], float], Awaitable[Sequence[R]]]


_Timed = tuple[J, float]
"""A job and its deadline."""


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
        at_once: float,
        on_batch: Callable[[int], None],
    ) -> None:
        self._send = send
        self._on_batch = on_batch
        self._batches = Batches[AskedJob[_Timed[J], R]](
            send=self._run, tasks=tasks, most=most, wait_s=wait_s, at_once=at_once
        )

    async def ask(self, job: J, *, deadline: float) -> R:
        """The job's answer; to be cancelled at `deadline`. Raises what `send` raises."""
        asked = AskedJob[_Timed[J], R]((job, deadline))
        self._batches.add(asked)
        return await asked.answer

    def close(self) -> None:
        """End what is on its way."""
        self._batches.close()

    async def _run(self, batch: Sequence[AskedJob[_Timed[J], R]]) -> None:
        self._on_batch(len(batch))
        deadline = max(asked.job[1] for asked in batch)
        try:
            answers = await self._send([asked.job[0] for asked in batch], deadline)
        except InputRefused as refused:
            await self._alone(batch, refused)
        except Exception as error:  # noqa: BLE001  whatever goes wrong becomes an error of these items alone
            for asked in batch:
                asked.fail(error)
        else:
            for asked, answer in zip(batch, answers, strict=True):
                asked.settle(answer)

    async def _alone(self, batch: Sequence[AskedJob[_Timed[J], R]], refused: InputRefused) -> None:
        if len(batch) == 1:
            batch[0].fail(refused)
            return
        async with asyncio.TaskGroup() as tasks:
            for asked in batch:
                if not asked.is_over:
                    tasks.create_task(self._run([asked]))


@asynccontextmanager
async def open_batcher(
    send: Send[J, R], *, most: int, wait_s: float, on_batch: Callable[[int], None], at_once: float = inf
) -> AsyncIterator[Batcher[J, R]]:
    """A batcher of at most `most` jobs at a time, for which it waits `wait_s` seconds, or until fewer than `at_once`
    batches are under way. Leaving ends what is sent.
    """
    async with asyncio.TaskGroup() as tasks:
        batcher = Batcher(send=send, tasks=tasks, most=most, wait_s=wait_s, at_once=at_once, on_batch=on_batch)
        try:
            yield batcher
        finally:
            batcher.close()


async def together(questions: Sequence[Coroutine[None, None, R]]) -> list[R]:
    """The answers in order. The first error ends the other questions, and is raised as itself."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(question) for question in questions]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from failed
    return [task.result() for task in tasks]
