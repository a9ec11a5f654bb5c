"""Who is granted what: evaluation first, then training, as far as room, pacing and the lag bound allow."""

from collections.abc import Callable
from dataclasses import dataclass

from learner.intake.evaluation import Evaluator
from learner.intake.holders import Holder
from learner.intake.pacing import Pacing, PacingRule
from learner.intake.task_order import TaskOrder
from learner.ledger import AttemptId, Grant, Ledger
from protocol.generation import Sampling
from protocol.messages import Lease

_MOST_LEASES_IN_A_GRANT = 1024


@dataclass(frozen=True)
class LeaseTerms:
    """What every training lease says. `total_groups` is what all steps together consume: no more are granted."""

    group_size: int
    sampling: Sampling
    seed: int
    timeout_s: float
    total_groups: int


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
    ) -> None:
        self._ledger = ledger
        self._evaluator = evaluator
        self._terms = terms
        self._incarnation = incarnation
        self._clock = clock
        self._pacing = Pacing(groups_per_step=ledger.config.groups_per_step, max_lag=ledger.config.max_lag, rule=pacing)
        self._last_taken = clock()
        self.order: TaskOrder | None = None

    def know_tasks(self, count: int) -> None:
        """The environment has so many training tasks; the first word counts."""
        if self.order is None:
            self.order = TaskOrder(count=count, seed=self._terms.seed)

    def batch_taken(self, *, asked_at: float) -> None:
        """A batch has left the buffer, which the trainer had asked for at `asked_at`."""
        now = self._clock()
        self._pacing.taken(
            waited_s=now - asked_at, since_last_s=now - self._last_taken, left_over=self._ledger.books().buffered
        )
        self._last_taken = now

    def bound_changed(self) -> None:
        """The ledger bounds the lag by another number of versions."""
        self._pacing.bound(self._ledger.max_lag)

    def leases_for(self, holder: Holder, *, environment: str) -> list[Lease]:
        """What an env_service is granted now; it holds them from here on."""
        if self.order is None or self._ledger.served is None:
            return []
        room = holder.hello.capacity - len(holder.running) - self._evaluator.running(holder.name)
        room = max(0, min(room, _MOST_LEASES_IN_A_GRANT))
        leases = self._evaluator.grant(now=self._clock(), holder=holder.name, environment=environment, room=room)
        room = min(room - len(leases), self._still_needed())
        if room > 0:
            grants = self._ledger.grant(now=self._clock(), holder=holder.name, room=room)
            holder.running.update(AttemptId(grant.lease_id, grant.attempt) for grant in grants)
            leases += [self._lease(grant, self.order, environment) for grant in grants]
        return leases

    def _still_needed(self) -> int:
        books = self._ledger.books()
        left = self._terms.total_groups - books.trained - books.buffered - books.running
        return min(left, self._pacing.room(running=books.running, buffered=books.buffered))

    def _lease(self, grant: Grant, order: TaskOrder, environment: str) -> Lease:
        terms = self._terms
        return Lease(
            incarnation=self._incarnation,
            lease_id=grant.lease_id,
            attempt=grant.attempt,
            purpose="train",
            environment=environment,
            task_index=order.task_index(grant.task_index),
            seed=order.lease_seed(grant.lease_id, attempt=grant.attempt),
            group_size=terms.group_size,
            sampling=terms.sampling,
            timeout_s=terms.timeout_s,
        )
