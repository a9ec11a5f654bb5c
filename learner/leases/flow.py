"""The way of leases and their groups through the learner, all of which the ledger says.

grant_all ─▶ env_services ─▶ accept ─▶ journal ─▶ ledger ─▶ buffer, until a batch takes them
    ▲                    └─▶ fail ─▶ granted again, or a dead letter
    └─────── forget ◀── expired, overdue, too old; their env_service has left
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from learner.journal.journal import DiskRoom, JournalFull, LoggedTeaching, RunLog
from learner.leases.dead_letters import DeadLetters, RunAborted
from learner.leases.env_services import ConnectedEnvService, EnvServices
from learner.leases.evaluation_leases import Evaluator
from learner.leases.filters import FilterReason, FilterRounds
from learner.leases.granting import Granting, LeaseTerms
from learner.leases.incarnations import Belongs, Incarnations, newest_of, oldest_of, up_to
from learner.leases.options import IntakeEvents, IntakeOptions
from learner.leases.partial_credit import CreditedGroup, credited_from
from learner.ledger import AttemptId, Batch, EndedAttempt, FailureResult, GroupVerdict, Ledger
from protocol.codec import Frame
from protocol.messages import FailedLease, LeaseGrant, RunningLease
from protocol.trajectories import TrajectoryGroup
from services.http.waiting import Waiting as Waits
from services.tracing import lease_began, lease_ended, lease_trace, span
from services.zmq.sockets import RouterSocket

logger = logging.getLogger(__name__)


class GroupFlow:
    """Moves groups through ledger, journal and buffer; the rest of the learner is told of it by `events`.

    `woken` is set, by `wake`, whenever a batch might be there that was not, or the run has failed with `failure`.
    """

    def __init__(
        self,
        *,
        socket: RouterSocket,
        ledger: Ledger,
        journal: RunLog,
        evaluator: Evaluator,
        terms: LeaseTerms,
        dead_letters: DeadLetters,
        waits: Waits,
        options: IntakeOptions,
        events: IntakeEvents,
        belongs: Belongs | None,
        clock: Callable[[], float],
    ) -> None:
        self.incarnations = Incarnations(
            ledger=ledger, incarnation=options.incarnation, belongs=belongs or up_to(ledger.next_version)
        )
        self.env_services = EnvServices(socket, on_the_wire=self.incarnations.on_the_wire, clock=clock)
        self.granting = Granting(
            ledger=ledger,
            evaluator=evaluator,
            terms=terms,
            incarnation=options.incarnation,
            clock=clock,
            pacing=options.pacing,
            make_curriculum=options.make_curriculum,
            make_draws=options.make_draws,
            make_turns=options.make_turns,
            teaching=options.rules.teaching,
        )
        self._rounds = FilterRounds(options.rules.filters, groups_per_step=ledger.config.groups_per_step)
        self.room = DiskRoom(waits=waits, clock=clock, failed=events.failed_write)
        self.buffer: dict[int, TrajectoryGroup] = {}
        self.used: dict[int, TrajectoryGroup] = {}
        """Groups that steps have trained and later ones may train again."""
        self.woken = asyncio.Event()
        self.failure: RunAborted | None = None
        self.evaluator = evaluator
        self._ledger = ledger
        self._journal = journal
        self._dead_letters = dead_letters
        self._options = options
        self._events = events
        self._clock = clock

    def wake(self) -> None:
        """There may be a batch."""
        self.woken.set()

    async def accept(self, group: TrajectoryGroup, frames: Sequence[Frame] | None) -> bool:
        """Takes a group in. False if the journal has no room for it: unacknowledged, it is sent again.

        `frames` are those that it came in, None if it was changed since. With on_lag = mask tokens of it that are too
        old leave the loss first; so it stands in the journal.
        """
        credited = self._credited(group)
        group, frames = credited.group, frames if credited.group is group else None
        lease_id, oldest_version = group.lease_id, oldest_of(group)
        reason = self._options.rules.filters.reason(group)
        trace = lease_trace(group.incarnation, lease_id)
        if self.incarnations.verdict(group, oldest_version=oldest_version) is GroupVerdict.ACCEPTED:
            try:
                with span("journal", parent=trace):
                    self._journal.append_group(group, frames=frames, filtered=reason is not None)
            except JournalFull as error:
                self.room.say(error)
                return False
        answer = self.incarnations.admit(group, oldest_version=oldest_version)
        if answer.verdict is GroupVerdict.ACCEPTED:
            self.granting.accepted(group)
            self.granting.diary.accepted(group)
            if credited.tokens:
                self._events.masked(credited.tokens, credited.trajectories)
        if answer.verdict is not GroupVerdict.ACCEPTED:
            self._events.left_out(answer.verdict.value)
        elif reason is not None:
            self._filter(group, reason)
            lease_ended(trace, left_out=reason.value)
        else:
            self.keep(group)
            self._events.accepted(group)
        await self.env_services.cancel(answer.cancelled)
        return True

    def _credited(self, group: TrajectoryGroup) -> CreditedGroup:
        if self._ledger.config.on_lag != "mask":
            return CreditedGroup(group)
        oldest, newest = oldest_of(group), newest_of(group)
        return credited_from(group, version=self._ledger.oldest_with_a_place(oldest, newest_version=newest))

    async def take(self, batch: Batch, *, asked_at: float) -> tuple[TrajectoryGroup, ...]:
        """The groups of a batch, which is in the journal, on disk, when they are returned; others take their places.
        Those that were trained before come last.
        """
        self.granting.batch_taken(asked_at=asked_at)
        self._rounds.batch_taken()
        self.forget(batch.dropped, why="too_old")
        groups = tuple(self.buffer.pop(lease_id) for lease_id in batch.lease_ids)
        reused = tuple(self.used[lease_id] for lease_id in batch.reused)
        self._keep_used(groups)
        written = partial(
            self._journal.append_batch, version=batch.version, lease_ids=batch.lease_ids, reused=batch.reused
        )
        await self.room.wait_for(written)
        for group in groups:
            lease_ended(lease_trace(group.incarnation, group.lease_id), at="batch", version=batch.version)
        await self.env_services.cancel(batch.dropped)
        await self.grant_all()
        return (*groups, *reused)

    async def taught(self, teaching: Sequence[LoggedTeaching]) -> None:
        """Notes what teachers said of a batch that is trained next."""
        await self.room.wait_for(partial(self._journal.append_teaching, teaching))

    def _keep_used(self, groups: Sequence[TrajectoryGroup]) -> None:
        known = {**self.used, **{group.lease_id: group for group in groups}}
        self.used = {lease_id: group for lease_id, group in known.items() if self._ledger.may_reuse(lease_id)}

    async def bound_lag(self, max_lag: int) -> None:
        """Bounds the lag of what is trained from here on. What that makes too old is dropped."""
        if max_lag == self._ledger.max_lag:
            return
        ended = self._ledger.bound_lag(max_lag)
        self.granting.bound_changed()
        self.forget(ended, why="too_old")
        await self.env_services.cancel(ended)

    def recall(self, groups: Sequence[TrajectoryGroup]) -> None:
        """Gives back groups that a generator took part in which is not believed any more; those that were trained are
        not trained again.
        """
        waiting = [group.lease_id for group in groups if group.lease_id in self.buffer]
        used = [group.lease_id for group in groups if group.lease_id in self.used]
        if waiting:
            logger.warning("%d groups are sampled again: a generator that served old weights took part", len(waiting))
            self.forget(self._ledger.recall(waiting), why="unproven")
        if used:
            logger.warning("%d groups are not trained again: a generator that served old weights took part", len(used))
            self._ledger.forget_reusable(used)
            self._keep_used(())

    def keep(self, group: TrajectoryGroup) -> None:
        """The group waits for its batch from here on."""
        self.buffer[group.lease_id] = group
        lease_began(lease_trace(group.incarnation, group.lease_id), at="batch")

    def _filter(self, group: TrajectoryGroup, reason: FilterReason) -> None:
        self._ledger.filter(lease_id=group.lease_id)
        self.granting.diary.forget(group.lease_id)
        self._events.left_out(reason.value)
        self._events.filtered(group, reason.value)
        failure = self._rounds.left_out(group, reason, buffered=self._ledger.books().buffered)
        self.failure = self.failure or failure
        self.wake()

    def fail(self, failed: FailedLease) -> None:
        """An attempt came to nothing."""
        result = self.incarnations.fail(failed, now=self._clock())
        if result is FailureResult.IGNORED:
            self._events.left_out("failed_late")
            return
        kind = "data" if failed.data_fault else "infrastructure"
        self._events.left_out(f"failed_{kind}")
        if result is not FailureResult.DEAD_LETTERED:
            return
        self._give_up(failed)

    def _give_up(self, failed: FailedLease) -> None:
        logger.warning("lease %d is given up: %s", failed.lease_id, failed.reason)
        lease_ended(lease_trace(failed.incarnation, failed.lease_id), left_out="dead_lettered")
        self.granting.diary.forget(failed.lease_id)
        task_index = self.granting.task_index(failed.lease_id)
        self._dead_letters.append(failed, task_index=task_index, version=self._ledger.version)
        self.failure = self.failure or self._dead_letters.verdict(self._ledger)
        self.wake()

    async def peer_left(self, holder: ConnectedEnvService, *, keeps: Sequence[RunningLease] = ()) -> None:
        """Passes on to others what an env_service held, but what its next process `keeps`."""
        self.env_services.part(holder)
        trained = set(filter(None, (self.incarnations.attempt_of(each) for each in keeps if each.purpose == "train")))
        self.forget(self._ledger.holder_gone(holder.name, keeps=trained), why="holder_gone")
        evaluated = {each.lease_id for each in keeps if each.purpose == "evaluate" and self.incarnations.is_ours(each)}
        self.evaluator.holder_gone(holder.name, keeps=evaluated)
        await self.grant_all()

    async def grant_all(self) -> None:
        """Grants whatever may be granted, to whoever has room."""
        for holder in self.env_services.with_room() if self.granting.may_grant() else ():
            environment = holder.agreed(self._options.environment).name
            leases = self.granting.leases_for(holder, environment=environment)
            if self.granting.room_of(holder, environment) <= 0:
                self.env_services.full(holder)
            if leases:
                await self.env_services.send(holder, LeaseGrant(leases=tuple(leases)))
                await asyncio.sleep(0)  # sending does not wait, and to grant a hundred thousand leases takes seconds
            elif not self.granting.may_grant():
                return

    def forget(self, ended: Iterable[EndedAttempt], *, why: str) -> None:
        """These attempts are over, and nobody is told."""
        ended = tuple(ended)
        self.env_services.release(ended)
        for attempt in ended:
            self._events.left_out(why)
            if attempt.holder is None and (group := self.buffer.pop(attempt.lease_id, None)) is not None:
                lease_ended(lease_trace(group.incarnation, group.lease_id), at="batch", left_out=why)
                self.granting.diary.forget(attempt.lease_id)
                self._events.forgotten(group, why)
            if attempt.given_up is not None:
                named = AttemptId(attempt.lease_id, attempt.attempt)
                self._give_up(self.incarnations.failed(named, attempt.given_up, data_fault=attempt.data_fault))
