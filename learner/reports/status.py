"""The learner's part of `GET /v1/status`. Nothing here waits or computes."""

import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from learner.leases.granting import Peer
from learner.ledger import Ledger
from learner.reports.metrics import Measures
from learner.weights.fleet import Fleet, Member
from protocol.model import PolicyVersion
from protocol.status import DiskStatus, EventStatus, PeerStatus, ProgressStatus, QueueStatus, Report

_LEAST_FREE_BYTES = 64 << 20


class LearnerStatus:
    """Reads ledger, fleet and env_services; `total_steps` is the run's end, `folder` the run's. `clock` is theirs."""

    def __init__(
        self,
        *,
        name: str,
        folder: Path,
        total_steps: int,
        incarnation: int,
        ledger: Ledger,
        fleet: Fleet,
        env_services: Callable[[], Iterable[Peer]],
        measures: Measures,
        teachers: Callable[[], tuple[PeerStatus, ...]] = tuple,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._folder = folder
        self._total_steps = total_steps
        self._incarnation = incarnation
        self._ledger = ledger
        self._fleet = fleet
        self._env_services = env_services
        self._measures = measures
        self._teachers = teachers
        self._clock = clock

    def report(self) -> Report:
        """The learner's part of its status."""
        disk = self._disk()
        problems = (_disk_full(disk),) if disk.free_bytes < _LEAST_FREE_BYTES else ()
        return Report(
            id=self._name,
            policy_version=str(PolicyVersion(self._incarnation, self._ledger.version)),
            progress=ProgressStatus(unit="steps", done=self._ledger.version, total=self._total_steps),
            peers=(
                *(self._generator(member) for member in self._fleet.members()),
                *(self._env_service(holder) for holder in self._env_services()),
                *self._teachers(),
            ),
            queues=self._queues(),
            events=tuple(
                EventStatus(name=name, age_s=max(0.0, self._clock() - when))
                for name, when in self._measures.last_at.items()
            ),
            disks=(disk,),
            problems=(*problems, *self._guarded()),
        )

    def _queues(self) -> tuple[QueueStatus, ...]:
        books = self._ledger.books()
        behind = sum(member.serving is None or self._lags(member.serving) for member in self._fleet.members())
        return (
            QueueStatus(name="pending leases", depth=books.pending),
            QueueStatus(name="running leases", depth=books.running),
            QueueStatus(name="buffered groups", depth=books.buffered),
            QueueStatus(name="generators to be published to", depth=behind),
        )

    def _guarded(self) -> tuple[str, ...]:
        bound, configured = self._ledger.max_lag, self._ledger.config.max_lag
        if bound == configured:
            return ()
        return (
            f"the guard bounds the lag by {bound} instead of {configured}: the log says which measure made it do so",
        )

    def _generator(self, member: Member) -> PeerStatus:
        state = "joining"
        if member.serving is not None:
            state = "behind" if self._lags(member.serving) else "serving"
        return PeerStatus(
            name=member.generator_id,
            kind="generator",
            url=member.url,
            last_heard_s=max(0.0, self._clock() - member.last_seen),
            serving_version=None if member.serving is None else str(member.serving),
            state=state,
        )

    def _env_service(self, holder: Peer) -> PeerStatus:
        return PeerStatus(
            name=holder.name,
            kind="env-service",
            last_heard_s=max(0.0, self._clock() - holder.last_seen),
            state=f"{len(holder.running)} of {holder.hello.capacity} groups",
        )

    def _lags(self, serving: PolicyVersion) -> bool:
        return serving.number < self._ledger.version

    def _disk(self) -> DiskStatus:
        usage = shutil.disk_usage(self._folder)
        return DiskStatus(path=str(self._folder), free_bytes=usage.free, total_bytes=usage.total)


def _disk_full(disk: DiskStatus) -> str:
    return f"the disk of {disk.path} has {disk.free_bytes >> 20} MiB left: make room there, the journal is on it"
