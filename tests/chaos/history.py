"""A run's history, from files and wire: plain records, in journal order, for the invariants to judge."""

import json
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from protocol.model import PolicyVersion
from protocol.trajectories import TrajectoryGroup
from tests.chaos.journal_reader import (
    BatchRecord,
    FilterRecord,
    GroupRecord,
    Place,
    ProofRecord,
    ReadJournal,
    read_journal,
)
from tests.chaos.lease_tap import Acknowledgement, AttemptKey, Finish, TapRecord, key_of


@dataclass(frozen=True, order=True)
class Stamp:
    """On a sampled token: the generator's process, and the version that it said."""

    instance: str
    version: PolicyVersion


@dataclass(frozen=True)
class AcceptedGroup:
    """An accepted group, the `at`-th record of the journal. `stamps` are those on its sampled tokens."""

    at: int
    key: AttemptKey
    task_index: int
    stamps: frozenset[Stamp]

    @property
    def oldest(self) -> int:
        return min(stamp.version.number for stamp in self.stamps)


@dataclass(frozen=True)
class TrainedBatch:
    """The batch that was trained at `version`; `reused` leases had been trained before."""

    at: int
    version: int
    lease_ids: tuple[int, ...]
    reused: tuple[int, ...] = ()


@dataclass(frozen=True)
class Filtered:
    """A lease that was left out on purpose."""

    at: int
    lease_id: int


@dataclass(frozen=True)
class LearnerLife:
    """A start of the learner; what it wrote begins at record `at`."""

    incarnation: int
    at: int


@dataclass(frozen=True)
class Acknowledged:
    """The learner acknowledged a finished group when the journal held `journaled` records."""

    key: AttemptKey
    journaled: int
    stamps: frozenset[Stamp]

    @property
    def oldest(self) -> int:
        return min(stamp.version.number for stamp in self.stamps)


@dataclass(frozen=True)
class ServedProof:
    """A process proved to serve a version, as the `at`-th record of the journal says."""

    at: int
    stamp: Stamp


@dataclass(frozen=True)
class StepLine:
    """A line of metrics.jsonl about a step: trained, or trained again from the journal."""

    step: int
    replayed: bool
    loss: float
    grad_norm: float
    mismatch_kl: float | None = None


@dataclass(frozen=True)
class Publish:
    """A line of metrics.jsonl about a publish or a join."""

    version: int
    probe_gap: float


@dataclass(frozen=True)
class SystemHistory:
    """All of it. Several lives of the learner make one history."""

    groups: tuple[AcceptedGroup, ...]
    batches: tuple[TrainedBatch, ...]
    filtered: tuple[Filtered, ...]
    lives: tuple[LearnerLife, ...]
    acknowledged: tuple[Acknowledged, ...]
    steps: tuple[StepLine, ...]
    publishes: tuple[Publish, ...]
    dead_lettered: frozenset[int]
    proofs: tuple[ServedProof, ...]
    damages: tuple[str, ...] = ()

    def group_of(self, lease_id: int, *, before: int) -> AcceptedGroup | None:
        """The group of a lease that a batch at record `before` took: the newest one until then."""
        found = [group for group in self._groups_by_lease.get(lease_id, ()) if group.at < before]
        return found[-1] if found else None

    def version_at(self, at: int) -> int:
        """The version at which the next batch after record `at` is taken."""
        before = bisect_left(self._batch_places, at)
        return self.batches[before - 1].version + 1 if before else 0

    def unproven(self, stamps: Iterable[Stamp], *, before: int) -> list[Stamp]:
        """Stamps of which the journal holds no proof before a record."""
        return sorted(stamp for stamp in stamps if self._first_proofs.get(stamp, before) >= before)

    @cached_property
    def _first_proofs(self) -> dict[Stamp, int]:
        return {proof.stamp: proof.at for proof in reversed(self.proofs)}

    @cached_property
    def _groups_by_lease(self) -> dict[int, list[AcceptedGroup]]:
        found: dict[int, list[AcceptedGroup]] = {}
        for group in self.groups:
            found.setdefault(group.key.lease_id, []).append(group)
        return found

    @cached_property
    def _batch_places(self) -> list[int]:
        return [batch.at for batch in self.batches]


def read_history(
    run: Path, *, archive: Path, starts: Mapping[int, Place], tap: Sequence[TapRecord] = ()
) -> SystemHistory:
    """The history of a run. `starts` has the journal's end at the start of each incarnation."""
    journal = read_journal(archive)
    places = [record.place for record in journal.records]
    metrics = _lines(run / "metrics.jsonl")
    numbered = list(enumerate(journal.records))
    lives = (LearnerLife(incarnation=number, at=bisect_left(places, place)) for number, place in sorted(starts.items()))
    return SystemHistory(
        groups=tuple(_group(at, record.group) for at, record in numbered if isinstance(record, GroupRecord)),
        batches=tuple(
            TrainedBatch(at=at, version=record.version, lease_ids=record.lease_ids, reused=record.reused)
            for at, record in numbered
            if isinstance(record, BatchRecord)
        ),
        filtered=tuple(
            Filtered(at=at, lease_id=record.lease_id) for at, record in numbered if isinstance(record, FilterRecord)
        ),
        lives=tuple(lives),
        acknowledged=tuple(_acknowledged(tap, journal)),
        steps=tuple(_steps(metrics)),
        publishes=tuple(
            Publish(version=int(str(line["version"])), probe_gap=_number(line, "probe_gap"))
            for line in metrics
            if "probe_gap" in line
        ),
        dead_lettered=frozenset(int(str(line["lease_id"])) for line in _lines(run / "dead_letters.jsonl")),
        proofs=tuple(
            ServedProof(at=at, stamp=Stamp(instance, PolicyVersion.parse(record.version)))
            for at, record in numbered
            if isinstance(record, ProofRecord)
            for instance in sorted(record.instances)
        ),
        damages=journal.damages,
    )


def _group(at: int, group: TrajectoryGroup) -> AcceptedGroup:
    return AcceptedGroup(at=at, key=key_of(group), task_index=group.task_index, stamps=_stamps(group))


def _stamps(group: TrajectoryGroup) -> frozenset[Stamp]:
    """Only those that stamp a token which is trained on."""
    return frozenset(
        Stamp(span.instance, PolicyVersion.parse(span.version))
        for one in group.trajectories
        for span in one.version_spans
        if one.loss_mask[span.start : span.end].any()
    )


def _acknowledged(tap: Sequence[TapRecord], journal: ReadJournal) -> Iterable[Acknowledged]:
    finished: dict[AttemptKey, frozenset[tuple[str, str]]] = {}
    ends = [record.place for record in journal.records]
    for record in tap:
        if isinstance(record, Finish):
            finished[record.key] = record.stamps
        elif isinstance(record, Acknowledgement) and record.key in finished and not record.doubtful:
            stamps = frozenset(
                Stamp(process, PolicyVersion.parse(version)) for process, version in finished[record.key]
            )
            if stamps:
                journaled = bisect_left(ends, record.journal_end)
                yield Acknowledged(key=record.key, journaled=journaled, stamps=stamps)


def _steps(metrics: Sequence[Mapping[str, object]]) -> Iterable[StepLine]:
    for line in metrics:
        if line["kind"] in ("step", "replay"):
            yield StepLine(
                step=int(str(line["step"])),
                replayed=line["kind"] == "replay",
                loss=_number(line, "loss"),
                grad_norm=_number(line, "grad_norm"),
                mismatch_kl=None if line.get("mismatch_kl") is None else _number(line, "mismatch_kl"),
            )


def _number(line: Mapping[str, object], name: str) -> float:
    return float(str(line[name]))


def _lines(path: Path) -> list[dict[str, object]]:
    """The whole lines of a JSONL file; a last one without an end was being written when its writer died."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1] if line]
