"""The lane of a verifier that asks another service, or a process of its own, about each item."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

from pydantic import BaseModel

from protocol.rewards import ScoreError, ScoreItem
from reward_service.lanes.contract import Lane
from reward_service.verifier import Outcome, error_of, to_score, validate_arguments

A = TypeVar("A", bound=BaseModel)


class Asked(Protocol):
    """The service, or the process, that is asked; its text names it."""

    @property
    def last_problem(self) -> str:
        """What last went wrong with it."""
        ...


JudgeFunction = Callable[[ScoreItem, A, float], Awaitable[Outcome]]


class AskingLane(Lane, Generic[A]):
    """`function` is called with an item, its arguments and its deadline, and is cancelled then."""

    def __init__(self, *, arguments: type[A], function: JudgeFunction[A], asked: Asked) -> None:
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
