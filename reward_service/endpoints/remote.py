"""A verifier elsewhere as a verifier of the service.

The verifier of another Headway reward service, through the client library.

A reward server of OpenRLHF's shape.

The request holds lists of equal length: `query`, the prompt with the completion after it, `prompts` and `labels`. The
answer holds `rewards`, and in newer servers `scores` and lists of further numbers by name in `extra_logs`.
(openrlhf/cli/serve_rm.py and openrlhf/utils/remote_rm_utils.py of github.com/OpenRLHF/OpenRLHF.)
"""

import asyncio
import contextlib
import json
import math
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

from protocol.rewards import ScoreError, ScoreItem
from reward_service.endpoints.asking import AskingLane, Batcher, open_batcher
from reward_service.endpoints.config import RemoteConfig
from reward_service.endpoints.endpoint import Endpoint, api_key, open_endpoint
from reward_service.verifier.lanes import Lane, Opener, Surroundings, Verifier
from reward_service.verifier.submission import (
    MAX_MESSAGE_CHARS,
    DataError,
    InfrastructureError,
    Outcome,
    Score,
    error_of,
    to_score,
)
from services.http.tls import client_tls
from services.rewards.client import RewardClient
from services.rewards.items import ItemScore
from services.rewards.settings import ClientSettings


class PassedOnArguments(BaseModel):
    """Whatever the verifier there takes; it is looked at there."""

    model_config = ConfigDict(frozen=True, extra="allow")


class HeadwayLane(Lane):
    """Passes items on, those of all requests together and a group's in one call, since the verifier there may compare
    them. Each result keeps the version of the verifier there.
    """

    def __init__(self, config: RemoteConfig, *, client: RewardClient) -> None:
        self._url = config.url
        self._verifier = config.verifier or config.name
        self._client = client
        self._groups = count()

    async def judge(self, item: ScoreItem, *, deadline: float) -> Outcome:
        """The verdict of the service there, at the deadline at the latest."""
        passed_on = item.model_copy(update={"verifier": self._verifier})
        return (await self._passed_on([passed_on], deadline=deadline))[0]

    @property
    def takes_groups(self) -> bool:
        """Always: it does not know what the verifier there compares."""
        return True

    @property
    def needs_whole_groups(self) -> bool:
        """Never: a part of a group is refused there, if it has to be."""
        return False

    async def judge_together(self, items: Sequence[ScoreItem], *, deadline: float) -> Sequence[Outcome]:
        """The verdicts of the service there, at the deadline at the latest."""
        # Two requests may have groups of the same name, which would be taken for one if they were sent together.
        update = {"verifier": self._verifier, "group": str(next(self._groups))}
        return await self._passed_on([item.model_copy(update=update) for item in items], deadline=deadline)

    async def _passed_on(self, items: Sequence[ScoreItem], *, deadline: float) -> Sequence[Outcome]:
        try:
            async with asyncio.timeout_at(deadline):
                scored = await self._client.score(items)
            return [self._outcome(each) for each in scored]
        except TimeoutError:
            message = f"deadline: the reward service at {self._url} gave no answer in time"
            result = ScoreError(kind="infrastructure", message=message)
        except Exception as error:  # noqa: BLE001  whatever goes wrong becomes an error of these items alone
            result = error_of(error)
        return [Outcome(result=result)] * len(items)

    def _outcome(self, scored: ItemScore) -> Outcome:
        if scored.error is not None:
            message = f"{self._url}: {scored.error.message}"[:MAX_MESSAGE_CHARS]
            result: Score | ScoreError = ScoreError(kind=scored.error.kind, message=message)
        else:
            assert scored.reward is not None, "a result holds a reward or an error"
            result = to_score(Score(reward=scored.reward, components=scored.components, explanation=scored.explanation))
        return Outcome(result=result, attempts=scored.attempts, version=scored.verifier_version or None)


def open_headway(config: RemoteConfig) -> Opener:
    """Raises UserError if there is no key where the configuration says."""

    @asynccontextmanager
    async def opened(surroundings: Surroundings) -> AsyncIterator[Lane]:
        limits = config.limits
        settings = ClientSettings(
            deadline_s=limits.request_timeout_s,
            patience_s=surroundings.config.max_deadline_s,
            attempts=limits.attempts,
            batch_items=config.batch_items,
            batch_wait_s=config.wait_s,
            requests=limits.concurrency,
        )
        trust = client_tls(surroundings.config.http.tls)
        async with RewardClient([config.url], token=api_key(config), settings=settings, tls=trust) as client:
            yield HeadwayLane(config, client=client)

    return opened


Number = float | tuple[float] | None
"""Some servers give each reward in a list of its own, and null for what they cannot judge."""


class LabelArguments(BaseModel):
    """Sent to an OpenRLHF reward server beside the texts."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    label: str = Field(default="", description="what the server compares with, such as the right answer")


class GetRewardRequest(BaseModel):
    """The items, field by field."""

    query: tuple[str, ...]
    prompts: tuple[str, ...]
    labels: tuple[str, ...]


class GetRewardQuestion(BaseModel):
    """A trainer's question to a reward server: `labels` and `prompts` may be missing, or hold nothing."""

    model_config = ConfigDict(extra="ignore")

    query: tuple[str, ...] = Field(min_length=1, max_length=4096)
    prompts: tuple[str | None, ...] | None = None
    labels: tuple[JsonValue, ...] | None = None

    @model_validator(mode="after")
    def _of_one_length(self) -> Self:
        for name, given in (("prompts", self.prompts), ("labels", self.labels)):
            if given and len(given) != len(self.query):
                raise ValueError(f"{name} has {len(given)} entries and query {len(self.query)}; expected as many")
        return self

    def items(self, verifier: str) -> Iterator[ScoreItem]:
        """Each query as an item; what stands behind its prompt is the completion."""
        prompts = self.prompts or ("",) * len(self.query)
        labels = self.labels or (None,) * len(self.query)
        for number, (query, prompt, label) in enumerate(zip(self.query, prompts, labels, strict=True)):
            completion = query.removeprefix(prompt or "")
            arguments = _arguments_of(label)
            yield ScoreItem(
                id=str(number), verifier=verifier, completion=completion, prompt=prompt or "", arguments=arguments
            )


def _arguments_of(label: JsonValue) -> dict[str, JsonValue]:
    if label is None or label == "":
        return {}
    given = label
    if isinstance(label, str) and label.lstrip().startswith("{"):
        with contextlib.suppress(ValueError):
            given = json.loads(label)
    return given if isinstance(given, dict) else {"answer": label}


class GetRewardReply(BaseModel):
    """The rewards in the order of the queries: `rewards` for the trainer, `scores` the same for its log."""

    rewards: tuple[float, ...]
    scores: tuple[float, ...]
    extra_logs: dict[str, tuple[float, ...]] = Field(default_factory=dict)


class GetRewardAnswer(BaseModel):
    """A reward for each query, or a single one where one was asked for. Of `extra_logs` numbers are used."""

    model_config = ConfigDict(extra="ignore")

    rewards: tuple[Number, ...] | float
    scores: JsonValue = None
    extra_logs: dict[str, JsonValue] = Field(default_factory=dict)


class Question(BaseModel):
    """A question about one item."""

    prompt: str
    completion: str
    label: str


class GetReward:
    """Asks the server at an endpoint."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    async def send(self, questions: Sequence[Question], deadline: float) -> Sequence[Score | None]:
        """A score for each question that got one, by the deadline. Raises VerifierError, TimeoutError."""
        request = GetRewardRequest(
            query=tuple(question.prompt + question.completion for question in questions),
            prompts=tuple(question.prompt for question in questions),
            labels=tuple(question.label for question in questions),
        )
        async with asyncio.timeout_at(deadline):
            answer = await self._endpoint.ask("", request, GetRewardAnswer, deadline=deadline)
        return scores_of(answer, count=len(questions))


def scores_of(answer: GetRewardAnswer, *, count: int) -> Sequence[Score | None]:
    """The answer item by item, None for a null. Raises InfrastructureError if it is not for so many items."""
    rewards = _numbers(answer.rewards)
    if len(rewards) != count:
        raise InfrastructureError(f"the reward server gave {len(rewards)} rewards for {count} queries")
    lists = {**answer.extra_logs, "score": answer.scores}
    further = {name: numbers for name, values in lists.items() if (numbers := _logged(values, count))}
    return [
        None
        if reward is None
        else Score(reward=reward, components={name: numbers[index] for name, numbers in further.items()})
        for index, reward in enumerate(rewards)
    ]


def _numbers(given: tuple[Number, ...] | float) -> tuple[float | None, ...]:
    if isinstance(given, float):
        return (given,)
    return tuple(number[0] if isinstance(number, tuple) else number for number in given)


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
            open_endpoint(config, metrics=metrics, tls=surroundings.config.http.tls) as endpoint,
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
    batcher: Batcher[Question, Score | None], item: ScoreItem, arguments: LabelArguments, deadline: float
) -> Outcome:
    question = Question(prompt=item.prompt, completion=item.completion, label=arguments.label)
    score = await batcher.ask(question, deadline=deadline)
    if score is None:
        raise DataError("the reward server gave null for this item, expected a number")
    return Outcome(result=score)


def remote_verifier(config: RemoteConfig) -> Verifier:
    """Results of a Headway service have the version of the verifier there; the other shape knows none."""
    if config.kind == "openrlhf":
        return Verifier(
            name=config.name,
            version=f"1+{config.url}",
            description="What a reward server of OpenRLHF's shape says of the prompt with the completion.",
            arguments=LabelArguments,
            open=open_openrlhf(config),
        )
    return Verifier(
        name=config.name,
        version=f"1+{config.url}",
        description=f"The verifier {config.verifier or config.name} of another reward service.",
        arguments=PassedOnArguments,
        open=open_headway(config),
    )
