"""Items from all requests on their way through one reward model.

    judge -> gathered: a batch is full, or `wait_s` is over, and no other is being scored -> its process -> outcomes

`judge` waits until its item's own deadline. While a batch is being scored the next one gathers. When the process dies
it is started again, and the items of its batch are tried one by one: the one that killed it takes nobody along.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from protocol.rewards import ScoreError, ScoreItem
from reward_service.models.config import RewardModelConfig
from reward_service.models.folder import RewardModel, open_reward_model
from reward_service.models.process import (
    ModelBatch,
    ModelJob,
    ModelMessage,
    ModelProcess,
    RewardModelToLoad,
    RewardReplies,
)
from reward_service.verifier.lanes import Lane, Surroundings, Verifier
from reward_service.verifier.submission import (
    InfrastructureError,
    Outcome,
    Score,
    UserError,
    error_of,
    validate_arguments,
)
from reward_service.verifier.worker_pool import WorkerReply
from services.batching import AskedJob, Batches
from services.model_folder import template_digest
from services.worker_process import WorkerDied

logger = logging.getLogger(__name__)


class ConversationMessage(BaseModel):
    """A turn of the conversation before the completion."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    role: str = Field(min_length=1)
    content: str


class RewardModelArguments(BaseModel):
    """All may be left out where the model's directory has a file headway_reward.json."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    format: Literal["chat", "plain"] | None = Field(
        default=None, description="chat: by the model's chat template; plain: prompt and completion as they stand"
    )
    tokenize: Literal["apart", "whole"] | None = Field(
        default=None, description="apart: prompt and completion apart, end token last; whole: the text in one piece"
    )
    max_tokens: int | None = Field(default=None, ge=1, description="a longer input is an error")
    messages: tuple[ConversationMessage, ...] | None = Field(
        default=None,
        min_length=1,
        strict=False,
        description="the conversation before the completion; else the item's own, or the prompt as a user's message",
    )


def job_of(item: ScoreItem, model: RewardModel) -> ModelJob:
    """The input of an item. Raises UserError."""
    arguments = validate_arguments(model=RewardModelArguments, arguments=item.arguments)
    assert isinstance(arguments, RewardModelArguments)
    own = model.input
    format = arguments.format or (own.format if own else None)
    if format is None:
        raise UserError(
            f"{model.config.path} has no headway_reward.json that says what input the model takes: add one, such as "
            '{"format": "chat"}, or give the argument `format`'
        )
    return ModelJob(
        format=format,
        tokenize=arguments.tokenize or (own.tokenize if own else "whole"),
        special_tokens=own is not None and own.special_tokens,
        max_tokens=_smallest(arguments.max_tokens, own.max_tokens if own else None, model.longest),
        messages=_messages(item, arguments) if format == "chat" else _no_messages(arguments),
        prompt=item.prompt,
        completion=item.completion,
    )


def _messages(item: ScoreItem, arguments: RewardModelArguments) -> tuple[ModelMessage, ...]:
    if arguments.messages is not None:
        return tuple(ModelMessage(role=message.role, content=message.content) for message in arguments.messages)
    if item.messages:
        return tuple(ModelMessage(role=message.role, content=message.content) for message in item.messages)
    if not item.prompt:
        raise UserError("the item has neither a prompt nor messages: what does the completion answer?")
    return (ModelMessage(role="user", content=item.prompt),)


def _no_messages(arguments: RewardModelArguments) -> tuple[ModelMessage, ...]:
    if arguments.messages is not None:
        raise UserError("`messages` are for the format chat, and this model's input is plain; send a prompt")
    return ()


def _smallest(*limits: int | None) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)


@dataclass(frozen=True, kw_only=True)
class LaneEvents:
    """Reports of a lane: a process that was killed or lost in a batch, and the items of each batch that is sent."""

    killed: Callable[[], None]
    batch: Callable[[int], None]


_Asked = AskedJob[ModelJob, Outcome]


class RewardModelLane(Lane):
    """The lane of one reward model; made by `open_lane`."""

    def __init__(self, *, model: RewardModel, events: LaneEvents, tasks: asyncio.TaskGroup) -> None:
        self._model = model
        self._config = model.config
        self._events = events
        self.process = ModelProcess(
            _to_load(model),
            config=model.config,
            answer=RewardReplies,
            name=f"reward model {self._name!r} at {self._config.path}",
            too_long="deadline: the reward model took too long, and was killed",
            on_kill=events.killed,
        )
        self._batches = Batches[_Asked](
            send=self._score, tasks=tasks, most=self._config.batch_size, wait_s=self._config.wait_s, at_once=1
        )

    def share(self) -> int:
        """A batch that is being scored, and the next one."""
        return 2 * self._config.batch_size

    def workers(self) -> tuple[int, int]:
        """Number of its processes that have a batch, and number of all."""
        return int(self._batches.busy), 1

    @property
    def waiting(self) -> int:
        """Items that no batch has taken yet."""
        return self._batches.waiting

    async def loaded(self) -> None:
        """Wait until the model is loaded. Raises UserError if it cannot be."""
        await self.process.loaded()

    def judge(self, item: ScoreItem, *, deadline: float) -> Outcome | Awaitable[Outcome]:
        """The outcome of the model, at the deadline at the latest; arguments that do not fit are refused at once."""
        try:
            return self._wait(job_of(item, self._model), deadline=deadline)
        except UserError as error:
            return Outcome(result=error_of(error))

    def close(self) -> None:
        """End what is on its way."""
        self._batches.close()

    async def _wait(self, job: ModelJob, *, deadline: float) -> Outcome:
        asked = _Asked(job)
        try:
            async with asyncio.timeout_at(deadline):
                self._batches.add(asked)
                return await asked.answer
        except TimeoutError:
            return _failed("deadline: the reward model did not score the item in time", attempts=1)

    async def _score(self, batch: Sequence[_Asked]) -> None:
        try:
            await self._attempt(batch, number=1)
        except WorkerDied:
            logger.warning("the process of %s died in a batch of %d; trying them one by one", self._name, len(batch))
            for asked in batch:
                await self._alone(asked)

    async def _alone(self, asked: _Asked) -> None:
        """Further attempts at one item of a batch that its process did not survive."""
        number = 1
        while number < self._config.max_attempts and not asked.is_over:
            number += 1
            try:
                await self._attempt([asked], number=number)
            except WorkerDied:
                logger.warning("the process of %s died at one item (attempt %d)", self._name, number)
        asked.settle(_failed(f"the reward model's process died at each of {number} attempts", attempts=number))

    async def _attempt(self, batch: Sequence[_Asked], *, number: int) -> None:
        """Settles all items, or raises WorkerDied."""
        try:
            replies = await self._ask(batch)
        except InfrastructureError as error:
            for asked in batch:
                asked.settle(_failed(str(error), attempts=number))
            return
        for asked, reply in zip(batch, replies, strict=True):
            asked.settle(_outcome(reply, attempts=number))

    async def _ask(self, batch: Sequence[_Asked]) -> Sequence[WorkerReply]:
        jobs = tuple(asked.job for asked in batch)
        replies = (await self.process.ask(ModelBatch(jobs=jobs), sent=lambda: self._events.batch(len(jobs)))).replies
        if len(replies) != len(jobs):
            raise InfrastructureError(f"the reward model's process gave {len(replies)} replies to {len(jobs)} items")
        return replies

    @property
    def _name(self) -> str:
        return self._config.name


@asynccontextmanager
async def open_lane(*, model: RewardModel, events: LaneEvents) -> AsyncIterator[RewardModelLane]:
    """A lane whose process has been started, and need not have loaded yet. Leaving kills the process."""
    async with asyncio.TaskGroup() as tasks:
        lane = RewardModelLane(model=model, events=events, tasks=tasks)
        try:
            await lane.process.start()
            yield lane
        finally:
            lane.close()
            await lane.process.stop()


def _to_load(model: RewardModel) -> RewardModelToLoad:
    config = model.config
    return RewardModelToLoad(
        path=str(config.path.absolute()),
        device=config.device,
        dtype=config.dtype,
        threads=config.threads,
        batch_tokens=config.batch_tokens,
        fingerprint=model.fingerprint,
        chat_template=model.template,
    )


def _outcome(reply: WorkerReply, *, attempts: int) -> Outcome:
    if reply.error is not None:
        return Outcome(result=reply.error, attempts=attempts)
    if reply.reward is None:
        return _failed("the reward model's process sent a reply without a reward", attempts=attempts)
    return Outcome(result=Score(reward=reply.reward), attempts=attempts)


def _failed(message: str, *, attempts: int) -> Outcome:
    return Outcome(result=ScoreError(kind="infrastructure", message=message), attempts=attempts)


def reward_model_verifier(given: RewardModelConfig) -> Verifier:
    """Its version holds the fingerprint of its files, and that of the chat template that it was given, so that each
    reward says which model gave it.

    Reads all of the model's files. Raises UserError for a directory that holds no reward model.
    """
    model = open_reward_model(given)
    logger.info("reward model %s: %s, fingerprint %s", given.name, given.path, model.fingerprint)
    template = f"+{template_digest(given.chat_template)}" if given.chat_template else ""

    @asynccontextmanager
    async def opened(surroundings: Surroundings) -> AsyncIterator[Lane]:
        metrics = surroundings.metrics
        events = LaneEvents(
            killed=metrics.killed_workers.labels(given.name).inc, batch=metrics.batch_items.labels(given.name).observe
        )
        async with open_lane(model=model, events=events) as lane:
            yield lane

    return Verifier(
        name=given.name,
        version=f"2+{model.fingerprint}{template}",
        description="What a reward model says about the completion: a sequence-classification model with one label.",
        arguments=RewardModelArguments,
        open=opened,
    )
