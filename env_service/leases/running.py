"""The leases in progress, and the tasks that roll them out."""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass

from env_service.leases.places import LeasePlaces, PlaceRule
from env_service.rollouts.completions import RolloutProgress
from env_service.rollouts.outcomes import Outcome, RolloutMetrics
from protocol.lease_keys import LeaseKey, key_of
from protocol.messages import FailedLease, Lease, RunningLease, WaitsFor
from services.load import LoadSample

_QUEUE_FACTOR = 4
"""Leases held at most, by capacity: a restarted learner grants without knowing what still runs here."""

RunLease = Callable[[Lease, RolloutProgress], Awaitable[Outcome]]
Report = Callable[[Outcome], Awaitable[None]]


@dataclass
class _Running:
    lease: Lease
    progress: RolloutProgress
    task: asyncio.Task[None] | None = None
    begun: bool = False


@dataclass(frozen=True)
class Slow:
    """Leases that have waited for long: how many, of which environments, and the longest of the waits in seconds.
    `said` is what the host of one of these environments said last, or how it could not be asked.
    """

    leases: int
    environments: tuple[str, ...]
    oldest_s: float
    said: str = ""


@dataclass(frozen=True)
class LimitedLeases:
    """Leases of an environment of which `most` may run at once."""

    environment: str
    running: int
    waiting: int
    most: int


def _named(lease: Lease) -> str:
    return lease.environment


def _rank(lease: Lease) -> tuple[int, ...]:
    """The oldest lease first, whenever it was granted again; evaluation before training, as the learner grants it."""
    return (lease.purpose == "train", lease.lease_id, lease.attempt)


class RunningLeases:
    """Runs at most `capacity` leases at once, the oldest first, holds the others back, and reports each outcome.

    `rules` bound and weigh environments by name; `whose` tells that of a lease. Tasks live in `tasks`, the caller's
    group: what this class does not expect ends the process.
    """

    def __init__(
        self,
        *,
        run: RunLease,
        report: Report,
        capacity: int,
        tasks: asyncio.TaskGroup,
        metrics: RolloutMetrics,
        rules: Mapping[str, PlaceRule] | None = None,
        whose: Callable[[Lease], str] = _named,
    ) -> None:
        self._run = run
        self._report = report
        self._rules = rules or {}
        self._whose = whose
        self._places = LeasePlaces(capacity, self._rules)
        self._limit = _QUEUE_FACTOR * capacity
        self._tasks = tasks
        self._metrics = metrics
        self._running: dict[LeaseKey, _Running] = {}
        self._ended = 0
        metrics.running.set_function(lambda: len(self._running))
        for name in self._rules:
            for state, count in (("running", self._places.running), ("waiting", self._places.waiting)):
                gauge = metrics.environment_leases.labels(environment=name, state=state)
                gauge.set_function(lambda count=count, name=name: count[name])

    async def start(self, lease: Lease, *, oldest: str | None = None, elapsed_s: float = 0.0) -> None:
        """Begin a lease; one that runs already goes on, one for which there is no room is reported as failed. One that
        a former process had begun has had `elapsed_s` seconds, and tokens of the version `oldest`.
        """
        key = key_of(lease)
        if key in self._running:
            return
        if len(self._running) >= self._limit:
            await self._report(_no_room(lease, self._limit))
            return
        progress = RolloutProgress(rank=_rank(lease), oldest=oldest, elapsed_s=elapsed_s)
        entry = self._running[key] = _Running(lease, progress)
        entry.task = self._tasks.create_task(self._hold(key, entry), name=f"lease {lease.lease_id}")

    def cancel(self, keys: Iterable[LeaseKey]) -> None:
        """Stop leases; ones that do not run are passed over."""
        for key in keys:
            entry = self._running.pop(key, None)
            if entry is not None and entry.task is not None:
                entry.task.cancel()
                self._metrics.cancelled.inc()

    def cancel_all(self) -> None:
        """Stop everything."""
        self.cancel(list(self._running))

    def report_progress(self) -> tuple[RunningLease, ...]:
        """Takes in what a heartbeat says."""
        return tuple(
            RunningLease(
                incarnation=key.incarnation,
                lease_id=key.lease_id,
                attempt=key.attempt,
                purpose=key.purpose,
                oldest_version=entry.progress.oldest_version(),
                # One without a place of its own waits as for a host, which is not held against it.
                waits_for=entry.progress.waits_for if entry.begun else "host",
            )
            for key, entry in self._running.items()
        )

    def look(self) -> LoadSample:
        """Leases that have a place, and whom they wait for, for the load of this process."""
        begun = [entry for entry in self._running.values() if entry.begun]
        waits = Counter(str(entry.progress.waits_for) for entry in begun)
        return LoadSample(done=self._ended, running=len(begun), waits=waits)

    def limited(self) -> tuple[LimitedLeases, ...]:
        """Leases of each environment that has a limit."""
        places = self._places
        return tuple(
            LimitedLeases(name, running=places.running[name], waiting=places.waiting[name], most=rule.most)
            for name, rule in self._rules.items()
            if rule.most is not None
        )

    def slow(self, whom: WaitsFor, *, from_s: float) -> "Slow | None":
        """The leases that have waited for somebody for `from_s` seconds or more; None if there are none."""
        now = time.monotonic()
        found = [
            (now - entry.progress.waits_since, entry.lease.environment, entry.progress.said)
            for entry in self._running.values()
            if entry.begun and entry.progress.waits_for == whom and now - entry.progress.waits_since >= from_s
        ]
        if not found:
            return None
        oldest_s, _, said = max(found)
        names = tuple(sorted({name for _, name, _ in found}))
        return Slow(leases=len(found), environments=names, oldest_s=oldest_s, said=said)

    async def _hold(self, key: LeaseKey, entry: _Running) -> None:
        try:
            async with self._places.held(_rank(entry.lease), self._whose(entry.lease)):
                entry.begun = True
                outcome = await self._run(entry.lease, entry.progress)
            # Reported before it stops running: at no moment may a heartbeat speak of it and the outbox not know it.
            await self._report(outcome)
            self._ended += 1
        finally:
            if self._running.get(key) is entry:
                del self._running[key]


def _no_room(lease: Lease, limit: int) -> FailedLease:
    return FailedLease(
        incarnation=lease.incarnation,
        lease_id=lease.lease_id,
        attempt=lease.attempt,
        purpose=lease.purpose,
        data_fault=False,
        reason=f"this env_service holds {limit} leases already",
    )
