"""Training leases: how many an env_service is granted, as pacing and the lag bound allow, and for which tasks;
evaluation goes before training.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from learner.leases.curriculum import Curriculum, CurriculumRules, MakeCurriculum
from learner.leases.env_services import ConnectedEnvService
from learner.leases.evaluation_leases import Evaluator
from learner.leases.lease_times import LeaseDiary
from learner.leases.newest_grants import NewestGrants
from learner.leases.pacing import Pacing, PacingRule
from learner.leases.part_turns import MakeTurns, PartSeats, PartTurns
from learner.leases.task_draws import MakeDraws, TaskDraws, TaskPlaces
from learner.leases.task_order import TaskOrder
from learner.ledger import AttemptId, Grant, Ledger
from learner.teachers.limits import TeachingLimits
from protocol.generation import Sampling
from protocol.messages import EnvironmentInfo, Lease, TaskPart
from protocol.trajectories import TrajectoryGroup
from services.tracing import lease_began, lease_trace

logger = logging.getLogger(__name__)


_MAX_LEASES_IN_A_GRANT = 1024
_MOST_PASSED_OVER = 256
"""New leases of a part without room that wait while those of others are granted, where no lease is moved."""


@dataclass(frozen=True)
class LeaseTerms:
    """The terms of every training lease. `total_groups` is what all steps together consume: no more are granted. With
    `greedy_baseline` each asks for a greedy answer, too.
    """

    group_size: int
    sampling: Sampling
    seed: int
    timeout_s: float
    total_groups: int
    greedy_baseline: bool = False


class Granting:
    """Turns the ledger's grants into leases. `order` is known once the first env_service has said hello."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        evaluator: Evaluator,
        terms: LeaseTerms,
        incarnation: int,
        clock: Callable[[], float],
        pacing: PacingRule = "demand",
        make_curriculum: MakeCurriculum = lambda levels: Curriculum(levels=levels, rules=CurriculumRules()),
        make_draws: MakeDraws | None = None,
        make_turns: MakeTurns | None = None,
        teaching: TeachingLimits | None = None,
    ) -> None:
        self._make_curriculum = make_curriculum
        self._make_turns = make_turns
        self._make_draws = make_draws
        self._teaching = teaching or TeachingLimits()
        self._ledger = ledger
        self._evaluator = evaluator
        self._terms = terms
        self._incarnation = incarnation
        self._clock = clock
        self.routed_experts = False
        """True if leases ask for the experts that tokens were sent to."""
        self.diary = LeaseDiary(clock=clock)
        self._pacing = Pacing(groups_per_step=ledger.config.groups_per_step, max_lag=ledger.config.max_lag, rule=pacing)
        self._last_taken = clock()
        self.newest = NewestGrants()
        self.order: TaskOrder | None = None
        self.curriculum: Curriculum | None = None
        """None while there is one level."""
        self.draws: TaskDraws | None = None
        """None where tasks are of the plain order."""
        self.turns: PartTurns | None = None
        """None but in a mix without levels. Where tasks are drawn it moves no lease."""
        self.known: EnvironmentInfo | None = None
        """Of the first env_service; all others have the same."""

    def know_tasks(self, info: EnvironmentInfo) -> None:
        """Notes which tasks the environment has; later calls change nothing."""
        if self.known is None:
            count, levels = info.train_tasks, info.levels
            self.order = TaskOrder(count=count // levels, seed=self._terms.seed)
            self.curriculum = self._make_curriculum(levels) if levels > 1 else None
            if self._make_draws is not None:
                self.draws = self._make_draws(TaskPlaces(count=count, levels=levels, parts=info.parts), self._in_order)
            if info.parts and levels == 1 and self._make_turns is not None:
                self.turns = self._make_turns(info.parts)
            self.known = info

    def task_index(self, lease_id: int) -> int:
        """The task of a lease, the same at each of its grants."""
        return self._in_order(lease_id) if self.draws is None else self.draws.task_of(lease_id)

    def _in_order(self, lease_id: int) -> int:
        """The task of a lease's place in the epoch, of its level or of the part that it was moved to."""
        assert self.order is not None, "nothing was granted yet"
        level = 0 if self.curriculum is None else self.curriculum.level_of(lease_id)
        place = level * self.order.count + self.order.task_index(lease_id)
        return place if self.turns is None else self.turns.place_of(lease_id, place)

    def accepted(self, group: TrajectoryGroup) -> None:
        """A group was taken in, which may be what changes the level of new leases, or which tasks they are of."""
        if self.curriculum is not None:
            self.curriculum.accepted(group, next_lease=self._ledger.books().leases)
        if self.draws is not None:
            self.draws.accepted(group, at=self._ledger.version)

    def batch_taken(self, *, asked_at: float) -> None:
        """A batch has left the buffer, which the trainer had asked for at `asked_at`."""
        now = self._clock()
        self._pacing.taken(
            waited_s=now - asked_at, since_last_s=now - self._last_taken, left_over=self._ledger.books().buffered
        )
        self._last_taken = now

    def batch_awaited(self, *, asked_at: float) -> None:
        """The trainer has waited since `asked_at` for a batch that is not there. Where rollouts may outlive the bound,
        that may be since nothing but long ones run.
        """
        books = self._ledger.books()
        if self._ledger.config.on_lag != "mask" or self._ledger.served is None:
            return
        if self._pacing.room(running=books.running, buffered=books.buffered) == 0:
            self._pacing.awaited(waited_s=self._clock() - asked_at)

    def bound_changed(self) -> None:
        """The ledger bounds the lag by another number of versions."""
        self._pacing.bound(self._ledger.max_lag)

    def may_grant(self) -> bool:
        """True if anybody with room would be granted something."""
        if self.order is None or self._ledger.served is None:
            return False
        return self._evaluator.has_waiting or self.may_train()

    @property
    def trains(self) -> bool:
        """True if leases for training are granted at all; an evaluation by itself grants none."""
        return self._terms.total_groups > 0

    def may_train(self) -> bool:
        """True if anybody with room would be granted a lease for training."""
        return self.order is not None and min(self._still_needed(), self._ledger.places()) > 0

    def room_of(self, holder: ConnectedEnvService, environment: str) -> int:
        """For how many more leases of an environment an env_service has room."""
        capacity = self._capacity_of(holder, environment)
        return capacity - len(holder.running) - self._evaluator.running(holder.name)

    @staticmethod
    def _capacity_of(holder: ConnectedEnvService, environment: str) -> int:
        """Most leases of an environment that run at an env_service at once."""
        most = holder.agreed(environment).most_leases
        return holder.hello.capacity if most is None else min(most, holder.hello.capacity)

    def leases_for(self, holder: ConnectedEnvService, *, environment: str) -> list[Lease]:
        """The leases that an env_service is granted now; it holds them from here on."""
        if self.order is None or self._ledger.served is None:
            return []
        evaluating = self._evaluator.running(holder.name)
        room = max(0, min(self.room_of(holder, environment), _MAX_LEASES_IN_A_GRANT))
        leases = self._evaluator.grant(
            now=self._clock(),
            holder=holder.name,
            environment=environment,
            room=self._evaluation_room(holder, environment, room=room, evaluating=evaluating),
        )
        holder.evaluated_last = bool(leases) or holder.evaluated_last
        room = min(room - len(leases), self._still_needed())
        if room > 0:
            parts = holder.agreed(environment).parts
            grants = self._granted(holder, parts, room=self._with_tasks(room))
            if grants and self.curriculum is not None:
                self.curriculum.granting(1 + max(grant.lease_id for grant in grants))
            self.newest.granted(grants)
            holder.running.update(AttemptId(grant.lease_id, grant.attempt) for grant in grants)
            leases += [self._lease(grant, self.order, environment) for grant in grants]
            holder.evaluated_last = holder.evaluated_last and not grants
        return leases

    def _granted(self, holder: ConnectedEnvService, parts: Sequence[TaskPart], *, room: int) -> tuple[Grant, ...]:
        """Grants of the ledger; in a mix with places of their own those whose parts have room there."""
        turns, now = self.turns, self._clock()
        if turns is None:
            return self._ledger.grant(now=now, holder=holder.name, room=room)
        books, has_own_places = self._ledger.books(), any(part.has_own_places for part in parts)
        below = turns.cover(books.leases + room)
        if self.draws is not None:
            # None is moved, so that new ones may have to wait for room at once: a few do, and none that has no task.
            waiting = has_own_places and books.pending >= _MOST_PASSED_OVER
            below = books.leases if waiting else min(below, books.leases + room)
        running = {attempt.lease_id for attempt in holder.running} if has_own_places else set[int]()
        holder.parts = {
            each: turns.part_at(self._in_order(each)) if (known := holder.parts.get(each)) is None else known
            for each in running
        }
        seats = PartSeats(
            turns=turns,
            parts=parts,
            held=holder.parts,
            plain=self._in_order,
            may_move=lambda lease_id: self.draws is None and self._ledger.is_new(lease_id),
        )
        room = int(min(room, seats.room))
        return self._ledger.grant(now=now, holder=holder.name, room=room, admits=seats.admits, new_below=below)

    def _evaluation_room(self, holder: ConnectedEnvService, environment: str, *, room: int, evaluating: int) -> int:
        """Beside training an evaluation has a share of the places; of a single one it has every other turn."""
        capacity = self._capacity_of(holder, environment)
        if self._evaluator.is_beside and capacity == 1 and holder.evaluated_last:
            training = min(self._still_needed(), self._ledger.places())
            return 0 if training > 0 else room
        return min(room, max(0, self._evaluator.most_at(capacity) - evaluating))

    def _with_tasks(self, room: int) -> int:
        """Number of leases, `room` at most, that have a task even if all of them are new."""
        room = min(room, self._ledger.places())
        if self.draws is None or room <= 0:
            return room
        first = self._ledger.books().leases
        covered = self.draws.cover(next_lease=first, end=first + room, at=self._ledger.version)
        return max(0, min(room, covered - first))

    def _still_needed(self) -> int:
        """By the steps that are left: those of a former life may have been of another number of groups."""
        ledger, books = self._ledger, self._ledger.books()
        consumed = ledger.next_version * ledger.config.groups_per_step
        left = self._terms.total_groups - consumed - books.buffered - books.running
        return min(left, self._pacing.room(running=books.running, buffered=books.buffered))

    def _lease(self, grant: Grant, order: TaskOrder, environment: str) -> Lease:
        terms = self._terms
        lease_began(trace := lease_trace(self._incarnation, grant.lease_id))
        self.diary.granted(grant.lease_id, incarnation=self._incarnation, attempt=grant.attempt)
        return Lease(
            incarnation=self._incarnation,
            lease_id=grant.lease_id,
            attempt=grant.attempt,
            purpose="train",
            environment=environment,
            task_index=self.task_index(grant.task_index),
            seed=order.lease_seed(grant.lease_id, attempt=grant.attempt),
            group_size=terms.group_size,
            sampling=terms.sampling,
            timeout_s=terms.timeout_s,
            trace=trace,
            routed_experts=self.routed_experts,
            greedy_baseline=terms.greedy_baseline,
            teacher_prompt=self._teaching.shown_more(environment) is not None,
        )
