"""Items from all requests on their way through one reward model.

    judge -> queue -> run: takes what is there, waits at most `wait_s` for more -> worker process -> each item's outcome

`run` waits for the first item without a limit, for others at most `wait_s`, for the process to load at most
`start_timeout_s` and for a batch at most `compute_timeout_s`; `judge` waits until its item's own deadline. While a
batch is being scored the next one gathers. When the process dies it is started again, and the items of its batch are
tried one by one: the one that killed it takes nobody along.

A reward model as a verifier of the service.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from protocol.rewards import ScoreError, ScoreItem
from reward_service.reward_models.arguments import RewardModelArguments, job_of
from reward_service.reward_models.config import RewardModelConfig
from reward_service.reward_models.folder import (
    ModelBatch,
    ModelJob,
    ModelToLoad,
    RewardModel,
    Rewards,
    open_reward_model,
)
from reward_service.verifier.contract import Lane, Surroundings, Verifier
from reward_service.verifier.submission import InfrastructureError, Outcome, Score, UserError, error_of
from reward_service.verifier.worker_pool import Reply, WorkerDied, WorkerProcess, worker_environment

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class LaneEvents:
    """What a lane reports: a process that was killed or lost in a batch, and the items of each batch that is sent."""

    killed: Callable[[], None]
    batch: Callable[[int], None]


@dataclass(frozen=True, eq=False)
class _Waiting:
    """An item on its way. Its outcome is cancelled when nobody waits for it any more."""

    job: ModelJob
    outcome: asyncio.Future[Outcome]

    def settle(self, outcome: Outcome) -> None:
        if not self.outcome.done():
            self.outcome.set_result(outcome)


class RewardModelLane(Lane):
    """The lane of one reward model; made by `open_lane`."""

    def __init__(self, *, model: RewardModel, events: LaneEvents, max_waiting: int) -> None:
        self._model = model
        self._config = model.config
        self._events = events
        self._queue = asyncio.Queue[_Waiting](maxsize=max_waiting)
        self._busy = False
        self._loaded = asyncio.Event()
        self._fault: str | None = None
        self.process = WorkerProcess(
            command=("reward_service.reward_models.model_worker", _to_load(model).model_dump_json()),
            environment={**worker_environment(inherit=True, threads=model.config.threads), "HF_HUB_OFFLINE": "1"},
            start_timeout_s=model.config.start_timeout_s,
        )

    def share(self) -> int:
        """A batch that is being scored, and the next one."""
        return 2 * self._config.batch_size

    def workers(self) -> tuple[int, int]:
        """Whether its one process has a batch."""
        return int(self._busy), 1

    @property
    def waiting(self) -> int:
        """Items that no batch has taken yet."""
        return self._queue.qsize()

    async def loaded(self) -> None:
        """Wait until `run` has the model loaded. Raises UserError if it cannot be."""
        await self._loaded.wait()
        if self._fault is not None:
            raise UserError(f"reward model {self._name!r} at {self._config.path}: {self._fault}")

    def judge(self, item: ScoreItem, *, deadline: float) -> Outcome | Awaitable[Outcome]:
        """The outcome of the model, at the deadline at the latest; arguments that do not fit are refused at once."""
        try:
            return self._wait(job_of(item, self._model), deadline=deadline)
        except UserError as error:
            return Outcome(result=error_of(error))

    async def _wait(self, job: ModelJob, *, deadline: float) -> Outcome:
        waiting = _Waiting(job, asyncio.get_running_loop().create_future())
        try:
            async with asyncio.timeout_at(deadline):
                await self._queue.put(waiting)
                return await waiting.outcome
        except TimeoutError:
            return _failed("deadline: the reward model did not score the item in time", attempts=1)

    async def run(self) -> None:
        """Load the model, then score batch after batch, without end."""
        try:
            await self.process.ready()
        except (InfrastructureError, WorkerDied) as error:
            self._fault = str(error) or "its process died; the log has the cause"
        self._loaded.set()
        while True:
            batch = await self._gather()
            self._busy = True
            await self._score(batch)
            self._busy = False

    async def _gather(self) -> list[_Waiting]:
        batch = [await self._queue.get()]
        try:
            async with asyncio.timeout(self._config.wait_s):
                while len(batch) < self._config.batch_size:
                    batch.append(await self._queue.get())
        except TimeoutError:
            pass
        return [waiting for waiting in batch if not waiting.outcome.done()]

    async def _score(self, batch: Sequence[_Waiting]) -> None:
        if not batch:
            return
        try:
            await self._attempt(batch, number=1)
        except WorkerDied:
            logger.warning("the process of %s died in a batch of %d; trying them one by one", self._name, len(batch))
            for waiting in batch:
                await self._alone(waiting)

    async def _alone(self, waiting: _Waiting) -> None:
        """Further attempts at one item of a batch that its process did not survive."""
        number = 1
        while number < self._config.max_attempts and not waiting.outcome.done():
            number += 1
            try:
                await self._attempt([waiting], number=number)
            except WorkerDied:
                logger.warning("the process of %s died at one item (attempt %d)", self._name, number)
        waiting.settle(_failed(f"the reward model's process died at each of {number} attempts", attempts=number))

    async def _attempt(self, batch: Sequence[_Waiting], *, number: int) -> None:
        """Settles all items, or raises WorkerDied."""
        try:
            await self.process.ready()
            replies = await self._exchange(batch)
        except InfrastructureError as error:
            for waiting in batch:
                waiting.settle(_failed(str(error), attempts=number))
            return
        for waiting, reply in zip(batch, replies, strict=True):
            waiting.settle(_outcome(reply, attempts=number))

    async def _exchange(self, batch: Sequence[_Waiting]) -> Sequence[Reply]:
        line = ModelBatch(jobs=tuple(waiting.job for waiting in batch)).model_dump_json().encode()
        self._events.batch(len(batch))
        completed = False
        try:
            async with asyncio.timeout(self._config.compute_timeout_s):
                replies = _replies(await self.process.exchange(line), count=len(batch))
            completed = True
            return replies
        except TimeoutError:
            raise InfrastructureError("deadline: the reward model took too long, and was killed") from None
        finally:
            if not completed:
                self._events.killed()
                await self.process.stop()
                await self.process.start()

    @property
    def _name(self) -> str:
        return self._config.name


@asynccontextmanager
async def open_lane(*, model: RewardModel, events: LaneEvents, max_waiting: int) -> AsyncIterator[RewardModelLane]:
    """A lane whose process has been started, and need not have loaded yet. Leaving kills the process."""
    lane = RewardModelLane(model=model, events=events, max_waiting=max_waiting)
    try:
        await lane.process.start()
        async with asyncio.TaskGroup() as tasks:
            loop = tasks.create_task(lane.run(), name=f"reward model {model.config.name}")
            try:
                yield lane
            finally:
                loop.cancel()
    finally:
        await lane.process.stop()


def _to_load(model: RewardModel) -> ModelToLoad:
    config = model.config
    return ModelToLoad(
        path=str(config.path.absolute()),
        device=config.device,
        dtype=config.dtype,
        threads=config.threads,
        batch_tokens=config.batch_tokens,
        fingerprint=model.fingerprint,
    )


def _replies(line: bytes, *, count: int) -> Sequence[Reply]:
    try:
        replies = Rewards.model_validate_json(line).replies
    except ValueError as error:
        raise WorkerDied from error
    if len(replies) != count:
        raise WorkerDied
    return replies


def _outcome(reply: Reply, *, attempts: int) -> Outcome:
    if reply.error is not None:
        return Outcome(result=reply.error, attempts=attempts)
    if reply.reward is None:
        return _failed("the reward model's process sent a reply without a reward", attempts=attempts)
    return Outcome(result=Score(reward=reply.reward), attempts=attempts)


def _failed(message: str, *, attempts: int) -> Outcome:
    return Outcome(result=ScoreError(kind="infrastructure", message=message), attempts=attempts)


def reward_model_verifier(given: RewardModelConfig) -> Verifier:
    """Its version holds the fingerprint of its files, so that each reward says which model gave it.

    Reads all of the model's files. Raises UserError for a directory that holds no reward model.
    """
    model = open_reward_model(given)
    logger.info("reward model %s: %s, fingerprint %s", given.name, given.path, model.fingerprint)

    @asynccontextmanager
    async def opened(surroundings: Surroundings) -> AsyncIterator[Lane]:
        metrics = surroundings.metrics
        events = LaneEvents(
            killed=metrics.killed_workers.labels(given.name).inc, batch=metrics.batch_items.labels(given.name).observe
        )
        async with open_lane(model=model, events=events, max_waiting=surroundings.config.max_pending_items) as lane:
            yield lane

    return Verifier(
        name=given.name,
        version=f"1+{model.fingerprint}",
        description="What a reward model says about the completion: a sequence-classification model with one label.",
        arguments=RewardModelArguments,
        open=opened,
    )
