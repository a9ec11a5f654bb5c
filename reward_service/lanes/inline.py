"""Verifiers in the service's own process: cheap sync code of ours that cannot hang."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import ClassVar

from pydantic import BaseModel

from protocol.rewards import ScoreItem
from reward_service.lanes.contract import Lane, Opener, Surroundings
from reward_service.verifier import Outcome, Submission, error_of, to_score, validate_arguments


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
            submission = Submission(completion=item.completion, prompt=item.prompt)
            return Outcome(result=to_score(self._function(submission, arguments)))
        except Exception as error:  # noqa: BLE001  whatever a verifier raises becomes an error of this item alone
            return Outcome(result=error_of(error))


def inline(function: Callable[..., object]) -> Opener:
    """Judge in the service itself, one item after the other: for sync functions that take well below a millisecond."""

    @asynccontextmanager
    async def opened(surroundings: Surroundings) -> AsyncIterator[Lane]:
        yield InlineLane(function=function, arguments=surroundings.verifier.arguments)

    return opened
