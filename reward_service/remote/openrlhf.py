"""A reward server of OpenRLHF's shape.

The request holds lists of equal length: `query`, the prompt with the completion after it, `prompts` and `labels`. The
answer holds `rewards`, and in newer servers `scores` and lists of further numbers by name in `extra_logs`.
(openrlhf/cli/serve_rm.py and openrlhf/utils/remote_rm_utils.py of github.com/OpenRLHF/OpenRLHF.)
"""

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from protocol.rewards import ScoreItem
from reward_service.endpoints.batching import Batcher, open_batcher
from reward_service.endpoints.endpoint import Endpoint, open_endpoint
from reward_service.endpoints.lane import AskingLane
from reward_service.lanes.contract import Lane, Opener, Surroundings
from reward_service.remote.config import RemoteConfig
from reward_service.verifier import InfrastructureError, Outcome, Score

Number = float | tuple[float]
"""Some servers give each reward in a list of its own."""


class LabelArguments(BaseModel):
    """What an OpenRLHF reward server is sent beside the texts."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    label: str = Field(default="", description="what the server compares with, such as the right answer")


class GetRewardRequest(BaseModel):
    """The items, field by field."""

    query: tuple[str, ...]
    prompts: tuple[str, ...]
    labels: tuple[str, ...]


class GetRewardAnswer(BaseModel):
    """A reward for each query, or a single one where one was asked for. Of `extra_logs` numbers are used."""

    model_config = ConfigDict(extra="ignore")

    rewards: tuple[Number, ...] | float
    scores: JsonValue = None
    extra_logs: dict[str, JsonValue] = Field(default_factory=dict)


class Question(BaseModel):
    """One item."""

    prompt: str
    completion: str
    label: str


class GetReward:
    """Asks the server at an endpoint."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    async def send(self, questions: Sequence[Question], deadline: float) -> Sequence[Score]:
        """A score for each question, by the deadline. Raises VerifierError, TimeoutError."""
        request = GetRewardRequest(
            query=tuple(question.prompt + question.completion for question in questions),
            prompts=tuple(question.prompt for question in questions),
            labels=tuple(question.label for question in questions),
        )
        async with asyncio.timeout_at(deadline):
            answer = await self._endpoint.ask("", request, GetRewardAnswer, deadline=deadline)
        return scores_of(answer, count=len(questions))


def scores_of(answer: GetRewardAnswer, *, count: int) -> Sequence[Score]:
    """The answer item by item. Raises InfrastructureError if it is not for so many items."""
    rewards = _numbers(answer.rewards)
    if len(rewards) != count:
        raise InfrastructureError(f"the reward server gave {len(rewards)} rewards for {count} queries")
    lists = {**answer.extra_logs, "score": answer.scores}
    further = {name: numbers for name, values in lists.items() if (numbers := _logged(values, count))}
    return [
        Score(reward=reward, components={name: numbers[index] for name, numbers in further.items()})
        for index, reward in enumerate(rewards)
    ]


def _numbers(given: tuple[Number, ...] | float) -> tuple[float, ...]:
    if isinstance(given, float):
        return (given,)
    return tuple(number if isinstance(number, float) else number[0] for number in given)


def _logged(given: JsonValue, count: int) -> tuple[float, ...]:
    """The numbers of a list that has one for each item, and nothing of any other."""
    values = given if isinstance(given, list) else []
    numbers = tuple(float(value) for value in values if isinstance(value, int | float) and math.isfinite(value))
    return numbers if len(numbers) == len(values) == count else ()


def open_openrlhf(config: RemoteConfig) -> Opener:
    """Items of all requests are sent together."""

    @asynccontextmanager
    async def opened(surroundings: Surroundings) -> AsyncIterator[Lane]:
        metrics = surroundings.metrics
        async with (
            open_endpoint(config, metrics=metrics) as endpoint,
            open_batcher(
                GetReward(endpoint).send,
                most=config.batch_items,
                wait_s=config.wait_s,
                on_batch=metrics.batch_items.labels(config.name).observe,
            ) as batcher,
        ):
            yield AskingLane(arguments=LabelArguments, function=partial(_judge, batcher), asked=endpoint)

    return opened


async def _judge(
    batcher: Batcher[Question, Score], item: ScoreItem, arguments: LabelArguments, deadline: float
) -> Outcome:
    question = Question(prompt=item.prompt, completion=item.completion, label=arguments.label)
    return Outcome(result=await batcher.ask(question, deadline=deadline))
