"""The rollout of one lease.

task ─▶ environments reset ─▶ prompt tokens ─▶ group_size completions ─▶ environments step ─▶ scores ─▶ group

Calls of task sources and environments: one after the other, in a thread beside the event loop, and never for ever.

    rollouts ──jobs──▶ queue ──▶ worker thread ──results──▶ rollouts
                                    └─ stuck for longer than the limit: left to itself, and a new one takes the queue

Code of an environment that never returns would otherwise stop heartbeats, and with them every lease of the process.
"""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import isawaitable, iscoroutine
from typing import Generic, TypeVar

import numpy as np

from env_service.environments.interface import (
    Action,
    Environment,
    OfferedEnvironment,
    Opening,
    Prompt,
    Step,
    Task,
    Verification,
    text_of,
)
from env_service.environments.tokenization import Tokenization
from env_service.rollouts.completions import Completion, Progress
from env_service.rollouts.generation import Generation
from env_service.rollouts.outcomes import DataFailure, Outcome, RolloutFailure, RolloutMetrics
from env_service.rollouts.scoring import Scoring
from protocol.generation import GenerateRequest, Sampling
from protocol.messages import Failed, Finished, Lease
from protocol.rewards import ScoreItem
from protocol.trajectories import RewardRecord, Trajectory, TrajectoryGroup, Turn, VersionSpan

logger = logging.getLogger(__name__)

T = TypeVar("T")
Call = Callable[[], T | Awaitable[T]]


class EnvironmentCalls:
    """An environment has `timeout_s` seconds for all calls that are made together; then its task is at fault.

    Calls of different rollouts do not overlap, so that environments need no locks; what their coroutines await does.
    """

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._jobs: queue.SimpleQueue[_Job[object]] = queue.SimpleQueue()
        self._worker: _Worker | None = None

    async def one(self, call: Call[T], *, what: str) -> T:
        """What the call returns, or resolves to. Raises what it raises, and DataFailure when it takes too long."""
        (result,) = await self.all([call], what=what)
        return result

    async def all(self, calls: Sequence[Call[T]], *, what: str) -> list[T]:
        """The same for several calls, in order."""
        job = _Job(calls, asyncio.get_running_loop())
        self._jobs.put(job)  # type: ignore[arg-type]
        try:
            await self._until_begun(job)
            limit = asyncio.timeout(self._timeout_s)
            try:
                async with limit:
                    return await _resolved(await job.returned)
            except TimeoutError as error:
                if not limit.expired():
                    raise
                self._replace_stuck()
                raise DataFailure(f"{what} did not come back within {self._timeout_s:g} s") from error
        finally:
            job.unwanted = True

    async def _until_begun(self, job: "_Job[T]") -> None:
        """Whoever waits in the queue looks after the worker: the caller of a stuck one may have been cancelled."""
        while not job.begun.done():
            worker = self._worker = self._worker or _Worker(self._jobs)
            await asyncio.wait([job.begun], timeout=max(0.01, worker.busy_since + self._timeout_s - _now()))
            if not job.begun.done():
                self._replace_stuck()

    def _replace_stuck(self) -> None:
        worker = self._worker
        if worker is not None and worker.busy and _now() >= worker.busy_since + self._timeout_s:
            logger.warning("an environment does not come back: its thread is left to itself, and a new one goes on")
            worker.left = True
            self._worker = None


class _Job(Generic[T]):
    """Calls, and what became of them. Futures are the event loop's; the rest may be read by both sides."""

    def __init__(self, calls: Sequence[Call[T]], loop: asyncio.AbstractEventLoop) -> None:
        self.calls = calls
        self.loop = loop
        self.begun: asyncio.Future[None] = loop.create_future()
        self.returned: asyncio.Future[list[T | Awaitable[T]]] = loop.create_future()
        self.unwanted = False

    def run(self) -> None:
        """In the worker's thread."""
        self._tell(lambda: self.begun.set_result(None))
        try:
            results = [call() for call in self.calls]
        except Exception as error:  # noqa: BLE001 - it crosses to the awaiting rollout, which judges it
            # A future takes no StopIteration.
            fault = RuntimeError(repr(error)) if isinstance(error, StopIteration) else error
            self._tell(lambda: None if self._is_late else self.returned.set_exception(fault))
            return
        self._tell(lambda: _close(results) if self._is_late else self.returned.set_result(results))

    @property
    def _is_late(self) -> bool:
        return self.unwanted or self.returned.done()

    def _tell(self, say: Callable[[], None]) -> None:
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(say)


@dataclass(eq=False)
class _Worker:
    """A thread that nobody waits for at the end of the process."""

    jobs: "queue.SimpleQueue[_Job[object]]"
    busy: bool = False
    left: bool = False

    def __post_init__(self) -> None:
        self.busy_since = _now()
        threading.Thread(target=self._work, name="environments", daemon=True).start()

    def _work(self) -> None:
        while not self.left:
            job = self.jobs.get()
            self.busy_since, self.busy = _now(), True
            if not job.unwanted:
                job.run()
            self.busy = False


async def _resolved(results: Sequence[T | Awaitable[T]]) -> list[T]:
    try:
        return [await each if isawaitable(each) else each for each in results]
    finally:
        _close(results)


def _close(results: Sequence[object]) -> None:
    """Coroutines that nobody will await must not be left open; one that has ended stays as it is."""
    for each in results:
        if iscoroutine(each):
            each.close()


def _now() -> float:
    return time.monotonic()


_REASON_LENGTH = 4096
_WHOM = {"environment": "its environment", "generators": "the generators", "rewards": "the reward services"}


class Rollout:
    """Turns leases into outcomes; holds no state of a lease. `timeout_s` bounds one rollout with all its retries,
    `environment_timeout_s` what its environment may take for a task, an opening or a step of all its trajectories.
    """

    def __init__(
        self,
        *,
        env_id: str,
        environments: Mapping[str, OfferedEnvironment],
        tokenization: Tokenization,
        generation: Generation,
        scoring: Scoring,
        timeout_s: float,
        metrics: RolloutMetrics,
        environment_timeout_s: float = 300.0,
    ) -> None:
        self._env_id = env_id
        self._environments = environments
        self._tokenization = tokenization
        self._generation = generation
        self._scoring = scoring
        self._timeout_s = timeout_s
        self._calls = EnvironmentCalls(timeout_s=environment_timeout_s)
        self._metrics = metrics

    async def run(self, lease: Lease, progress: Progress) -> Outcome:
        """The lease's outcome: never raises but for cancellation."""
        started = time.monotonic()
        deadline = asyncio.timeout(self._timeout_s)
        try:
            async with deadline:
                return Finished(group=await self._roll_out(lease, progress, started))
        except RolloutFailure as failure:
            return self._failed(lease, data_fault=failure.data_fault, reason=str(failure))
        except Exception as error:  # the rollout boundary: whatever an environment raises becomes a record
            if isinstance(error, TimeoutError) and deadline.expired():
                reason = f"not finished within {self._timeout_s:g} s: it was waiting for {_WHOM[progress.waits_for]}"
                return self._failed(lease, data_fault=progress.waits_for == "environment", reason=reason)
            logger.warning("task %s of %s raised", lease.task_index, lease.environment, exc_info=error)
            return self._failed(lease, data_fault=True, reason=f"{type(error).__name__}: {error}")

    async def _roll_out(self, lease: Lease, progress: Progress, started: float) -> TrajectoryGroup:
        task, environments = await self._task(lease)
        prompt = await self._opening(environments, task, lease.seed)
        prompt_text, prompt_ids = self._tokenization.encode(prompt)
        progress.waits_for = "generators"
        sampled = await self._generation.sample(self._request(lease, prompt_ids), progress)
        texts = self._tokenization.decode([completion.token_ids for completion in sampled])
        progress.waits_for = "environment"
        judged = await self._ending(environments, texts)
        progress.waits_for = "rewards"
        rewards = await self._score(text_of(prompt), texts, judged)
        self._count(lease, sampled, rewards, seconds=time.monotonic() - started)
        return TrajectoryGroup(
            incarnation=lease.incarnation,
            lease_id=lease.lease_id,
            attempt=lease.attempt,
            purpose=lease.purpose,
            environment=lease.environment,
            task_index=lease.task_index,
            prompt_text=prompt_text,
            trajectories=_trajectories(prompt_ids, sampled, texts, rewards),
            rollout_s=time.monotonic() - started,
        )

    async def _task(self, lease: Lease) -> tuple[Task, Sequence[Environment]]:
        offered = self._environments.get(lease.environment)
        if offered is None:
            names = ", ".join(sorted(self._environments))
            raise DataFailure(f"there is no environment {lease.environment!r} here; there are {names}")
        count = offered.task_count(lease.purpose)
        if lease.task_index >= count:
            raise DataFailure(f"{lease.environment} has {count} tasks to {lease.purpose}, got index {lease.task_index}")
        make = partial(offered.tasks.task, lease.purpose, lease.task_index)
        task = await self._calls.one(make, what=f"task {lease.task_index} of {lease.environment}")
        return task, [offered.start() for _ in range(lease.group_size)]

    async def _opening(self, environments: Sequence[Environment], task: Task, seed: int) -> Prompt:
        resets: list[Call[Prompt | Opening]] = [partial(environment.reset, task, seed) for environment in environments]
        openings: list[Prompt | Opening] = await self._calls.all(resets, what="the environment's reset")
        prompts: list[Prompt] = [opening.prompt if isinstance(opening, Opening) else opening for opening in openings]
        if any(prompt != prompts[0] for prompt in prompts):
            raise DataFailure("the environment opens differently for the same task and seed")
        return prompts[0]

    async def _ending(self, environments: Sequence[Environment], texts: Sequence[str]) -> list[Verification]:
        acting = [partial(each.step, Action(text)) for each, text in zip(environments, texts, strict=True)]
        return [_verification(step) for step in await self._calls.all(acting, what="the environment's step")]

    def _request(self, lease: Lease, prompt_ids: Sequence[int]) -> GenerateRequest:
        return GenerateRequest(
            request_id=f"{self._env_id}/{lease.incarnation}/{lease.purpose}/{lease.lease_id}/{lease.attempt}",
            prompt_token_ids=tuple(prompt_ids),
            n=lease.group_size,
            purpose=lease.purpose,
            sampling=_sampling(lease),
        )

    async def _score(self, prompt: str, texts: Sequence[str], judged: Sequence[Verification]) -> Sequence[RewardRecord]:
        items = [
            ScoreItem(id=str(index), verifier=judge.verifier, completion=text, prompt=prompt, arguments=judge.arguments)
            for index, (text, judge) in enumerate(zip(texts, judged, strict=True))
        ]
        with self._metrics.scoring_s.time():
            return await self._scoring.score(items)

    def _count(
        self, lease: Lease, sampled: Sequence[Completion], rewards: Sequence[RewardRecord], *, seconds: float
    ) -> None:
        self._metrics.groups.labels(environment=lease.environment).inc()
        self._metrics.tokens.inc(sum(len(completion.token_ids) for completion in sampled))
        self._metrics.continued.inc(sum(len(completion.generator_ids) > 1 for completion in sampled))
        self._metrics.unscored.inc(sum(reward.reward is None for reward in rewards))
        self._metrics.rollout_s.observe(seconds)
        for reward in rewards:
            if reward.reward is None:
                self._metrics.reward_errors.labels(verifier=reward.verifier, kind=reward.error_kind).inc()
            else:
                self._metrics.rewards.labels(environment=lease.environment, verifier=reward.verifier).observe(
                    reward.reward
                )

    def _failed(self, lease: Lease, *, data_fault: bool, reason: str) -> Failed:
        self._metrics.failures.labels(kind="data" if data_fault else "infrastructure").inc()
        return Failed(
            incarnation=lease.incarnation,
            lease_id=lease.lease_id,
            attempt=lease.attempt,
            purpose=lease.purpose,
            data_fault=data_fault,
            reason=reason[:_REASON_LENGTH],
        )


def _sampling(lease: Lease) -> Sampling:
    """Evaluation is seeded by its lease, so that it can be repeated; training only if its sampling asks for a seed."""
    if lease.purpose == "train" and lease.sampling.seed is None:
        return lease.sampling
    return lease.sampling.model_copy(update={"seed": lease.seed})


def _verification(step: Step) -> Verification:
    if step.verification is None:
        raise DataFailure("the environment wants another turn; only environments of a single turn can be rolled out")
    return step.verification


def _trajectories(
    prompt_ids: Sequence[int], sampled: Sequence[Completion], texts: Sequence[str], rewards: Sequence[RewardRecord]
) -> tuple[Trajectory, ...]:
    return tuple(
        _trajectory(prompt_ids, completion, text=text, reward=reward)
        for completion, text, reward in zip(sampled, texts, rewards, strict=True)
    )


def _trajectory(prompt_ids: Sequence[int], completion: Completion, *, text: str, reward: RewardRecord) -> Trajectory:
    """Prompt and completion in one row of T tokens; every sampled token, the end token too, is trained on."""
    start, end = len(prompt_ids), len(prompt_ids) + len(completion.token_ids)
    loss_mask = np.zeros(end, dtype=np.uint8)
    loss_mask[start:] = 1
    behavior_logprobs = np.zeros(end, dtype=np.float32)
    behavior_logprobs[start:] = completion.behavior_logprobs
    assert completion.finish_reason is not None, "an unfinished completion"
    return Trajectory(
        token_ids=np.array([*prompt_ids, *completion.token_ids], dtype=np.int32),
        loss_mask=loss_mask,
        behavior_logprobs=behavior_logprobs,
        version_spans=tuple(
            VersionSpan(version=span.version, start=start + span.start, end=start + span.end)
            for span in completion.version_spans
        ),
        turns=(
            Turn(
                start=0,
                completion_start=start,
                end=end,
                finish_reason=completion.finish_reason,
                generator_ids=completion.generator_ids,
            ),
        ),
        reward=reward,
        completion_text=text,
    )
