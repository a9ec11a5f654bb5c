"""Held-out evaluation: leases of its own beside the ledger's, for which nothing is trained and no version is too old.

The event loop owns an `Evaluator`. An evaluation hands out one lease per held-out task, for all of its samples, before
any training lease, and ends when every task has an outcome. A task of which a sample has no reward is tried again; at
the third attempt the samples that have one count, and a task without any counts as not evaluated.
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import partial

from learner.evaluation.config import EvaluationConfig
from learner.evaluation.results import Evaluation, Sample, TaskSamples, answer_of, result_of
from protocol.generation import Sampling
from protocol.messages import Lease
from protocol.trajectories import Trajectory, TrajectoryGroup

logger = logging.getLogger(__name__)

_ATTEMPTS = 3
_LOSSES = 8
"""A task that was lost more often, with the silence or the end of its env_service, may be what takes them down."""


@dataclass
class _Attempt:
    """`number` of a task's attempt, at an env_service until `deadline`; overdue at `overdue_at`. In seconds."""

    task: int
    number: int
    holder: str
    deadline: float
    heard_at: float
    overdue_at: float
    waited_s: float = 0.0


@dataclass
class _Running:
    version: int
    beside: bool
    waiting: deque[tuple[int, int]]
    outstanding: dict[int, _Attempt] = field(default_factory=dict)
    held: Counter[str] = field(default_factory=Counter)  # how many of these, by holder
    losses: Counter[int] = field(default_factory=Counter)
    groups: list[TrajectoryGroup] = field(default_factory=list)
    failed: int = 0
    done: "asyncio.Future[Evaluation]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def hand_out(self, lease_id: int, attempt: _Attempt) -> None:
        self.outstanding[lease_id] = attempt
        self.held[attempt.holder] += 1

    def take_back(self, lease_id: int) -> _Attempt:
        attempt = self.outstanding.pop(lease_id)
        self.held[attempt.holder] -= 1
        return attempt


class Evaluator:
    """Runs one evaluation at a time; others wait in line.

    A completion has at most `max_tokens` and ends at any of `stop_token_ids`. A lease of which nothing is heard for
    `timeout_s` seconds goes to somebody else; one that takes longer than `longest_attempt_s`, though it is alive,
    counts as failed, and so does one that waits for others, such as rewards, for longer than `longest_wait_s`.
    `incarnation` is the learner's; the caller keeps others' leases away.
    """

    def __init__(
        self,
        *,
        config: EvaluationConfig,
        max_tokens: int,
        timeout_s: float,
        incarnation: int,
        longest_attempt_s: float = 1500.0,
        longest_wait_s: float = 3600.0,
        stop_token_ids: tuple[int, ...] = (),
    ) -> None:
        self._config = config
        self._sampling = Sampling(
            temperature=config.temperature, top_p=config.top_p, top_k=config.top_k, min_p=config.min_p,
            max_tokens=max_tokens, stop_token_ids=stop_token_ids,
        )  # fmt: skip
        self._timeout_s = timeout_s
        self._longest_attempt_s = longest_attempt_s
        self._longest_wait_s = longest_wait_s
        self._line: deque[_Running] = deque()
        self._incarnation = incarnation
        self._next_id = 0

    @property
    def evaluating(self) -> int | None:
        """The version whose evaluation has not ended; the oldest of several."""
        return self._line[0].version if self._line else None

    @property
    def is_beside(self) -> bool:
        """True if training goes on beside the present evaluation."""
        return bool(self._line) and self._line[0].beside

    def most_at(self, capacity: int) -> int:
        """Most leases that an env_service of that capacity may hold: all, unless training goes on beside."""
        return max(1, int(self._config.share * capacity)) if self.is_beside else capacity

    def start(self, *, tasks: int, version: int, beside: bool = False) -> "asyncio.Future[Evaluation]":
        """Evaluates held-out tasks 0..tasks-1 as soon as envs have room. `version` labels the result; `beside`:
        training goes on meanwhile, and keeps its share of them.
        """
        assert tasks > 0, tasks
        run = _Running(version=version, beside=beside, waiting=deque((index, 0) for index in range(tasks)))
        self._line.append(run)
        return run.done

    def grant(self, *, now: float, holder: str, environment: str, room: int) -> list[Lease]:
        """At most `room` leases for an env_service. `now` is in seconds, here and below."""
        leases: list[Lease] = []
        if not self._line:
            return leases
        run = self._line[0]
        while run.waiting and len(leases) < room:
            index, attempt = run.waiting.popleft()
            handed = _Attempt(index, attempt, holder, now + self._timeout_s, now, now + self._longest_attempt_s)
            run.hand_out(self._next_id, handed)
            leases.append(self._lease(self._next_id, index, environment))
            self._next_id += 1
        return leases

    def _lease(self, lease_id: int, index: int, environment: str) -> Lease:
        return Lease(
            incarnation=self._incarnation,
            lease_id=lease_id,
            attempt=0,
            purpose="evaluate",
            environment=environment,
            task_index=index,
            seed=index * self._config.samples,  # a generator draws sample i with seed + i: no two have the same
            group_size=self._config.samples,
            sampling=self._sampling,
            timeout_s=self._timeout_s,
        )

    @property
    def has_waiting(self) -> bool:
        """True if the present evaluation has leases that nobody holds."""
        return bool(self._line) and bool(self._line[0].waiting)

    def running(self, holder: str) -> int:
        """Number of leases that an env_service holds."""
        return self._line[0].held[holder] if self._line else 0

    def heartbeat(
        self, *, now: float, holder: str, lease_ids: Iterable[int], excused: Collection[int] = ()
    ) -> list[int]:
        """These leases are alive at an env_service. Returns those that nobody waits for any more.

        The time since those in `excused` were last heard of is not held against them.
        """
        outstanding = self._line[0].outstanding if self._line else {}
        unwanted = []
        for lease_id in lease_ids:
            attempt = outstanding.get(lease_id)
            if attempt is None or attempt.holder != holder:
                unwanted.append(lease_id)
            else:
                attempt.deadline = now + self._timeout_s
                excused_s = now - attempt.heard_at if lease_id in excused else 0.0
                attempt.overdue_at += excused_s
                attempt.waited_s += excused_s
                attempt.heard_at = now
        return unwanted

    def expire(self, *, now: float) -> None:
        """Leases of which nothing was heard until their deadline go back into the line; overdue ones have failed."""
        self._take_back(lambda attempt: attempt.deadline <= now)
        outstanding = self._line[0].outstanding if self._line else {}
        reason = f"not finished within {self._longest_attempt_s:g} s, though its env_service says that it is at work"
        for lease_id in [lease_id for lease_id, attempt in outstanding.items() if attempt.overdue_at <= now]:
            self.failed(lease_id, reason=reason)
        reason = f"waited for others for more than {self._longest_wait_s:g} s"
        for lease_id in [one for one, attempt in outstanding.items() if attempt.waited_s > self._longest_wait_s]:
            self.failed(lease_id, reason=reason)

    def stood_still(self, seconds: float) -> None:
        """The learner did nothing for so long: no silence counts from that time."""
        for attempt in self._line[0].outstanding.values() if self._line else ():
            attempt.deadline += seconds
            attempt.heard_at += seconds
            attempt.overdue_at += seconds

    def finished(self, group: TrajectoryGroup) -> None:
        """Takes a result; one that nobody waits for is ignored."""
        run = self._line[0] if self._line else None
        if run is None or group.lease_id not in run.outstanding:
            return
        scored = [trajectory.reward.reward is not None for trajectory in group.trajectories]
        is_last = run.outstanding[group.lease_id].number + 1 >= _ATTEMPTS
        if not all(scored) and not (is_last and any(scored)):
            self.failed(group.lease_id, reason=_why_unscored(group))
            return
        run.take_back(group.lease_id)
        run.groups.append(group)
        self._close_if_done(run)

    def failed(self, lease_id: int, *, reason: str) -> None:
        """A rollout came to nothing; its task is tried again, a few times."""
        run = self._line[0] if self._line else None
        if run is None or lease_id not in run.outstanding:
            return
        attempt = run.take_back(lease_id)
        if attempt.number + 1 < _ATTEMPTS:
            run.waiting.append((attempt.task, attempt.number + 1))
        else:
            self._give_up(run, attempt.task, reason)
            self._close_if_done(run)

    def _give_up(self, run: _Running, task: int, reason: str) -> None:
        logger.warning("held-out task %d is given up: %s", task, reason)
        run.failed += 1

    def holder_gone(self, holder: str, *, keeps: Collection[int] = ()) -> None:
        """All that this env_service held goes back into the line, but leases that its next process `keeps`."""
        self._take_back(lambda attempt: attempt.holder == holder, keeps=keeps)

    def _take_back(self, is_lost: Callable[[_Attempt], bool], *, keeps: Collection[int] = ()) -> None:
        run = self._line[0] if self._line else None
        if run is not None:
            lost = [each for each, attempt in run.outstanding.items() if is_lost(attempt) and each not in keeps]
            for lease_id in lost:
                attempt = run.take_back(lease_id)
                run.losses[attempt.task] += 1
                if run.losses[attempt.task] > _LOSSES:
                    self._give_up(
                        run, attempt.task, f"its env_service was lost with it {run.losses[attempt.task]} times"
                    )
                else:
                    run.waiting.append((attempt.task, attempt.number))
            self._close_if_done(run)

    def _close_if_done(self, run: _Running) -> None:
        if run.waiting or run.outstanding:
            return
        self._line.popleft()
        if not run.done.cancelled():
            run.done.set_result(_evaluation(run, config=self._config))


def _evaluation(run: _Running, *, config: EvaluationConfig) -> Evaluation:
    groups = sorted(run.groups, key=lambda group: group.task_index)
    tasks = tuple(
        TaskSamples(
            task_index=group.task_index,
            prompt=group.prompt_text,
            samples=_samples(group),
            verifier=group.trajectories[0].reward.verifier,
        )
        for group in groups
    )
    versions = [version for group in groups for version in _versions(group)]
    numbers = partial(result_of, version=run.version, success=config.success_reward, ks=config.ks)
    sampled_by = (min(versions, default=run.version), max(versions, default=run.version))
    own = [task for group, task in zip(groups, tasks, strict=True) if set(_versions(group)) == {run.version}]
    return Evaluation(
        environment=groups[0].environment if groups else "",
        result=numbers(tasks, failed=run.failed, sampled_by=sampled_by),
        tasks=tasks,
        own=numbers(own, failed=0, sampled_by=(run.version, run.version)) if own else None,
    )


def _why_unscored(group: TrajectoryGroup) -> str:
    return next((t.reward.error for t in group.trajectories if t.reward.error is not None), "it has no reward")


def _samples(group: TrajectoryGroup) -> tuple[Sample, ...]:
    rewarded = ((trajectory, trajectory.reward.reward) for trajectory in group.trajectories)
    return tuple(_sample(trajectory, reward=reward) for trajectory, reward in rewarded if reward is not None)


def _sample(trajectory: Trajectory, *, reward: float) -> Sample:
    return Sample(
        completion=trajectory.completion_text,
        reward=reward,
        answer=answer_of(trajectory.completion_text, components=trajectory.reward.components),
        length=int(trajectory.loss_mask.sum()),
        truncated=trajectory.truncated,
    )


def _versions(group: TrajectoryGroup) -> Iterable[int]:
    for trajectory in group.trajectories:
        yield from (int(version) for version in trajectory.token_versions() if version >= 0)
