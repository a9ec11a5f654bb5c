"""The intake: batches to the trainer, while leases go out and groups come in.

    env_service ──messages──▶ Conversation ──▶ GroupFlow ──take()──▶ trainer thread

Loops, and what each waits for: `receive` for a message of an env_service; `tick` for the clock, to expire leases and
retry those that failed. `take` waits to be woken, as every arrival does. All run in one event loop, which owns the
ledger; the trainer's calls come from another thread, through `asyncio.run_coroutine_threadsafe`.
"""

import asyncio
import logging
import operator
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain

from learner.evaluation.results import Evaluation
from learner.journal.journal import JournalFull, LoggedTeaching, RunLog
from learner.leases.conversation import MISSED_HEARTBEATS, EnvServiceConversation
from learner.leases.dead_letters import DeadLetters
from learner.leases.env_services import ConnectedEnvService
from learner.leases.evaluation_leases import Evaluator
from learner.leases.flow import GroupFlow
from learner.leases.granting import LeaseTerms
from learner.leases.incarnations import Belongs, oldest_of, tokens_of
from learner.leases.lease_times import LeaseTimes
from learner.leases.options import IntakeEvents, IntakeOptions
from learner.leases.task_draws import DrawnTasks
from learner.leases.worth import worth_of
from learner.ledger import (
    Batch,
    BatchShortfall,
    Books,
    GroupVerdict,
    Ledger,
    LedgerSnapshot,
)
from learner.weights.fleet import FleetMembers
from protocol.messages import Goodbye, StatusNote
from protocol.trajectories import TrajectoryGroup
from services.http.waiting import QUIET_S
from services.http.waiting import Waiting as Waits
from services.zmq.sockets import RouterSocket

logger = logging.getLogger(__name__)

_TICK_S = 0.5
_FEW_GROUPS = (
    "they are sampled and judged more slowly than they are trained; if none comes, `headway doctor RUN.toml` says who "
    "is stuck, and the env-service's log whom its rollouts wait for"
)
_TOO_OLD = 'learner.lag.on_lag = "drop" would go on without it'
_DROPPED_OFTEN = (
    "a lease that was dropped learner.lag.max_drops_per_lease times is waited for, leases.longest_attempt_s at most"
)
_NO_ENV_SERVICE = "start one whose env-service.learner is learner.leases.address here, and see its log"
_EVALUATION = "its completions are sampled and judged; fewer learner.evaluation.tasks or samples take less time"


@dataclass(frozen=True)
class TakenBatch:
    """A step's groups in training order, and each group's lag; of one that is not read from the log, their times.

    The last `reused` groups were trained before, and are trained once more; there are no times of them.
    """

    version: int
    groups: tuple[TrajectoryGroup, ...]
    lags: tuple[int, ...]
    times: tuple[LeaseTimes, ...] = ()
    reused: int = 0

    @property
    def fresh(self) -> tuple[TrajectoryGroup, ...]:
        """The groups that are trained for the first time."""
        return self.groups[: len(self.groups) - self.reused]

    @property
    def reused_groups(self) -> tuple[TrajectoryGroup, ...]:
        """The groups that were trained before."""
        return self.groups[len(self.groups) - self.reused :]

    def bound(self, max_lag: int) -> int:
        """The bound on the lag of a batch of the log: that of its time, which a resume may have lowered since."""
        return max((max_lag, *self.lags[: len(self.fresh)]))

    def bound_of_reused(self, max_lag: int) -> int:
        """The same for its groups that were trained before."""
        return max((max_lag, *self.lags[len(self.fresh) :]))


@dataclass(frozen=True)
class NewestGroups:
    """Groups of the newest version, in the order in which their leases were granted. `why`: no more are there."""

    groups: tuple[TrajectoryGroup, ...]
    why: str


@dataclass(frozen=True)
class BegunBatch:
    """The first groups of a batch that is not complete, in training order: they are in it, unless they are withdrawn,
    as where their generator turns out to have served old weights.
    """

    groups: tuple[TrajectoryGroup, ...] = ()

    def is_same(self, other: "BegunBatch") -> bool:
        """True if it has the very same groups, and not others of the same leases."""
        return len(self.groups) == len(other.groups) and all(map(operator.is_, self.groups, other.groups))


class EndedEarly(Exception):
    """A wait that was cut off, since the run is to end."""


class Intake:
    """The source of the trainer's batches, and the loops beside it.

    `belongs` judges versions of former lives; without it, all count up to the version at which this life resumes.
    """

    def __init__(
        self,
        *,
        socket: RouterSocket,
        ledger: Ledger,
        journal: RunLog,
        fleet: FleetMembers,
        evaluator: Evaluator,
        terms: LeaseTerms,
        dead_letters: DeadLetters,
        waits: Waits,
        options: IntakeOptions,
        events: IntakeEvents,
        belongs: Belongs | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._flow = GroupFlow(
            socket=socket,
            ledger=ledger,
            journal=journal,
            evaluator=evaluator,
            terms=terms,
            dead_letters=dead_letters,
            waits=waits,
            options=options,
            events=events,
            belongs=belongs,
            clock=clock,
        )
        self._conversation = EnvServiceConversation(
            socket=socket, flow=self._flow, fleet=fleet, options=options, refused=events.refused, clock=clock
        )
        self._env_services = self._flow.env_services
        self._ledger = ledger
        self._journal = journal
        self._fleet = fleet
        self._evaluator = evaluator
        self._dead_letters = dead_letters
        self._waits = waits
        self._options = options
        self._clock = clock
        self._ending = False
        self._asked_at: float | None = None
        """Time since which the trainer waits for a batch; None if it does not."""
        self._waited_s = 0.0
        """Seconds that it has waited for the next batch before it was told how that begins."""

    # What the trainer calls, through the event loop

    async def take(self) -> TakenBatch:
        """The next batch, once there is one; it is in the journal, on disk, before it is returned.

        Raises RunAborted, and EndedEarly after `end`.
        """
        taken = await self.take_or_begin(None)
        assert isinstance(taken, TakenBatch), "nobody asked how it begins"
        return taken

    async def take_or_begin(self, known: BegunBatch | None) -> TakenBatch | BegunBatch:
        """As `take`; or before that how the batch begins, once that is not as it is `known`. A batch begins with what
        was last told of it; where a group was withdrawn, with what is left.
        """
        began = self._asked_at = self._clock() - self._waited_s
        with self._waits.wait("groups", quiet_s=QUIET_S, remedy=_FEW_GROUPS, blocks_readiness=False) as wait:
            while not isinstance(decision := self._decide(), Batch):
                if known is not None and not (begun := self._begun()).is_same(known):
                    self._waited_s, self._asked_at = self._clock() - began, None
                    return begun
                wait.whom, wait.remedy = _whom(decision), _remedy(decision)
                await self._flow.woken.wait()
        self._asked_at, self._waited_s = None, 0.0
        groups = await self._flow.take(decision, asked_at=began)
        times = self._flow.granting.diary.taken(decision.lease_ids)
        return TakenBatch(
            version=decision.version,
            groups=groups,
            lags=(*decision.lags, *decision.reused_lags),
            times=times,
            reused=len(decision.reused),
        )

    async def taught(self, teaching: Sequence[LoggedTeaching]) -> None:
        """Notes answers of teachers for the batch that is trained next: they are in the journal when this returns."""
        await self._flow.taught(teaching)

    def _begun(self) -> BegunBatch:
        return BegunBatch(tuple(self._flow.buffer[lease_id] for lease_id in self._ledger.sure()))

    async def newest(self, batch: TakenBatch, *, groups: int, timeout_s: float) -> NewestGroups:
        """The first groups whose leases were granted while the version of `batch` was served, those that are in it
        among them. The others stay where they are, to be trained in their turn. To be asked while the learner holds
        that version, so that all of their tokens are of it.

        None of them is chosen for being finished early: empty if one is not there after `timeout_s` seconds, or if the
        run is to end. Fewer than `groups` are given if no more were granted in that time, or no more may be.
        """
        flow, newest, version = self._flow, self._flow.granting.newest, batch.version
        running = partial(newest.run, version=version, groups=groups, runs=self._ledger.runs)

        def pending() -> bool:
            return running() or (len(newest.of(version)) < groups and flow.granting.may_train())

        whom = f"groups of version {version}, to compare gradients by lag"
        with (
            self._waits.wait(whom, quiet_s=QUIET_S, remedy=_FEW_GROUPS, blocks_readiness=False),
            suppress(TimeoutError),
        ):
            async with asyncio.timeout(timeout_s):
                while pending():
                    flow.woken.clear()
                    if self._ending or flow.failure is not None:
                        return NewestGroups((), "the run is to end")
                    await flow.woken.wait()
        why = "no more may be granted, or what was granted came to nothing"
        if pending():
            why = f"the others were not there after learner.lag.straggler_timeout_s, {timeout_s:g} s"
        if running():
            return NewestGroups((), why)
        taken = {group.lease_id: group for group in batch.groups}
        chosen = [(each, taken.get(each.lease_id) or flow.buffer.get(each.lease_id)) for each in newest.of(version)]
        found = [
            group
            for each, group in chosen[:groups]
            if group is not None and flow.incarnations.attempt_of(group) == each and oldest_of(group) == version
        ]
        return NewestGroups(tuple(found), why)

    def end(self) -> None:
        """Decides no further batch. One that is decided already goes to the trainer: no checkpoint may come before it,
        or its groups, accepted and in the journal, would never be trained.
        """
        self._ending = True
        self._flow.wake()

    def _decide(self) -> Batch | BatchShortfall:
        self._flow.woken.clear()
        if self._flow.failure is not None:
            raise self._flow.failure
        if self._ending:
            raise EndedEarly
        self._note_provenance()
        return self._ledger.take(now=self._clock())

    async def trained(self, version: int, *, max_lag: int | None = None) -> None:
        """The learner holds `version` now. `max_lag`: the bound on the lag from here on; None leaves it as it is."""
        self._ledger.trained(version)
        self._fleet.provenance.forget(below=self._ledger.next_version - self._ledger.config.max_lag)
        if max_lag is not None:
            await self._flow.bound_lag(max_lag)
        await self._flow.grant_all()

    async def evaluate(self, *, tasks: int, version: int, beside: bool = False) -> "asyncio.Future[Evaluation] | None":
        """Starts an evaluation on at most `tasks` of the held-out tasks; None if the environment has none.

        One `beside` training shares the env_services with it, and is left out while another one has not ended: they
        must not pile up.
        """
        if beside and (other := self._evaluator.evaluating) is not None:
            logger.warning(
                "version %d is not evaluated: the evaluation of version %d has not ended; evaluate fewer tasks, or at "
                "fewer steps", version, other,
            )  # fmt: skip
            return None
        with self._waits.wait("an env_service", quiet_s=QUIET_S, remedy=_NO_ENV_SERVICE):
            while not self._env_services:
                self._flow.woken.clear()
                await self._flow.woken.wait()
        offered = max(holder.agreed(self._options.environment).evaluation_tasks for holder in self._env_services)
        if not offered:
            return None
        future = self._evaluator.start(tasks=min(tasks, offered), version=version, beside=beside)
        await self._flow.grant_all()
        return future

    async def leave(self, reason: str) -> None:
        """Says goodbye to all env_services: they wait for the next learner, and miss this one no more."""
        await self._env_services.broadcast(Goodbye(reason=reason))

    def env_services(self) -> tuple[ConnectedEnvService, ...]:
        """The env_services that said hello and are still there."""
        return tuple(self._env_services)

    def ask_for_routed_experts(self) -> None:
        """From now on leases for training ask for the experts that tokens were sent to."""
        self._flow.granting.routed_experts = True

    def notes(self) -> list[StatusNote]:
        """Notes of env_services on how they are, those of ones that cannot say hello yet too."""
        return self._env_services.notes()

    async def evaluated(self, *, tasks: int, version: int, beside: bool = False) -> Evaluation | None:
        """An evaluation, once it has ended."""
        future = await self.evaluate(tasks=tasks, version=version, beside=beside)
        if future is None:
            return None
        whom = f"the evaluation of version {version}"
        with self._waits.wait(whom, quiet_s=QUIET_S, remedy=_EVALUATION, blocks_readiness=False):
            return await future

    @property
    def level(self) -> int | None:
        """Level of the leases that are yet to be granted, 0 the easiest; None if the environment has no levels, or
        nobody has said so yet. May be read in any thread.
        """
        curriculum = self._flow.granting.curriculum
        return curriculum.level if curriculum is not None and curriculum.levelled else None

    @property
    def drawn(self) -> DrawnTasks | None:
        """The newest draws of tasks; None where tasks are of the plain order. May be read in any thread."""
        draws = self._flow.granting.draws
        return None if draws is None else draws.newest

    def books(self) -> Books:
        """The counts of leases and attempts so far."""
        return self._ledger.books()

    async def checkpoint(self) -> LedgerSnapshot:
        """The ledger as a checkpoint holds it; the journal begins the segment that follows it. Raises JournalFull."""
        self._dead_letters.write_later()
        version, copied = self._ledger.version, dict(self._flow.buffer)
        used = [(self._flow.used[lease_id], each.reuses) for lease_id, each in self._ledger.reusable.items()]
        # In a thread: messages are answered meanwhile. Groups that come in are added at the end, as the ledger then is.
        await asyncio.to_thread(self._journal.prepare, version=version, groups=tuple(copied.values()), used=used)
        snapshot = self._ledger.snapshot()
        assert snapshot.version == version, "the trainer waits for its checkpoint"
        late = [group for lease_id, group in self._flow.buffer.items() if copied.get(lease_id) is not group]
        self._journal.rotate(version=version, groups=late)
        self._fleet.provenance.tell_again()
        self._note_provenance()
        return snapshot

    def readmit(self, groups: Iterable[TrajectoryGroup]) -> None:
        """Takes back groups that the journal holds and that no batch has used. Left out, and so granted again, are
        those too old, and those that the settings would not take in any more.
        """
        left_out = 0
        for group in groups:
            if not self._options.rules.may_go_on(group):
                left_out += 1
                continue
            answer = self._ledger.readmit(
                lease_id=group.lease_id,
                oldest_version=oldest_of(group),
                size=tokens_of(group),
                worth=worth_of(group),
            )
            if answer.verdict is GroupVerdict.ACCEPTED:
                self._flow.keep(group)
        if left_out:
            logger.warning(
                "%d groups that waited for a batch are sampled again: with the settings of now they would not have "
                "been taken in", left_out,
            )  # fmt: skip

    def keep_used(self, groups: Iterable[TrajectoryGroup]) -> None:
        """Takes back groups of the journal that were trained, of which the ledger says if they may be once more. Never
        trained again are those that the settings would not take in any more.
        """
        kept = {group.lease_id: group for group in groups if self._ledger.may_reuse(group.lease_id)}
        may_go_on = self._options.rules.may_go_on
        self._ledger.forget_reusable([each for each, group in kept.items() if not may_go_on(group)])
        self._flow.used = {lease_id: group for lease_id, group in kept.items() if self._ledger.may_reuse(lease_id)}

    async def fleet_changed(self) -> None:
        """Somebody serves another version than before, came, left, or has proven what it serves, or failed to."""
        self._ledger.served_changed(self._fleet.served)
        self._note_provenance()
        await self._env_services.tell_fleet(self._fleet.serving())
        await self._conversation.proofs_came()
        await self._flow.grant_all()

    def _note_provenance(self) -> None:
        """Writes down who has proven what, and gives back what those sampled that are not believed any more."""
        provenance = self._fleet.provenance
        try:
            for news in provenance.untold():
                self._journal.append_provenance(news)
        except JournalFull as error:
            self._flow.room.say(error)
        self._flow.recall(provenance.recalled(chain(self._flow.buffer.values(), self._flow.used.values())))

    async def bound_lag(self, max_lag: int) -> None:
        """Bounds the lag of what is trained from here on. What that makes too old is dropped, and granted again."""
        await self._flow.bound_lag(max_lag)
        await self._flow.grant_all()

    # Loops

    async def receive(self) -> None:
        """Takes messages until cancelled."""
        await self._conversation.receive()

    async def tick(self) -> None:
        """Expires what has gone silent and grants again what waited for its backoff, until cancelled."""
        while True:
            await self._next_tick()
            now = self._clock()
            limit_s = max(MISSED_HEARTBEATS * self._options.heartbeat_every_s, self._options.lease_timeout_s)
            for holder in self._env_services:
                if now - holder.last_seen > limit_s:
                    logger.warning(
                        "no heartbeat from env_service %s for %.0f s: its leases go to others", holder.name, limit_s
                    )
                    await self._flow.peer_left(holder)
            expired = self._ledger.expire(now=now)
            self._flow.forget(expired, why="expired")
            overdue = self._ledger.overdue(now=now)
            self._flow.forget(overdue, why="overdue")
            await self._env_services.cancel((*expired, *overdue))
            self._evaluator.expire(now=now)
            await self._env_services.tell_fleet(self._fleet.serving())
            self._env_services.look_again()
            if self._asked_at is not None:
                self._flow.granting.batch_awaited(asked_at=self._asked_at)
            self._flow.wake()
            await self._flow.grant_all()

    async def _next_tick(self) -> None:
        """If this process itself stood still (it was stopped, or starved), nobody else was silent meanwhile."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        await asyncio.sleep(_TICK_S)
        stood_still = loop.time() - began - _TICK_S
        if stood_still > _TICK_S:
            self._ledger.stood_still(stood_still)
            self._evaluator.stood_still(stood_still)
            self._env_services.stood_still(stood_still)


def _whom(waiting: BatchShortfall) -> str:
    if waiting.stragglers:
        slowest = waiting.stragglers[0]
        return f"lease {slowest.lease_id} at env_service {slowest.holder}, which the next step would make too old"
    return f"groups: {waiting.have} of {waiting.need} are there"


def _remedy(waiting: BatchShortfall) -> str:
    if not waiting.stragglers:
        return _FEW_GROUPS
    return _DROPPED_OFTEN if waiting.must_wait else _TOO_OLD
