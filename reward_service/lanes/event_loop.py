"""Async verifiers on the service's event loop, a bounded number of items at a time."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from pydantic import BaseModel

from protocol.rewards import ScoreError, ScoreItem
from reward_service.lanes.contract import Lane, Opener, Surroundings
from reward_service.verifier import Outcome, Submission, error_of, to_score, validate_arguments

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
