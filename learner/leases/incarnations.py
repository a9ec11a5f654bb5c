"""Maps attempts of this and of former lives of the learner to this one's ledger.

    granted by this life ───────────────▶ the ledger knows it by the number on the wire
    of this life, expired, still at work ▶ adopted, too, when its env_service comes back and nobody else has its lease
    of a former life, still at work ────▶ adopted: the ledger gives it a number of this life
    of a former life, finished ─────────▶ under the number it was adopted with; else readmitted without one
    of a former life, failed ───────────▶ charged if it was adopted; else nobody waits for it: acknowledged
    of a former life, unwanted ─────────▶ nobody waits for it: cancelled

A version of a former life counts if `belongs` says that its policy is an ancestor of the present one.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from learner.leases.worth import worth_of
from learner.ledger import AttemptId, DeliveryAnswer, EndedAttempt, FailureKind, FailureResult, GroupVerdict, Ledger
from protocol.messages import OTHERS, FailedLease, RunningLease
from protocol.model import PolicyVersion
from protocol.trajectories import TrajectoryGroup

Belongs = Callable[[PolicyVersion], bool]
"""Tells if a version that a former life published is in the history of the weights that this life holds."""


@dataclass(frozen=True)
class HeartbeatOutcome:
    """Outcome of a list of running attempts: some are new to this life, some should be cancelled, all others are
    `alive` at their holder.
    """

    adopted: tuple[AttemptId, ...]
    unwanted: tuple[RunningLease, ...]
    alive: tuple[AttemptId, ...]


def up_to(version: int) -> Belongs:
    """All versions up to that of the learner when it resumed, after the replay: right if the batch log is whole."""
    return lambda former: former.number <= version


class Incarnations:
    """Between the wire, where an attempt is named by incarnation and number, and the ledger of one life."""

    def __init__(self, *, ledger: Ledger, incarnation: int, belongs: Belongs) -> None:
        self._ledger = ledger
        self._incarnation = incarnation
        self._belongs = belongs
        self._adopted: dict[tuple[int, int, int], int] = {}
        self._named: dict[AttemptId, tuple[int, int]] = {}

    def is_ours(self, about: TrajectoryGroup | FailedLease | RunningLease) -> bool:
        """True if this life granted the attempt."""
        return about.incarnation == self._incarnation

    def belongs(self, version: PolicyVersion) -> bool:
        """True if a token of that version was sampled by this learner's policy, in this life or in a former one."""
        if version.incarnation == self._incarnation:
            return version.number <= self._ledger.version
        return version.incarnation < self._incarnation and self._belongs(version)

    def attempt_of(self, about: TrajectoryGroup | FailedLease | RunningLease) -> AttemptId | None:
        """The attempt as the ledger knows it; None for one of a former life that was not adopted."""
        own = about.attempt if self.is_ours(about) else None
        number = self._adopted.get((about.incarnation, about.lease_id, about.attempt), own)
        return None if number is None else AttemptId(about.lease_id, number)

    def on_the_wire(self, attempt: AttemptId) -> RunningLease:
        """The attempt as its holder knows it."""
        incarnation, number = self._named.get(attempt, (self._incarnation, attempt.attempt))
        return RunningLease(incarnation=incarnation, lease_id=attempt.lease_id, attempt=number, purpose="train")

    def failed(self, attempt: AttemptId, reason: str, *, data_fault: bool) -> FailedLease:
        """The failure that its holder would have reported of an attempt with which the lease was given up."""
        named = self.on_the_wire(attempt)
        return FailedLease(
            incarnation=named.incarnation,
            lease_id=named.lease_id,
            attempt=named.attempt,
            purpose="train",
            data_fault=data_fault,
            reason=reason,
        )

    def hear(
        self,
        *,
        now: float,
        holder: str,
        running: Iterable[RunningLease],
        disk_is_full: bool = False,
        is_back: bool = False,
    ) -> HeartbeatOutcome:
        """Training attempts that a holder reports: moves their deadlines, and adopts those of former lives. Of one that
        `is_back`, as its hello says, so are those of this life that have expired meanwhile and that nobody else has.

        A finished group that stays unacknowledged is excused while the disk is full; else nobody can take it.
        """
        adopted: list[AttemptId] = []
        unwanted: list[RunningLease] = []
        known: dict[tuple[int, int], int | None] = {}
        excused: set[tuple[int, int]] = set()
        kept: set[tuple[int, int]] = set()
        for lease in running:
            attempt = self.attempt_of(lease)
            if attempt is None:
                attempt = self._adopt(lease, now=now, holder=holder)
                if attempt is None:
                    unwanted.append(lease)
                    continue
                adopted.append(attempt)
            elif is_back and not self._ledger.runs(attempt):
                attempt = self._adopt(lease, now=now, holder=holder, expired=attempt) or attempt
            known[attempt] = _number(lease)
            if lease.waits_for in OTHERS:
                excused.add(attempt)
            if disk_is_full and lease.waits_for == "learner":
                kept.add(attempt)
        ended = self._ledger.heartbeat(now=now, holder=holder, running=known, excused=excused, kept=kept)
        unwanted += map(self.on_the_wire, ended)
        alive = tuple(AttemptId(*attempt) for attempt in known if attempt not in ended)
        return HeartbeatOutcome(adopted=tuple(adopted), unwanted=tuple(unwanted), alive=alive)

    def unlisted(
        self, *, now: float, holder: str, running: Iterable[RunningLease], since_s: float
    ) -> tuple[EndedAttempt, ...]:
        """Ends training attempts that a holder does not list among all that it runs, as the ledger does."""
        known = {attempt for attempt in map(self.attempt_of, running) if attempt is not None}
        return self._ledger.unlisted(now=now, holder=holder, running=known, since_s=since_s)

    def _adopt(
        self, lease: RunningLease, *, now: float, holder: str, expired: AttemptId | None = None
    ) -> AttemptId | None:
        version = None if lease.oldest_version is None else PolicyVersion.parse(lease.oldest_version)
        if lease.incarnation > self._incarnation or (version is not None and not self.belongs(version)):
            return None
        adopt = self._ledger.adopt if expired is None else partial(self._ledger.revive, attempt=expired.attempt)
        number = adopt(now=now, lease_id=lease.lease_id, holder=holder, version=_number(lease))
        if number is None:
            return None
        attempt = AttemptId(lease.lease_id, number)
        self._adopted[(lease.incarnation, lease.lease_id, lease.attempt)] = number
        self._named[attempt] = (lease.incarnation, lease.attempt)
        return attempt

    def verdict(self, group: TrajectoryGroup, *, oldest_version: int) -> GroupVerdict:
        """The verdict that `admit` will give; changes nothing."""
        attempt = self.attempt_of(group)
        if attempt is not None:
            return self._ledger.would_accept(
                lease_id=group.lease_id, attempt=attempt.attempt, oldest_version=oldest_version
            )
        if group.incarnation > self._incarnation:
            return GroupVerdict.UNKNOWN
        return self._ledger.would_readmit(lease_id=group.lease_id, oldest_version=oldest_version)

    def admit(self, group: TrajectoryGroup, *, oldest_version: int) -> DeliveryAnswer:
        """Gives an admissible group to the ledger; `oldest_version` is that of its tokens, as `oldest_of` says."""
        attempt, size, worth = self.attempt_of(group), tokens_of(group), worth_of(group)
        if attempt is not None:
            return self._ledger.accept(
                lease_id=group.lease_id,
                attempt=attempt.attempt,
                oldest_version=oldest_version,
                size=size,
                worth=worth,
            )
        if group.incarnation > self._incarnation:
            return DeliveryAnswer(verdict=GroupVerdict.UNKNOWN)
        return self._ledger.readmit(lease_id=group.lease_id, oldest_version=oldest_version, size=size, worth=worth)

    def fail(self, failed: FailedLease, *, now: float) -> FailureResult:
        """Charges the lease of an attempt that failed; one of a former life that was not adopted is nobody's."""
        attempt = self.attempt_of(failed)
        if attempt is None:
            return FailureResult.IGNORED
        kind: FailureKind = "data" if failed.data_fault else "infrastructure"
        return self._ledger.fail(
            now=now, lease_id=attempt.lease_id, attempt=attempt.attempt, kind=kind, reason=failed.reason
        )


def tokens_of(group: TrajectoryGroup) -> int:
    """The tokens of all trajectories, prompts included."""
    return sum(trajectory.token_ids.shape[0] for trajectory in group.trajectories)


def oldest_of(group: TrajectoryGroup) -> int:
    """The number of the oldest version that sampled one of the tokens of an admissible group."""
    oldest_version = group.oldest_version
    assert oldest_version is not None, "an admissible group has sampled tokens"
    return oldest_version


def newest_of(group: TrajectoryGroup) -> int:
    """The number of the newest version that sampled one of the tokens of an admissible group."""
    return max(PolicyVersion.parse(version).number for _, version in group.own_stamps)


def _number(lease: RunningLease) -> int | None:
    return None if lease.oldest_version is None else PolicyVersion.parse(lease.oldest_version).number
