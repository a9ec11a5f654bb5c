"""The rules of the ledger: what is granted, what is accepted, what a batch takes, and the bound on its lag."""

import heapq
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from itertools import chain

from learner.ledger.lease import (
    NOT_BLOCKED,
    AttemptOutcome,
    Blockage,
    BufferedGroup,
    LeaseEnd,
    LeaseTable,
    Remaining,
    RunningAttempt,
    blockage,
    last_without_a_place,
)
from learner.ledger.records import (
    AttemptId,
    Batch,
    BatchShortfall,
    Books,
    DeliveryAnswer,
    EndedAttempt,
    FailureKind,
    FailureResult,
    Grant,
    GroupVerdict,
    LedgerConfig,
    LedgerSnapshot,
    Straggler,
)
from learner.ledger.reuse import ReusableGroup, ReusableGroups

_LIVES_REMEMBERED = 64
"""For how many deaths of the learner in a row, each with all of its leases outstanding, their ids are believed."""

_REASONS_KEPT = 64
_REASON_CHARACTERS = 500
_NONE: Mapping[int, ReusableGroup] = {}


class Ledger:
    """Hands out leases and makes batches of which no group lags more than `max_lag` versions: that of the
    configuration, or less while `bound_lag` asks for less. Groups that were trained before have a bound of their own
    (`reused_lag`).

    Everything is judged by `next_version`, the version at which the next batch will be taken: the learner's own, or,
    while batches that were taken or replayed wait for the end of their step, the one that it will have then. So a group
    that arrives during a step is not accepted only to be too old when the step ends.
    """

    def __init__(self, config: LedgerConfig) -> None:
        self.config = config
        self._table = LeaseTable()
        self._reusable = ReusableGroups(config)
        self._max_lag = config.max_lag
        self._version = 0
        self._served: int | None = None
        self._reasons: Counter[str] = Counter()
        self._blocked_since: float | None = None
        self._sure: dict[int, BufferedGroup] = {}  # in the order in which they were named

    @property
    def version(self) -> int:
        """The learner's policy version."""
        return self._version

    @property
    def next_version(self) -> int:
        """The version at which the next batch will be taken."""
        return self._version + len(self._table.untrained)

    @property
    def max_lag(self) -> int:
        """The bound in use: in 0..config.max_lag."""
        return self._max_lag

    @property
    def reused_lag(self) -> int:
        """The bound in use for groups that are trained again. Whatever asks for less than the configured `max_lag` does
        so since data is too old: then it holds for them, too.
        """
        return self.config.reused_lag if self._max_lag == self.config.max_lag else self._max_lag

    def bound_lag(self, max_lag: int) -> tuple[EndedAttempt, ...]:
        """From here on no batch holds a group that lags more than `max_lag` versions; at first the configured bound.

        Returns what a lower bound makes too old, or leaves no place for: those leases are granted again. Too old are
        groups that the next batch would not admit, running or buffered; without a place, running ones that could not
        all be trained in time (those that were dropped too often stay, and are waited for). Raises ValueError for a
        bound above the configured one.
        """
        if not 0 <= max_lag <= self.config.max_lag:
            raise ValueError(
                f"the lag cannot be bounded by {max_lag}: the configuration's max_lag is {self.config.max_lag}; give a "
                f"bound from 0 to {self.config.max_lag}"
            )
        lowered, self._max_lag = max_lag < self._max_lag, max_lag
        if not lowered:
            return ()
        dropped = tuple(map(self._table.drop, self._too_old()))
        # As if a step had just been taken that left all of them behind: the next one has places for them too.
        crowded = self._blockage(self._table.buffered, after=self.next_version - 1)
        return dropped + tuple(self._table.drop(each) for each in crowded.drop if self._is_droppable(each))

    @property
    def served(self) -> int | None:
        """The oldest policy version that a serving generator holds; None if none serves."""
        return self._served

    def served_changed(self, served: int | None) -> None:
        """Tells the oldest policy version held by a serving generator, or None if none serves.

        Raises ValueError for a version that this learner has not made: a generator of a former life whose steps were
        lost holds another policy under that number.
        """
        if served is not None and not 0 <= served <= self.next_version:
            raise ValueError(
                f"a generator cannot serve policy version {served}: this learner knows versions 0 to "
                f"{self.next_version}; count a generator as serving only while it holds one of this learner's versions"
            )
        self._served = served

    def places(self) -> int:
        """Number of leases that may be granted now."""
        if self._served is None:
            return 0
        table, per_step = self._table, self.config.groups_per_step
        consumed = self.next_version * per_step  # so it counts from the moment at which a batch is taken
        limit = (self._served + self._max_lag + 1) * per_step
        return max(0, limit - consumed - len(table.buffered) - len(table.running))

    def grant(
        self,
        *,
        now: float,
        holder: str,
        room: int,
        admits: Callable[[int], bool] = lambda lease_id: True,
        new_below: float = math.inf,
    ) -> tuple[Grant, ...]:
        """Grants at most `room` leases to `holder`: those to be granted again by rising id, then new tasks.

        `admits` says of each that is next if it is granted, which it then is; one that is passed over stays pending.
        No new lease from `new_below` on is begun.
        """
        room = min(room, self.places())
        grants: list[Grant] = []
        passed: set[int] = set()
        while len(grants) < room and (lease_id := self._table.next_pending(now, new_below=new_below)) is not None:
            if admits(lease_id):
                grants.append(self._grant_one(lease_id, now=now, holder=holder))
            else:
                passed.add(self._table.pass_over())
        self._table.put_back(passed)
        return tuple(grants)

    def is_new(self, lease_id: int) -> bool:
        """True of a lease without an attempt."""
        lease = self._table.leases.get(lease_id)
        return lease_id >= self._table.cursor or (lease is not None and not lease.attempts)

    def _grant_one(self, lease_id: int, *, now: float, holder: str) -> Grant:
        assert self._served is not None
        version = self._served
        attempt = self._start(lease_id, now=now, holder=holder, version=version)
        deadline = self._table.running[lease_id].deadline
        return Grant(lease_id=lease_id, attempt=attempt, holder=holder, version=version, deadline=deadline)

    def _start(self, lease_id: int, *, now: float, holder: str, version: int) -> int:
        return self._table.start(
            lease_id,
            holder=holder,
            version=version,
            now=now,
            timeout_s=self.config.lease_timeout_s,
            longest_s=self.config.longest_attempt_s,
        )

    def heartbeat(
        self,
        *,
        now: float,
        holder: str,
        running: Mapping[tuple[int, int], int | None],
        excused: Collection[tuple[int, int]] = (),
        kept: Collection[tuple[int, int]] = (),
    ) -> tuple[AttemptId, ...]:
        """Extends the deadlines of the attempts that `holder` reports. Returns those that it should cancel.

        running: (lease id, attempt) -> the oldest version that any of the group's tokens was or will be sampled under,
            None if that is not known yet. An attempt is reported until its outcome is acknowledged; one that is not
            reported (its grant was lost, say) expires, or ends with a list that lacks it (`unlisted`).
        excused: those that wait for something that is not theirs: the time since they were last heard of is not counted
            against them, up to `longest_wait_s` in all, and neither is any in which no generator serves.
        kept: those that are finished and cannot be taken, which are excused without end.
        """
        unwanted: list[AttemptId] = []
        for (lease_id, attempt), oldest_version in running.items():
            known = self._table.running.get(lease_id)
            if known is None or (known.attempt, known.holder) != (attempt, holder):
                unwanted.append(AttemptId(lease_id, attempt))
                continue
            known.deadline = max(known.deadline, now + self.config.lease_timeout_s)
            since_s = max(0.0, now - known.heard_at)
            if (lease_id, attempt) in excused:
                known.waited_s += since_s
            if self._served is None or (lease_id, attempt) in excused or (lease_id, attempt) in kept:
                known.overdue_at += since_s
            known.heard_at = now
            if oldest_version is not None:
                known.version = max(known.version, oldest_version)
        return tuple(unwanted)

    def runs(self, attempt: AttemptId) -> bool:
        """True if the attempt is at its holder."""
        running = self._table.running.get(attempt.lease_id)
        return running is not None and running.attempt == attempt.attempt

    def would_accept(self, *, lease_id: int, attempt: int, oldest_version: int) -> GroupVerdict:
        """The verdict that `accept` would give; changes nothing, so that the journal can be written in between."""
        if not self._was_granted(lease_id, attempt):
            return GroupVerdict.UNKNOWN
        if not self._is_wanted(lease_id):
            return GroupVerdict.DUPLICATE
        if self._is_admissible(oldest_version):
            return GroupVerdict.ACCEPTED
        running = self._table.running.get(lease_id)
        return GroupVerdict.STALE if running is not None and running.attempt == attempt else GroupVerdict.LATE

    def accept(
        self, *, lease_id: int, attempt: int, oldest_version: int, size: int, worth: float = 0.0
    ) -> DeliveryAnswer:
        """Takes a finished group into the buffer if its lease wants it. The first admissible attempt wins.

        oldest_version: of all the group's tokens, as stamped by the engine.
        size: the caller's measure of the group (tokens, say), handed back if the group is dropped.
        worth: by which it is drawn to be trained again, with the priority `advantage`.
        """
        verdict = self.would_accept(lease_id=lease_id, attempt=attempt, oldest_version=oldest_version)
        if verdict is GroupVerdict.ACCEPTED:
            group = BufferedGroup(attempt=attempt, version=oldest_version, size=size, worth=worth)
            return DeliveryAnswer(verdict=verdict, cancelled=self._table.buffer(lease_id, group))
        if verdict is GroupVerdict.STALE:
            self._table.drop(lease_id)
        return DeliveryAnswer(verdict=verdict)

    def filter(self, *, lease_id: int, attempt: int | None = None) -> tuple[EndedAttempt, ...]:
        """Closes a lease whose group teaches nothing: the buffered one, or, if `attempt` is given, one just arrived.

        Its place is given back. Returns the running attempt (none or one) that this makes needless. Raises ValueError
        if there can be no such group: `would_accept` tells for one that has just arrived.
        """
        cancelled: tuple[EndedAttempt, ...] = ()
        if attempt is not None and self._is_wanted(lease_id) and self._was_granted(lease_id, attempt):
            arrived = BufferedGroup(attempt=attempt, version=self.next_version, size=0)
            cancelled = self._table.buffer(lease_id, arrived)
        elif attempt is not None or lease_id not in self._table.buffered:
            raise ValueError(f"lease {lease_id} (attempt {attempt}) has no group that could be filtered")
        self._table.close(lease_id, LeaseEnd.FILTERED)
        return cancelled

    def recall(self, lease_ids: Iterable[int]) -> tuple[EndedAttempt, ...]:
        """Gives back buffered groups that must not be trained after all: their leases will be granted again."""
        return tuple(self._table.drop(lease_id) for lease_id in lease_ids if lease_id in self._table.buffered)

    def _was_granted(self, lease_id: int, attempt: int) -> bool:
        """A closed lease's attempts are forgotten, so that any number passes for them."""
        lease = self._table.leases.get(lease_id)
        return 0 <= lease_id < self._table.cursor and (lease is None or 0 <= attempt < len(lease.attempts))

    def _is_wanted(self, lease_id: int) -> bool:
        return lease_id in self._table.running or lease_id in self._table.pending

    def _may_be_of_a_former_life(self, lease_id: int) -> bool:
        """A former life had no more leases outstanding than the configured bound allows, and all others are known from
        disk; an id far beyond is garbage, which must not open millions of leases.
        """
        outstanding = (self.config.max_lag + 1) * self.config.groups_per_step
        return 0 <= lease_id < self._table.cursor + _LIVES_REMEMBERED * outstanding

    def oldest_with_a_place(self, oldest_version: int, *, newest_version: int | None = None) -> int:
        """The oldest version that the trained tokens of a group may have which comes in now, so that there is a place
        for it in one of the next batches, whatever else waits for them: with on_lag = mask older ones are to leave the
        loss before the group is offered. Otherwise `oldest_version`, which is that of all its tokens. If there is no
        place up to its `newest_version`, the oldest version that may be trained: a younger group will have none then.
        """
        if self.config.on_lag != "mask":
            return oldest_version
        first = max(oldest_version, self.next_version - self._max_lag)
        versions = [group.version for group in self._table.buffered.values()]
        newest = self.next_version if newest_version is None else min(newest_version, self.next_version)
        for version in range(first, newest + 1):
            if self._has_places([*versions, version]):
                return version
        return first

    def _has_places(self, versions: Collection[int]) -> bool:
        """True if groups of these versions can all be trained in time, by the next batch and those after it."""
        newest = last_without_a_place(
            versions,
            version=self.next_version - 1,
            max_lag=self._max_lag,
            groups_per_step=self.config.groups_per_step,
        )
        return newest is None

    def _is_admissible(self, oldest_version: int) -> bool:
        return 0 <= self.next_version - oldest_version <= self._max_lag

    def fail(self, *, now: float, lease_id: int, attempt: int, kind: FailureKind, reason: str) -> FailureResult:
        """Ends a running attempt that failed: its lease is granted again, or dead-lettered once its budget is spent."""
        running = self._table.running.get(lease_id)
        if running is None or running.attempt != attempt:
            return FailureResult.IGNORED
        failures = self._table.leases[lease_id].failures
        failures[kind] += 1
        infrastructure = kind == "infrastructure"
        backoff_s = self._backoff_s(failures[kind]) if infrastructure else 0.0
        self._table.stop(lease_id, AttemptOutcome.FAILED, not_before=now + backoff_s)
        if failures[kind] <= (self.config.infrastructure_retries if infrastructure else self.config.data_retries):
            return FailureResult.RETRIED
        self._table.close(lease_id, LeaseEnd.DEAD_LETTERED)
        self._note(f"{kind}: {reason}")
        return FailureResult.DEAD_LETTERED

    def _backoff_s(self, failures: int) -> float:
        doublings = min(failures - 1, 30)  # far beyond any useful pause, and short of overflow
        return min(self.config.infrastructure_backoff_max_s, self.config.infrastructure_backoff_s * 2.0**doublings)

    def commonest_reasons(self, count: int) -> tuple[tuple[str, int], ...]:
        """The reasons of leases that were given up, as ("kind: reason", how often at least), the commonest first."""
        return tuple(self._reasons.most_common(count))

    def _note(self, reason: str) -> None:
        """Counts a reason. Of more kinds than there is place for, the commonest stay (Misra and Gries, 1982)."""
        reason = reason[:_REASON_CHARACTERS]
        if reason in self._reasons or len(self._reasons) < _REASONS_KEPT:
            self._reasons[reason] += 1
        else:
            self._reasons = Counter({each: count - 1 for each, count in self._reasons.items() if count > 1})

    def expire(self, *, now: float) -> tuple[EndedAttempt, ...]:
        """Ends the attempts whose deadline has passed; their leases will be granted again, but not for ever."""
        silent = [lease_id for lease_id, running in self._table.running.items() if running.deadline <= now]
        return tuple(map(self._expire, silent))

    def stood_still(self, seconds: float) -> None:
        """The caller itself did nothing for so long: no silence of a holder counts from that time."""
        for running in self._table.running.values():
            running.deadline += seconds
            running.heard_at += seconds
            running.overdue_at += seconds

    def overdue(self, *, now: float) -> tuple[EndedAttempt, ...]:
        """Ends the attempts that take too long, however alive: each counts as a failure of its lease's data, and of
        infrastructure if it was excused for too long.
        """
        longest_s, running = self.config.longest_wait_s, self._table.running.items()
        late = [lease_id for lease_id, one in running if one.overdue_at <= now or one.waited_s > longest_s]
        return tuple(self._end_overdue(lease_id, now) for lease_id in late)

    def _end_overdue(self, lease_id: int, now: float) -> EndedAttempt:
        running = self._table.running[lease_id]
        kind: FailureKind = "data" if running.overdue_at <= now else "infrastructure"
        who = f"env_service {running.holder}"
        reason = f"not finished within {self.config.longest_attempt_s:g} s, though {who} says that it is at work"
        if kind == "infrastructure":
            longest_s = self.config.longest_wait_s
            reason = f"waited for rewards, its environment's host, or a place, for more than {longest_s:g} s at {who}"
        ended = EndedAttempt(
            lease_id=lease_id, attempt=running.attempt, holder=running.holder, size=None, data_fault=kind == "data"
        )
        result = self.fail(now=now, lease_id=lease_id, attempt=running.attempt, kind=kind, reason=reason)
        return replace(ended, given_up=reason) if result is FailureResult.DEAD_LETTERED else ended

    def unlisted(
        self, *, now: float, holder: str, running: Collection[tuple[int, int]], since_s: float
    ) -> tuple[EndedAttempt, ...]:
        """Ends the attempts of a holder that has listed all that it runs, as (lease id, attempt), and not them, as if
        they had expired: their grants were lost on the way. Those granted or heard of within `since_s` seconds may
        still be on theirs.
        """
        lost = [
            lease_id
            for lease_id, one in self._table.running.items()
            if one.holder == holder and one.heard_at < now - since_s and (lease_id, one.attempt) not in running
        ]
        return tuple(map(self._expire, lost))

    def holder_gone(self, holder: str, *, keeps: Collection[tuple[int, int]] = ()) -> tuple[EndedAttempt, ...]:
        """Ends all attempts of a holder that is known to be gone, as if they had expired, but those that its next
        process `keeps`, as (lease id, attempt): they have their deadline.
        """
        held = [
            lease_id
            for lease_id, running in self._table.running.items()
            if running.holder == holder and (lease_id, running.attempt) not in keeps
        ]
        return tuple(map(self._expire, held))

    def _expire(self, lease_id: int) -> EndedAttempt:
        """A task that takes its holder down each time must not come back for ever."""
        lease = self._table.leases[lease_id]
        lease.expiries += 1
        ended = self._table.stop(lease_id, AttemptOutcome.EXPIRED)
        if lease.expiries <= self.config.infrastructure_retries:
            return ended
        self._table.close(lease_id, LeaseEnd.DEAD_LETTERED)
        reason = f"{lease.expiries} attempts ended with the silence or the end of their env_service"
        self._note(f"infrastructure: {reason}")
        return replace(ended, given_up=reason)

    def sure(self) -> tuple[int, ...]:
        """Leases whose buffered groups are in the next batch, whatever else comes: those named before first, unless
        they were given back since. `take` begins with them, in this order.

        A group is, if there are places for all that would go before it, running ones too. So nothing is taken because
        it was completed early that would not have been taken otherwise, but where a lease that goes before is granted
        again after that.
        """
        table = self._table
        self._sure = self._still_sure()
        others = {each: running.version for each, running in table.running.items()}
        others |= {each: group.version for each, group in table.buffered.items() if each not in self._sure}
        places = self.config.groups_per_step - len(self._sure)
        first = heapq.nsmallest(places, others, key=lambda lease_id: (others[lease_id], lease_id))
        self._sure |= {lease_id: table.buffered[lease_id] for lease_id in first if lease_id in table.buffered}
        return tuple(self._sure)

    def _still_sure(self) -> dict[int, BufferedGroup]:
        """The named groups that are buffered yet. Another one of the same lease came later, and has no place by it."""
        buffered = self._table.buffered
        return {lease_id: group for lease_id, group in self._sure.items() if buffered.get(lease_id) is group}

    def take(self, *, now: float) -> Batch | BatchShortfall:
        """The next batch, or why there is none yet. Only between steps: after `trained` has told the last one's end.

        Groups are taken by rising oldest version, then by lease id: those that another step would make too old come
        first, and the order in which groups were completed plays no part. Before all of them go those that `sure` has
        named.
        """
        assert not self._table.untrained, "a batch was asked for before the step of the last one had ended"
        need = self.config.groups_per_step
        buffered = self._table.buffered
        if len(buffered) < need:
            self._blocked_since = None
            return BatchShortfall(have=len(buffered), need=need)
        sure = self._still_sure()
        others = (lease_id for lease_id in buffered if lease_id not in sure)
        ready = [*sure, *sorted(others, key=lambda lease_id: (buffered[lease_id].version, lease_id))]
        blocked = self._blockage(ready[need:], after=self._version)
        if self._must_wait(blocked, now):
            stragglers = tuple(self._straggler(lease_id) for lease_id in blocked.stragglers)
            since, must_wait = self._blocked_since, blocked.must_wait
            return BatchShortfall(have=len(ready), need=need, stragglers=stragglers, since=since, must_wait=must_wait)
        self._blocked_since = None
        return self._take(tuple(ready[:need]), drop=blocked.drop)

    def _blockage(self, left: Collection[int], *, after: int) -> Blockage:
        """The leases that cannot be trained in time by the steps after version `after`, of the groups `left` and
        those running.
        """
        table, bound = self._table, {"max_lag": self._max_lag, "groups_per_step": self.config.groups_per_step}
        awaited = self._awaited()
        versions = chain(
            (table.buffered[lease_id].version for lease_id in left),
            (running.version for running in awaited.values()),
        )
        newest = last_without_a_place(versions, version=after, **bound)
        if newest is None:
            return NOT_BLOCKED
        remaining = [
            Remaining(version=table.buffered[lease_id].version, lease_id=lease_id)
            for lease_id in left
            if table.buffered[lease_id].version <= newest
        ]
        for lease_id, running in awaited.items():
            if running.version <= newest:
                drops, droppable = table.leases[lease_id].drops, self._is_droppable(lease_id)
                remaining.append(
                    Remaining(
                        version=running.version, lease_id=lease_id, running=True, drops=drops, droppable=droppable
                    )
                )
        return blockage(remaining, version=after, **bound)

    def _awaited(self) -> Mapping[int, RunningAttempt]:
        """The running attempts that a step may not leave behind to grow too old: all, unless their old tokens would
        only leave the loss. One that came too late for that, time and again, is awaited like any other.
        """
        running = self._table.running
        if self.config.on_lag != "mask":
            return running
        return {lease_id: one for lease_id, one in running.items() if not self._is_droppable(lease_id)}

    def _is_droppable(self, lease_id: int) -> bool:
        return self._table.leases[lease_id].drops < self.config.max_drops_per_lease

    def _too_old(self) -> list[int]:
        """The running and buffered groups that the next batch would not admit."""
        running, buffered = self._awaited(), self._table.buffered
        versions = {each: running[each].version for each in running} | {
            each: buffered[each].version for each in buffered
        }
        return [lease_id for lease_id, version in versions.items() if not self._is_admissible(version)]

    def _must_wait(self, blocked: Blockage, now: float) -> bool:
        if not blocked.stragglers:
            return False
        if self._blocked_since is None:
            self._blocked_since = now
        patient = self.config.on_lag == "wait" and now - self._blocked_since < self.config.straggler_timeout_s
        return patient or blocked.must_wait

    def _straggler(self, lease_id: int) -> Straggler:
        running = self._table.running[lease_id]
        return Straggler(lease_id=lease_id, attempt=running.attempt, holder=running.holder, version=running.version)

    def _take(self, lease_ids: tuple[int, ...], *, drop: tuple[int, ...]) -> Batch:
        version, table = self._version, self._table
        lags = tuple(version - table.buffered[lease_id].version for lease_id in lease_ids)
        reused = self._reusable.draw(version=version, max_lag=self.reused_lag)
        reused_lags = tuple(version - self._reusable.groups[lease_id].version for lease_id in reused)
        assert all(0 <= lag <= self._max_lag for lag in lags), (version, lease_ids, lags)
        assert all(0 <= lag <= self.reused_lag for lag in reused_lags), (version, reused, reused_lags)
        self._sure = {}
        self._reusable.taken({each: self._seen_in(table.buffered[each]) for each in lease_ids}, reused=reused)
        table.take(lease_ids)
        too_old = [lease_id for lease_id, group in table.buffered.items() if not self._is_admissible(group.version)]
        dropped = tuple(table.drop(lease_id) for lease_id in (*drop, *too_old))
        return Batch(
            version=version,
            lease_ids=lease_ids,
            lags=lags,
            dropped=dropped,
            reused=reused,
            reused_lags=reused_lags,
        )

    @staticmethod
    def _seen_in(group: BufferedGroup) -> ReusableGroup:
        return ReusableGroup(version=group.version, worth=group.worth)

    def trained(self, version: int) -> None:
        """The oldest batch that was taken or replayed has been trained, which made `version`."""
        assert self._table.untrained, "no batch is in training"
        assert version == self._version + 1, (version, self._version)
        self._table.close_trained()
        self._version = version
        self._reusable.trained(version)

    @property
    def reusable(self) -> Mapping[int, ReusableGroup]:
        """By lease id the groups that later steps may train again, as they are at the present version."""
        return self._reusable.groups

    def may_reuse(self, lease_id: int) -> bool:
        """True for a group that a later step may train again, or that is in training for the first time."""
        return lease_id in self._reusable

    def forget_reusable(self, lease_ids: Iterable[int]) -> None:
        """Groups that must not be trained again, whatever was made of them before."""
        self._reusable.forget(lease_ids)

    def books(self) -> Books:
        """The counts of everything; `Books.check` asserts that they balance."""
        return self._table.books(reused=self._reusable.reuses_taken)

    def snapshot(self) -> LedgerSnapshot:
        """State for a checkpoint of the present version. A batch in training is not part of it: its log is."""
        return self._table.snapshot(version=self._version, reasons=dict(self._reasons), reused=self._reusable.reuses)

    @classmethod
    def restore(
        cls, config: LedgerConfig, snapshot: LedgerSnapshot, *, reusable: Mapping[int, ReusableGroup] = _NONE
    ) -> "Ledger":
        """The ledger of a learner that resumes from a checkpoint, with the groups that were `reusable` then. No
        generator serves yet.

        The caller then replays, in this order, the logged batches since the checkpoint, the logged decisions, and the
        journaled groups. Attempt numbers begin again where the snapshot left them, so that two lives may give the same
        number: the caller tells attempts of different lives apart by the learner's incarnation.
        """
        ledger = cls(config)
        ledger._table = LeaseTable.restored(snapshot)
        ledger._version = snapshot.version
        ledger._reasons.update(dict(Counter(snapshot.reasons).most_common(_REASONS_KEPT)))
        ledger._reusable.restore(reusable, reuses=snapshot.reused, version=snapshot.version)
        return ledger

    def replay(
        self,
        lease_ids: tuple[int, ...],
        *,
        groups: Mapping[int, ReusableGroup] = _NONE,
        reused: tuple[int, ...] = (),
    ) -> None:
        """Consumes a batch that a former life logged; it is trained next, in the order of the calls.

        `groups` tells of those that may be trained again later, by lease id; `reused` are the leases that it trained
        once more.

        Leases up to the highest of its ids that are not known become pending. Raises ValueError if one of the leases
        is closed or consumed already: the log does not belong to this checkpoint.
        """
        in_use = self._table.running or self._table.buffered
        assert not in_use, "logged batches are replayed before anything is granted or readmitted"
        self._table.open_up_to(max(lease_ids, default=-1) + 1)
        known = [lease_id for lease_id in lease_ids if lease_id in self._table.pending]
        if len(set(known)) != len(lease_ids):
            raise ValueError(
                f"the logged batch {lease_ids} names a lease twice, or one that was trained or given up before; "
                "resume from the checkpoint that the log follows, or without the log"
            )
        for lease_id in lease_ids:
            attempt = self._table.newest_attempt(lease_id)
            self._table.buffer(lease_id, BufferedGroup(attempt=attempt, version=self.next_version, size=0))
        self._table.take(lease_ids)
        self._reusable.taken(groups, reused=reused)

    def replay_filtered(self, lease_ids: Iterable[int]) -> None:
        """Closes leases that a former life filtered; those that are closed already stay as they are."""
        for lease_id in self._replayable(lease_ids):
            attempt = self._table.newest_attempt(lease_id)
            self._table.buffer(lease_id, BufferedGroup(attempt=attempt, version=self.next_version, size=0))
            self._table.close(lease_id, LeaseEnd.FILTERED)

    def replay_dead_lettered(self, lease_ids: Iterable[int]) -> None:
        """Closes leases that a former life dead-lettered; those that are closed already stay as they are."""
        for lease_id in self._replayable(lease_ids):
            self._table.close(lease_id, LeaseEnd.DEAD_LETTERED)

    def _replayable(self, lease_ids: Iterable[int]) -> list[int]:
        lease_ids = list(lease_ids)
        self._table.open_up_to(max(lease_ids, default=-1) + 1)
        return [lease_id for lease_id in lease_ids if lease_id in self._table.pending]

    def adopt(self, *, now: float, lease_id: int, holder: str, version: int | None) -> int | None:
        """Notes that `holder` still runs an attempt that a former life granted, so that the work is not done twice.

        version: as in `heartbeat`; one that is not known yet is taken for the oldest that may still be trained.
        With on_lag = mask one with older tokens is adopted: they will leave the loss. Returns the attempt's number in
        this life, or None if nobody wants it: its lease has a group, runs elsewhere or is closed, the group would be
        too old, or no former life can have granted it. Adopting asks for no place.
        """
        oldest = max(0, self.next_version - self._max_lag)
        if version is None or self.config.on_lag == "mask":
            version = max(oldest, version or 0)
        if not self._may_be_of_a_former_life(lease_id) or not self._is_admissible(version):
            return None
        self._table.open_up_to(lease_id + 1)
        if lease_id not in self._table.pending:
            return None
        return self._start(lease_id, now=now, holder=holder, version=version)

    def revive(self, *, now: float, lease_id: int, attempt: int, holder: str, version: int | None) -> int | None:
        """Notes that `holder` goes on with an attempt that this life granted it and that has expired, as an env_service
        does that was away for long. Returns what `adopt` does; None, too, for an attempt that ended otherwise.
        """
        lease = self._table.leases.get(lease_id)
        ends = () if lease is None else lease.attempts[attempt : attempt + 1]
        if list(ends) != [AttemptOutcome.EXPIRED]:
            return None
        return self.adopt(now=now, lease_id=lease_id, holder=holder, version=version)

    def would_readmit(self, *, lease_id: int, oldest_version: int) -> GroupVerdict:
        """The verdict that `readmit` would give; changes nothing, so that the journal can be written in between."""
        if not self._may_be_of_a_former_life(lease_id):
            return GroupVerdict.UNKNOWN
        if lease_id < self._table.cursor and not self._is_wanted(lease_id):
            return GroupVerdict.DUPLICATE
        return GroupVerdict.ACCEPTED if self._is_admissible(oldest_version) else GroupVerdict.LATE

    def readmit(self, *, lease_id: int, oldest_version: int, size: int, worth: float = 0.0) -> DeliveryAnswer:
        """Accepts a group that an attempt of a former life made: from the journal, or from a holder that lived on.

        It counts in the place of the lease's newest attempt, which is cancelled if it runs. The caller lets in only
        groups whose versions belong to this learner's history (none newer than where a damaged batch log ends). Leases
        up to `lease_id` that are not known become pending.
        """
        verdict = self.would_readmit(lease_id=lease_id, oldest_version=oldest_version)
        if verdict is not GroupVerdict.UNKNOWN:
            self._table.open_up_to(lease_id + 1)
        if verdict is not GroupVerdict.ACCEPTED:
            return DeliveryAnswer(verdict=verdict)
        running = self._table.running.get(lease_id)
        ended: tuple[EndedAttempt, ...] = ()
        if running is not None:
            ended = (self._table.stop(lease_id, AttemptOutcome.DROPPED),)
        attempt = self._table.newest_attempt(lease_id)
        group = BufferedGroup(attempt=attempt, version=oldest_version, size=size, worth=worth)
        self._table.buffer(lease_id, group)
        return DeliveryAnswer(verdict=GroupVerdict.ACCEPTED, cancelled=ended)
