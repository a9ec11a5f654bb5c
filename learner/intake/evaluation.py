"""Held-out evaluation: leases of its own beside the ledger's, for which nothing is trained and no version is too old.

The event loop owns an `Evaluator`. An evaluation hands out one lease per held-out task, before any training lease, and
ends when every task has an outcome; a task that fails three times counts as not evaluated.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from learner.config import EvaluationConfig
from protocol.generation import Sampling
from protocol.messages import Lease
from protocol.trajectories import TrajectoryGroup

_ATTEMPTS = 3


@dataclass(frozen=True)
class EvaluationResult:
    """`accuracy` is the share of evaluated tasks whose reward reached `success_reward`. The oldest and newest policy
    version that sampled a token are those of the whole evaluation; they differ when weights changed in the middle.
    """

    version: int
    tasks: int
    failed: int
    accuracy: float
    reward: float
    oldest_version: int
    newest_version: int
    truncated_share: float


@dataclass
class _Attempt:
    """`number` of a task's attempt, at an env_service until `deadline`, in seconds."""

    task: int
    number: int
    holder: str
    deadline: float


@dataclass
class _Running:
    version: int
    waiting: deque[tuple[int, int]]
    outstanding: dict[int, _Attempt] = field(default_factory=dict)
    groups: list[TrajectoryGroup] = field(default_factory=list)
    failed: int = 0
    done: "asyncio.Future[EvaluationResult]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Evaluator:
    """Runs one evaluation at a time; others wait in line.

    A lease of which nothing is heard for `timeout_s` seconds goes to somebody else. `incarnation` is the learner's; the
    caller keeps the leases of others away.
    """

    def __init__(self, *, config: EvaluationConfig, max_tokens: int, timeout_s: float, incarnation: int) -> None:
        self._config = config
        self._sampling = Sampling(temperature=config.temperature, max_tokens=max_tokens)
        self._timeout_s = timeout_s
        self._line: deque[_Running] = deque()
        self._incarnation = incarnation
        self._next_id = 0

    def start(self, *, tasks: int, version: int) -> "asyncio.Future[EvaluationResult]":
        """Evaluates held-out tasks 0..tasks-1 as soon as envs have room. `version` labels the result."""
        assert tasks > 0, tasks
        run = _Running(version=version, waiting=deque((index, 0) for index in range(tasks)))
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
            run.outstanding[self._next_id] = _Attempt(index, attempt, holder, now + self._timeout_s)
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
            seed=index,
            group_size=1,
            sampling=self._sampling,
            timeout_s=self._timeout_s,
        )

    def running(self, holder: str) -> int:
        """How many leases an env_service holds."""
        if not self._line:
            return 0
        return sum(attempt.holder == holder for attempt in self._line[0].outstanding.values())

    def heartbeat(self, *, now: float, holder: str, lease_ids: Iterable[int]) -> list[int]:
        """These leases are alive at an env_service. Returns those that nobody waits for any more."""
        outstanding = self._line[0].outstanding if self._line else {}
        unwanted = []
        for lease_id in lease_ids:
            attempt = outstanding.get(lease_id)
            if attempt is None or attempt.holder != holder:
                unwanted.append(lease_id)
            else:
                attempt.deadline = now + self._timeout_s
        return unwanted

    def expire(self, *, now: float) -> None:
        """Leases of which nothing was heard until their deadline go back into the line."""
        self._take_back(lambda attempt: attempt.deadline <= now)

    def stood_still(self, seconds: float) -> None:
        """The learner did nothing for so long: no silence counts from that time."""
        for attempt in self._line[0].outstanding.values() if self._line else ():
            attempt.deadline += seconds

    def finished(self, group: TrajectoryGroup) -> None:
        """Takes a result; one that nobody waits for is ignored."""
        run = self._line[0] if self._line else None
        if run is None or group.lease_id not in run.outstanding:
            return
        if all(trajectory.reward.reward is None for trajectory in group.trajectories):
            self.failed(group.lease_id)
            return
        del run.outstanding[group.lease_id]
        run.groups.append(group)
        self._close_if_done(run)

    def failed(self, lease_id: int) -> None:
        """A rollout came to nothing; its task is tried again, a few times."""
        run = self._line[0] if self._line else None
        if run is None or lease_id not in run.outstanding:
            return
        attempt = run.outstanding.pop(lease_id)
        if attempt.number + 1 < _ATTEMPTS:
            run.waiting.append((attempt.task, attempt.number + 1))
        else:
            run.failed += 1
            self._close_if_done(run)

    def holder_gone(self, holder: str) -> None:
        """All that this env_service held goes back into the line."""
        self._take_back(lambda attempt: attempt.holder == holder)

    def _take_back(self, is_lost: Callable[[_Attempt], bool]) -> None:
        run = self._line[0] if self._line else None
        if run is not None:
            for lease_id in [lease_id for lease_id, attempt in run.outstanding.items() if is_lost(attempt)]:
                attempt = run.outstanding.pop(lease_id)
                run.waiting.append((attempt.task, attempt.number))

    def _close_if_done(self, run: _Running) -> None:
        if run.waiting or run.outstanding:
            return
        self._line.popleft()
        if not run.done.cancelled():
            run.done.set_result(_result(run, success=self._config.success_reward))


def _result(run: _Running, *, success: float) -> EvaluationResult:
    trajectories = [trajectory for group in run.groups for trajectory in group.trajectories]
    rewards = [t.reward.reward for t in trajectories if t.reward.reward is not None]
    versions = [version for group in run.groups for version in _versions(group)]
    truncated = sum(t.turns[-1].finish_reason == "length" for t in trajectories)
    return EvaluationResult(
        version=run.version,
        tasks=len(rewards),
        failed=run.failed,
        accuracy=sum(reward >= success for reward in rewards) / max(1, len(rewards)),
        reward=sum(rewards) / max(1, len(rewards)),
        oldest_version=min(versions, default=run.version),
        newest_version=max(versions, default=run.version),
        truncated_share=truncated / max(1, len(trajectories)),
    )


def _versions(group: TrajectoryGroup) -> Iterable[int]:
    for trajectory in group.trajectories:
        yield from (int(version) for version in trajectory.token_versions() if version >= 0)
