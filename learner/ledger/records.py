"""Records that go into the ledger and come out of it."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, NamedTuple

FailureKind = Literal["infrastructure", "data"]
ReusePriority = Literal["advantage", "recent", "uniform"]
OnLag = Literal["wait", "drop", "mask"]
LEASE_STATES = ("trained", "filtered", "dead_lettered", "buffered", "running", "pending")
"""The fields of `Books` that add up to `leases`."""
ATTEMPT_OUTCOMES = ("accepted", "failed", "expired", "dropped", "running")
"""The fields of `Books` that add up to `attempts`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerConfig:
    """The rules. Times are seconds, everything else counts.

    on_lag: what to do before a step that would make a running group too old: `wait` for it, at most
        `straggler_timeout_s`, then drop it; or `drop` it at once; or go on and let it run, so that the tokens that are
        too old by then `mask` when it comes in (`oldest_with_a_place`). A lease that was dropped `max_drops_per_lease`
        times is always waited for, or long answers would starve.
    lease_timeout_s: an attempt of which no heartbeat spoke for so long is granted again.
    infrastructure_retries, data_retries: failures of each kind that a lease survives; the next one dead-letters it. As
        many expired attempts as infrastructure failures are survived in one life of the learner.
    longest_attempt_s: an attempt that takes longer, though heartbeats speak of it, counts as a failure of its data.
        Time in which nobody serves, or in which it waits for its rewards or its environment's host, is not counted.
    longest_wait_s: an attempt that waits longer for these two, in all, counts as a failure of infrastructure.
    reused_per_step: how many groups that were trained before a step trains again, beside its `groups_per_step` new
        ones; fewer while there are no more. Each at most `max_reuses` times, by `reuse_priority` and `reuse_seed`.
    max_lag_of_reused: bound on the lag of these groups, above `max_lag`; None: `max_lag`, as for all others.
    infrastructure_backoff_s: pause before the first retry after an infrastructure failure; it doubles with each further
        one, up to `infrastructure_backoff_max_s`. A data failure is retried without a pause.
    """

    groups_per_step: int
    max_lag: int
    on_lag: OnLag
    straggler_timeout_s: float
    lease_timeout_s: float
    infrastructure_retries: int
    data_retries: int
    max_drops_per_lease: int = 2
    longest_attempt_s: float = 1500.0
    longest_wait_s: float = 3600.0
    infrastructure_backoff_s: float = 1.0
    infrastructure_backoff_max_s: float = 60.0
    reused_per_step: int = 0
    reuse_priority: ReusePriority = "uniform"
    max_reuses: int = 1
    reuse_seed: int = 0
    max_lag_of_reused: int | None = None

    @property
    def reused_lag(self) -> int:
        """The largest lag that a group may have which is trained again."""
        return self.max_lag if self.max_lag_of_reused is None else self.max_lag_of_reused


class AttemptId(NamedTuple):
    """Names one attempt of one lease; equal to the plain pair."""

    lease_id: int
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """The right and duty to roll out one task, given to one holder.

    lease_id: stable over attempts, and the position of the task in the endless order of tasks (`task_index`).
    attempt: 0 at the first grant; each further grant of the lease has the next number.
    version: the served policy version at the grant; no token of the group is older.
    deadline: when the attempt expires unless a heartbeat extends it, on the clock of `now`.
    """

    lease_id: int
    attempt: int
    holder: str
    version: int
    deadline: float

    @property
    def task_index(self) -> int:
        """Position of the task in the order of tasks: the cursor when the lease was first granted, so its id."""
        return self.lease_id


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedAttempt:
    """An attempt that the ledger has ended: the caller cancels it with its holder, or forgets its group.

    holder: None if the group had been delivered.
    size: as given to `accept`; None if the group had not been delivered.
    given_up: why the lease was dead-lettered with this attempt; None if it will be granted again.
    data_fault: it counted as a failure of the lease's data.
    """

    lease_id: int
    attempt: int
    holder: str | None
    size: int | None
    given_up: str | None = None
    data_fault: bool = False


class GroupVerdict(StrEnum):
    """The ledger's verdict on a delivered group. Every verdict but ACCEPTED is acknowledged, and the group
    forgotten.
    """

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    """The lease has its group already, or is closed."""
    STALE = "stale"
    """The running attempt's group is outside the versions that the next batch admits: dropped, granted again."""
    LATE = "late"
    """The same of an attempt that had ended before: nothing changes."""
    UNKNOWN = "unknown"
    """No such attempt was ever granted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryAnswer:
    """A verdict, and the running attempt (none or one) that an accepted group of another attempt has made needless."""

    verdict: GroupVerdict
    cancelled: tuple[EndedAttempt, ...] = ()


class FailureResult(StrEnum):
    """The fate of a lease whose attempt failed."""

    RETRIED = "retried"
    DEAD_LETTERED = "dead_lettered"
    IGNORED = "ignored"
    """The attempt was not running any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A step's groups, in the order in which they are trained.

    version: the learner's version at which the batch is trained; the step makes version + 1.
    lags: version minus the oldest version of each group, parallel to `lease_ids`; each in 0..max_lag.
    dropped: attempts that this step makes too old. Their leases will be granted again.
    reused: leases whose groups were trained before, and are trained once more after the others; each of their lags is
        in 0..max_lag_of_reused, which is max_lag where none is set.
    """

    version: int
    lease_ids: tuple[int, ...]
    lags: tuple[int, ...]
    dropped: tuple[EndedAttempt, ...]
    reused: tuple[int, ...] = ()
    reused_lags: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A running attempt that would become too old if the step were taken without it."""

    lease_id: int
    attempt: int
    holder: str
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShortfall:
    """Reason for no batch yet: `have` of `need` groups are there, or, with enough of them, `stragglers` are awaited.

    since: when the ledger began to wait for stragglers; None if groups are missing.
    must_wait: one of them was dropped so often that it is waited for without end.
    """

    have: int
    need: int
    stragglers: tuple[Straggler, ...] = ()
    since: float | None = None
    must_wait: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Books:
    """Counts over the history of the present weights. `trained` includes what is in training.

    An attempt counts once, where it ended last: one that expired and was accepted after all is accepted. Stale groups
    are dropped attempts. Late duplicates are not attempts. A lease is `trained` once, by the first step that trained
    its group; each later use of that group is one of `reused`, which is part of no sum.
    """

    leases: int
    trained: int
    filtered: int
    dead_lettered: int
    buffered: int
    running: int
    pending: int
    attempts: int
    accepted: int
    failed: int
    expired: int
    dropped: int
    reused: int = 0

    @property
    def outstanding(self) -> int:
        """Leases that are neither trained nor given up."""
        return self.buffered + self.running + self.pending

    def check(self) -> None:
        """Raises AssertionError if a lease or an attempt is missing, or counted twice."""
        assert self.leases == self.trained + self.filtered + self.dead_lettered + self.outstanding, self
        assert self.attempts == self.accepted + self.failed + self.expired + self.dropped + self.running, self
        assert self.accepted == self.trained + self.filtered + self.buffered, self


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerSnapshot:
    """The ledger as a restarted learner takes it up: integers, strings, lists and dicts of them.

    `dataclasses.asdict` gives a form that JSON and msgpack can hold; `LedgerSnapshot(**form)` takes it back.
    Everything that is not trained, filtered or dead-lettered is a lease to grant again, the batch in training included.
    The five lists are parallel, one entry per such lease; `attempts` holds how each attempt ended.
    """

    version: int
    cursor: int
    closed: dict[str, int]
    outcomes: dict[str, int]
    reasons: dict[str, int]
    lease_ids: list[int]
    attempts: list[list[str]]
    drops: list[int]
    infrastructure_failures: list[int]
    data_failures: list[int]
    reused: int = 0
