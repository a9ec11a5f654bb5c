"""The leases in progress, and the tasks that roll them out."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

from env_service.lease_key import LeaseKey, key_of
from env_service.metrics import RolloutMetrics
from env_service.outbox import Outcome
from env_service.progress import Progress
from protocol.messages import Failed, Lease, RunningLease

logger = logging.getLogger(__name__)

RunLease = Callable[[Lease, Progress], Awaitable[Outcome]]
Report = Callable[[Outcome], Awaitable[None]]

_QUEUE_FACTOR = 4
"""Leases held at most, by capacity: a restarted learner grants without knowing what still runs here."""


@dataclass
class _Running:
    lease: Lease
    progress: Progress = field(default_factory=Progress)
    task: asyncio.Task[None] | None = None


class RunningLeases:
    """Runs at most `capacity` leases at once, holds the others back, and reports each outcome.

    Tasks live in `tasks`, the caller's group: what this class does not expect ends the process.
    """

    def __init__(
        self, *, run: RunLease, report: Report, capacity: int, tasks: asyncio.TaskGroup, metrics: RolloutMetrics
    ) -> None:
        self._run = run
        self._report = report
        self._places = asyncio.Semaphore(capacity)
        self._limit = _QUEUE_FACTOR * capacity
        self._tasks = tasks
        self._metrics = metrics
        self._running: dict[LeaseKey, _Running] = {}
        metrics.running.set_function(lambda: len(self._running))

    async def start(self, lease: Lease) -> None:
        """Begin a lease; one that runs already goes on, one for which there is no room is reported as failed."""
        key = key_of(lease)
        if key in self._running:
            return
        if len(self._running) >= self._limit:
            await self._report(_no_room(lease, self._limit))
            return
        entry = self._running[key] = _Running(lease)
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
        """What a heartbeat says."""
        return tuple(
            RunningLease(
                incarnation=key.incarnation,
                lease_id=key.lease_id,
                attempt=key.attempt,
                purpose=key.purpose,
                oldest_version=entry.progress.oldest_version(),
            )
            for key, entry in self._running.items()
        )

    async def _hold(self, key: LeaseKey, entry: _Running) -> None:
        try:
            async with self._places:
                outcome = await self._run(entry.lease, entry.progress)
            # Reported before it stops running: at no moment may a heartbeat speak of it and the outbox not know it.
            await self._report(outcome)
        finally:
            if self._running.get(key) is entry:
                del self._running[key]


def _no_room(lease: Lease, limit: int) -> Failed:
    return Failed(
        incarnation=lease.incarnation,
        lease_id=lease.lease_id,
        attempt=lease.attempt,
        purpose=lease.purpose,
        data_fault=False,
        reason=f"this env_service holds {limit} leases already",
    )
