"""What becomes of leases and their groups, all of which the ledger says.

grant_all ─▶ env_services ─▶ accept ─▶ journal ─▶ ledger ─▶ buffer, until a batch takes them
    ▲                    └─▶ fail ─▶ granted again, or a dead letter
    └─────── forget ◀── expired, overdue, too old; their env_service has left
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from learner.journal.journal import JournalFull, RunLog
from learner.leases.admission import FilterReason, FilterRounds, GroupRules
from learner.leases.dead_letters import DeadLetters, DiskRoom, RunFailed
from learner.leases.env_services import EnvServices, Peer
from learner.leases.evaluation_leases import Evaluator
from learner.leases.granting import Granting, LeaseTerms, PacingRule
from learner.leases.incarnations import Belongs, Incarnations, up_to
from learner.ledger import AttemptId, EndedAttempt, FailureResult, Ledger, Verdict
from protocol.codec import Frame
from protocol.messages import Failed, Granted
from protocol.trajectories import TrajectoryGroup
from services.http.waiting import Waiting as Waits
from services.zmq.sockets import RouterSocket

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class IntakeOptions:
    """`environment` may be left out where only one is offered; the fingerprints are the learner's own.

    `run` is the same at every start of one run, and another for every run.
    """

    run: str
    incarnation: int
    environment: str | None
    heartbeat_every_s: float
    lease_timeout_s: float
    tokenizer: str
    chat_template: str
    rules: GroupRules
    pacing: PacingRule = "demand"


class GroupFlow:
    """Moves groups through ledger, journal and buffer; what the intake's docstring says of the callbacks holds here.

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
        left_out: Callable[[str], None],
        accepted: Callable[[TrajectoryGroup], None],
        forgotten: Callable[[TrajectoryGroup], None],
        belongs: Belongs | None,
        clock: Callable[[], float],
    ) -> None:
        self.incarnations = Incarnations(
            ledger=ledger, incarnation=options.incarnation, belongs=belongs or up_to(ledger.next_version)
        )
        self.env_services = EnvServices(socket, on_the_wire=self.incarnations.on_the_wire)
        self.granting = Granting(
            ledger=ledger,
            evaluator=evaluator,
            terms=terms,
            incarnation=options.incarnation,
            clock=clock,
            pacing=options.pacing,
        )
        self.rounds = FilterRounds(options.rules.filters, groups_per_step=ledger.config.groups_per_step)
        self.room = DiskRoom(waits=waits, clock=clock)
        self.buffer: dict[int, TrajectoryGroup] = {}
        self.woken = asyncio.Event()
        self.failure: RunFailed | None = None
        self.evaluator = evaluator
        self._ledger = ledger
        self._journal = journal
        self._dead_letters = dead_letters
        self._options = options
        self._left_out = left_out
        self._accepted = accepted
        self._forgotten = forgotten
        self._clock = clock

    def wake(self) -> None:
        """There may be a batch."""
        self.woken.set()

    async def accept(self, group: TrajectoryGroup, frames: Sequence[Frame] | None) -> bool:
        """Takes a group in. False if the journal has no room for it: unacknowledged, it is sent again.

        `frames` are those that it came in, None if it was changed since.
        """
        lease_id = group.lease_id
        reason = self._options.rules.filters.reason(group)
        if self.incarnations.verdict(group) is Verdict.ACCEPTED:
            try:
                self._journal.append_group(group, frames=frames)
                if reason is not None:
                    self._journal.append_filtered(lease_id)
            except JournalFull as error:
                self.room.say(error)
                return False
        answer = self.incarnations.admit(group)
        if answer.verdict is not Verdict.ACCEPTED:
            self._left_out(answer.verdict.value)
        elif reason is not None:
            self._filter(group, reason)
        else:
            self.buffer[lease_id] = group
            self._accepted(group)
        await self.env_services.cancel(answer.cancelled)
        return True

    def _filter(self, group: TrajectoryGroup, reason: FilterReason) -> None:
        self._ledger.filter(lease_id=group.lease_id)
        self._left_out(reason.value)
        failure = self.rounds.left_out(group, reason, buffered=self._ledger.books().buffered)
        self.failure = self.failure or failure
        self.wake()

    def fail(self, failed: Failed) -> None:
        """An attempt came to nothing."""
        result = self.incarnations.fail(failed, now=self._clock())
        if result is FailureResult.IGNORED:
            self._left_out("failed_late")
            return
        kind = "data" if failed.data_fault else "infrastructure"
        self._left_out(f"failed_{kind}")
        if result is not FailureResult.DEAD_LETTERED:
            return
        self._give_up(failed)

    def _give_up(self, failed: Failed) -> None:
        log.warning("lease %d is given up: %s", failed.lease_id, failed.reason)
        assert self.granting.order is not None, "nothing was granted yet"
        task_index = self.granting.order.task_index(failed.lease_id)
        self._dead_letters.append(failed, task_index=task_index, version=self._ledger.version)
        self.failure = self.failure or self._dead_letters.verdict(self._ledger)
        self.wake()

    async def peer_left(self, holder: Peer) -> None:
        """What an env_service held goes to others."""
        self.env_services.part(holder)
        self.forget(self._ledger.holder_gone(holder.name), why="holder_gone")
        self.evaluator.holder_gone(holder.name)
        await self.grant_all()

    async def grant_all(self) -> None:
        """Grants whatever may be granted, to whoever has room."""
        for holder in self.env_services:
            if not self.env_services.has(holder):
                continue  # it left, or moved, while another one's grant was sent
            leases = self.granting.leases_for(holder, environment=holder.agreed(self._options.environment).name)
            if leases:
                await self.env_services.send(holder, Granted(leases=tuple(leases)))

    def forget(self, ended: Iterable[EndedAttempt], *, why: str) -> None:
        """These attempts are over, and nobody is told."""
        ended = tuple(ended)
        self.env_services.release(AttemptId(attempt.lease_id, attempt.attempt) for attempt in ended)
        for attempt in ended:
            self._left_out(why)
            if attempt.holder is None and (group := self.buffer.pop(attempt.lease_id, None)) is not None:
                self._forgotten(group)
            if attempt.given_up is not None:
                named = AttemptId(attempt.lease_id, attempt.attempt)
                self._give_up(self.incarnations.failed(named, attempt.given_up, data_fault=attempt.data_fault))
