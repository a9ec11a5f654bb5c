"""Place of every lease and end of its attempts: the moves that keep the books, not the rules that choose them.

Beside them, whom a step has to wait for, so that no group becomes too old:

Batches take groups by rising version (earliest deadline first). A group of version m can be trained at the learner's
versions up to m + max_lag, so if a step is taken at version v, the groups that it leaves behind with versions up to m
share the (m + max_lag - v) * groups_per_step places of the steps after it. Where they are more than the places, some
of them will become too old, and the running ones among them are the stragglers. For m = v - max_lag there are no
places: a running group that is due at this very step is always a straggler. Looking only at those is not enough: more
than a batch of groups can fall due at once, if the steps before took newer groups that happened to finish early.
"""

import heapq
import math
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate

from learner.ledger.records import Books, EndedAttempt, FailureKind, LedgerSnapshot


class AttemptOutcome(StrEnum):
    """State of an attempt, or its end."""

    RUNNING = "running"
    ACCEPTED = "accepted"
    FAILED = "failed"
    EXPIRED = "expired"
    DROPPED = "dropped"


class LeaseEnd(StrEnum):
    """Final end of a lease."""

    TRAINED = "trained"
    FILTERED = "filtered"
    DEAD_LETTERED = "dead_lettered"


@dataclass(slots=True, kw_only=True)
class OpenLease:
    """A lease that is not closed. `attempts[i]` is the outcome of attempt i; `expiries` are those of this life."""

    lease_id: int
    attempts: list[AttemptOutcome] = field(default_factory=list)
    drops: int = 0
    expiries: int = 0
    failures: dict[FailureKind, int] = field(default_factory=lambda: {"infrastructure": 0, "data": 0})


@dataclass(slots=True, kw_only=True)
class RunningAttempt:
    """version: a lower bound on the versions of the group's tokens. Times are seconds on the caller's clock.

    deadline: when it expires unless it is heard of. overdue_at: when it has taken too long, alive or not. waited_s: how
    long it has waited for what is not its own.
    """

    attempt: int
    holder: str
    version: int
    deadline: float
    heard_at: float
    overdue_at: float
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferedGroup:
    """version: of the group's oldest token. size, worth: in the caller's measures."""

    attempt: int
    version: int
    size: int
    worth: float = 0.0


class LeaseTable:
    """All leases below `cursor`. One that is not closed is in exactly one of the four places; closed ones are counted.

    Public for reading; only the methods change it.
    """

    def __init__(self) -> None:
        self.cursor = 0
        self.leases: dict[int, OpenLease] = {}
        self.pending: dict[int, float] = {}  # lease id -> not to be granted before
        # The same in order, beside entries that do not hold any more: to look through all for each grant would take
        # minutes after a restart with a hundred thousand of them.
        self._ready: list[int] = []
        self._resting: list[tuple[float, int]] = []
        self.running: dict[int, RunningAttempt] = {}
        self.buffered: dict[int, BufferedGroup] = {}
        self.untrained: deque[tuple[int, ...]] = deque()  # batches taken or replayed whose step has not ended
        self.closed: Counter[LeaseEnd] = Counter()
        self.outcomes: Counter[AttemptOutcome] = Counter()

    def open_up_to(self, cursor: int) -> None:
        """Opens the leases below `cursor` that do not exist yet, as pending."""
        for lease_id in range(self.cursor, cursor):
            self.leases[lease_id] = OpenLease(lease_id=lease_id)
            self._make_pending(lease_id)
        self.cursor = max(self.cursor, cursor)

    def _make_pending(self, lease_id: int, *, not_before: float = 0.0) -> None:
        self.pending[lease_id] = not_before
        if not_before > 0.0:
            heapq.heappush(self._resting, (not_before, lease_id))
        else:
            heapq.heappush(self._ready, lease_id)

    def next_pending(self, now: float, *, new_below: float = math.inf) -> int | None:
        """The oldest lease that may be granted again at `now`, else a new one; None if that is not `new_below`."""
        while self._resting and self._resting[0][0] <= now:
            heapq.heappush(self._ready, heapq.heappop(self._resting)[1])
        while self._ready and (not_before := self.pending.get(self._ready[0], math.inf)) > now:
            lease_id = heapq.heappop(self._ready)
            if not_before < math.inf:
                heapq.heappush(self._resting, (not_before, lease_id))
        lease_id = self._ready[0] if self._ready else self.cursor
        if lease_id >= max(self.cursor, new_below):
            return None
        self.open_up_to(lease_id + 1)
        return lease_id

    def pass_over(self) -> int:
        """The lease that is next now is not until it is put back."""
        return heapq.heappop(self._ready)

    def put_back(self, lease_ids: Iterable[int]) -> None:
        """After `pass_over`."""
        for lease_id in lease_ids:
            heapq.heappush(self._ready, lease_id)

    def start(self, lease_id: int, *, holder: str, version: int, now: float, timeout_s: float, longest_s: float) -> int:
        """Pending to running. Returns the number of the new attempt."""
        del self.pending[lease_id]
        attempt = self._new_attempt(lease_id, AttemptOutcome.RUNNING)
        self.running[lease_id] = RunningAttempt(
            attempt=attempt,
            holder=holder,
            version=version,
            deadline=now + timeout_s,
            heard_at=now,
            overdue_at=now + longest_s,
        )
        return attempt

    def stop(self, lease_id: int, outcome: AttemptOutcome, *, not_before: float = 0.0) -> EndedAttempt:
        """Running to pending, and not to be granted before `not_before`."""
        running = self.running.pop(lease_id)
        self._make_pending(lease_id, not_before=not_before)
        self._settle(lease_id, running.attempt, outcome)
        return EndedAttempt(lease_id=lease_id, attempt=running.attempt, holder=running.holder, size=None)

    def drop(self, lease_id: int) -> EndedAttempt:
        """Running or buffered to pending, counted among the lease's drops."""
        self.leases[lease_id].drops += 1
        if lease_id in self.running:
            return self.stop(lease_id, AttemptOutcome.DROPPED)
        group = self.buffered.pop(lease_id)
        self._make_pending(lease_id)
        self._settle(lease_id, group.attempt, AttemptOutcome.DROPPED)
        return EndedAttempt(lease_id=lease_id, attempt=group.attempt, holder=None, size=group.size)

    def buffer(self, lease_id: int, group: BufferedGroup) -> tuple[EndedAttempt, ...]:
        """Running or pending to buffered. Returns the running attempt if it was another than the group's."""
        cancelled: tuple[EndedAttempt, ...] = ()
        if lease_id in self.running:
            ended = self.stop(lease_id, AttemptOutcome.DROPPED)
            cancelled = (ended,) if ended.attempt != group.attempt else ()
        del self.pending[lease_id]
        self._settle(lease_id, group.attempt, AttemptOutcome.ACCEPTED)
        self.buffered[lease_id] = group
        return cancelled

    def newest_attempt(self, lease_id: int) -> int:
        """The number of the lease's newest attempt. One that has none gets one that counts as expired."""
        if not self.leases[lease_id].attempts:
            return self._new_attempt(lease_id, AttemptOutcome.EXPIRED)
        return len(self.leases[lease_id].attempts) - 1

    def take(self, lease_ids: tuple[int, ...]) -> None:
        """Buffered to in training."""
        for lease_id in lease_ids:
            del self.buffered[lease_id]
        self.untrained.append(lease_ids)

    def close(self, lease_id: int, how: LeaseEnd) -> None:
        """Any place but in training, to closed; a running attempt must have been stopped before."""
        self.pending.pop(lease_id, None)
        self.buffered.pop(lease_id, None)
        del self.leases[lease_id]
        self.closed[how] += 1

    def close_trained(self) -> None:
        """The oldest batch in training is trained."""
        for lease_id in self.untrained.popleft():
            self.close(lease_id, LeaseEnd.TRAINED)

    def books(self, *, reused: int = 0) -> Books:
        closed, outcomes = (
            self.closed.get,
            self.outcomes.get,
        )  # a Counter's own way to 0 is slow, and this is asked often
        return Books(
            leases=self.cursor,
            trained=closed(LeaseEnd.TRAINED, 0) + sum(map(len, self.untrained)),
            filtered=closed(LeaseEnd.FILTERED, 0),
            dead_lettered=closed(LeaseEnd.DEAD_LETTERED, 0),
            buffered=len(self.buffered),
            running=len(self.running),
            pending=len(self.pending),
            attempts=self.outcomes.total(),
            accepted=outcomes(AttemptOutcome.ACCEPTED, 0),
            failed=outcomes(AttemptOutcome.FAILED, 0),
            expired=outcomes(AttemptOutcome.EXPIRED, 0),
            dropped=outcomes(AttemptOutcome.DROPPED, 0),
            reused=reused,
        )

    def snapshot(self, *, version: int, reasons: dict[str, int], reused: int = 0) -> LedgerSnapshot:
        leases = list(self.leases.values())
        return LedgerSnapshot(
            version=version,
            cursor=self.cursor,
            closed={how.value: count for how, count in self.closed.items()},
            outcomes={outcome.value: count for outcome, count in self.outcomes.items()},
            reasons=reasons,
            lease_ids=[lease.lease_id for lease in leases],
            attempts=[[outcome.value for outcome in lease.attempts] for lease in leases],
            drops=[lease.drops for lease in leases],
            infrastructure_failures=[lease.failures["infrastructure"] for lease in leases],
            data_failures=[lease.failures["data"] for lease in leases],
            reused=reused,
        )

    @classmethod
    def restored(cls, snapshot: LedgerSnapshot) -> "LeaseTable":
        """Every lease that is not closed is pending; attempts that ran, or whose groups waited, count as expired."""
        table = cls()
        table.cursor = snapshot.cursor
        table.closed.update({LeaseEnd(how): count for how, count in snapshot.closed.items()})
        table.outcomes.update({AttemptOutcome(outcome): count for outcome, count in snapshot.outcomes.items()})
        columns = (snapshot.attempts, snapshot.drops, snapshot.infrastructure_failures, snapshot.data_failures)
        for lease_id, attempts, drops, infrastructure, data in zip(snapshot.lease_ids, *columns, strict=True):
            table.leases[lease_id] = OpenLease(
                lease_id=lease_id,
                attempts=[AttemptOutcome(outcome) for outcome in attempts],
                drops=drops,
                failures={"infrastructure": infrastructure, "data": data},
            )
            table._make_pending(lease_id)
            table._forget_unfinished(lease_id)
        return table

    def _forget_unfinished(self, lease_id: int) -> None:
        for attempt, outcome in enumerate(self.leases[lease_id].attempts):
            if outcome in (AttemptOutcome.RUNNING, AttemptOutcome.ACCEPTED):
                self._settle(lease_id, attempt, AttemptOutcome.EXPIRED)

    def _new_attempt(self, lease_id: int, outcome: AttemptOutcome) -> int:
        attempts = self.leases[lease_id].attempts
        attempts.append(outcome)
        self.outcomes[outcome] += 1
        return len(attempts) - 1

    def _settle(self, lease_id: int, attempt: int, outcome: AttemptOutcome) -> None:
        attempts = self.leases[lease_id].attempts
        self.outcomes[attempts[attempt]] -= 1
        self.outcomes[outcome] += 1
        attempts[attempt] = outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Remaining:
    """A group that the step leaves behind. droppable: it may still be dropped (has a meaning for running ones only)."""

    version: int
    lease_id: int
    running: bool = False
    drops: int = 0
    droppable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Blockage:
    """stragglers: the running groups to wait for. drop: the fewest of them that must go if the step is taken now.

    must_wait: dropping is not enough, since some of them may not be dropped any more.
    """

    stragglers: tuple[int, ...]
    drop: tuple[int, ...]
    must_wait: bool


NOT_BLOCKED = Blockage(stragglers=(), drop=(), must_wait=False)


def last_without_a_place(versions: Iterable[int], *, version: int, max_lag: int, groups_per_step: int) -> int | None:
    """Of the versions of the groups that a step at `version` leaves behind, the highest up to which they are more than
    their places; None if there is a place for all. What is newer plays no part in a blockage.
    """
    by_version = sorted(Counter(versions).items())
    up_to = accumulate(count for _, count in by_version)
    crowded = (
        each
        for (each, _), count in zip(by_version, up_to, strict=True)
        if count > (each + max_lag - version) * groups_per_step
    )
    return max(crowded, default=None)


def blockage(remaining: Iterable[Remaining], *, version: int, max_lag: int, groups_per_step: int) -> Blockage:
    """The leases that a step at `version` that leaves `remaining` behind would make too old; fields hold lease ids.

    Finished groups that no waiting can save are ignored: there can be more of them than the admission rule allows when
    an attempt comes in after its lease was given up, and they leave the buffer when they are too old.
    """
    kept: list[Remaining] = []
    stragglers: dict[int, None] = {}
    drop: list[int] = []
    must_wait = False
    for group in sorted(remaining, key=lambda g: (g.version, g.lease_id)):
        kept.append(group)
        if len(kept) <= (group.version + max_lag - version) * groups_per_step:
            continue
        running = [g for g in kept if g.running]
        victim = _victim(running) or group
        kept.remove(victim)
        if running:
            stragglers.update((g.lease_id, None) for g in running)
            drop.append(victim.lease_id)
            must_wait = must_wait or not victim.droppable
    return Blockage(stragglers=tuple(stragglers), drop=tuple(drop), must_wait=must_wait)


def _victim(running: list[Remaining]) -> Remaining | None:
    """The running group whose loss hurts least: one that may be dropped, was so least often, and began last."""
    return min(running, key=lambda g: (not g.droppable, g.drops, -g.lease_id), default=None)
