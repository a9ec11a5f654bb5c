"""The rollout of one lease.

task ─▶ environments reset ─▶ prompt tokens ─▶ group_size completions ─▶ environments step ─▶ scores ─▶ group
"""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence

import numpy as np

from env_service.completions import Completion
from env_service.environments.interface import (
    Action,
    Environment,
    OfferedEnvironment,
    Prompt,
    Task,
    Verification,
    settled,
    text_of,
)
from env_service.failures import DataFailure, RolloutFailure
from env_service.generation import Generation
from env_service.metrics import RolloutMetrics
from env_service.outbox import Outcome
from env_service.progress import Progress
from env_service.scoring import Scoring
from env_service.tokenization import Tokenization
from protocol.generation import GenerateRequest, Sampling
from protocol.messages import Failed, Finished, Lease
from protocol.rewards import ScoreItem
from protocol.trajectories import RewardRecord, Trajectory, TrajectoryGroup, Turn, VersionSpan

logger = logging.getLogger(__name__)

_REASON_LENGTH = 4096


class Rollout:
    """Turns leases into outcomes; holds no state of a lease. `timeout_s` bounds one rollout with all its retries."""

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
    ) -> None:
        self._env_id = env_id
        self._environments = environments
        self._tokenization = tokenization
        self._generation = generation
        self._scoring = scoring
        self._timeout_s = timeout_s
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
                reason = f"not finished within {self._timeout_s:g} s: it was waiting for {progress.waits_for}"
                return self._failed(lease, data_fault=False, reason=reason)
            logger.warning("task %s of %s raised", lease.task_index, lease.environment, exc_info=error)
            return self._failed(lease, data_fault=True, reason=f"{type(error).__name__}: {error}")

    async def _roll_out(self, lease: Lease, progress: Progress, started: float) -> TrajectoryGroup:
        task, environments = await self._task(lease)
        prompt = await _opening(environments, task, lease.seed)
        prompt_text, prompt_ids = self._tokenization.encode(prompt)
        progress.waits_for = "the generators"
        sampled = await self._generation.sample(self._request(lease, prompt_ids), progress)
        texts = self._tokenization.decode([completion.token_ids for completion in sampled])
        progress.waits_for = "its environment"
        judged = [await _ending(each, Action(text)) for each, text in zip(environments, texts, strict=True)]
        progress.waits_for = "the reward services"
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
        task = await settled(offered.tasks.task(lease.purpose, lease.task_index))
        return task, [offered.start() for _ in range(lease.group_size)]

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


async def _opening(environments: Sequence[Environment], task: Task, seed: int) -> Prompt:
    prompts: list[Prompt] = [await settled(environment.reset(task, seed)) for environment in environments]
    if any(prompt != prompts[0] for prompt in prompts):
        raise DataFailure("the environment opens differently for the same task and seed")
    return prompts[0]


async def _ending(environment: Environment, action: Action) -> Verification:
    step = await settled(environment.step(action))
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
