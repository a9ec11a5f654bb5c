"""The ledger of leases: which task is rolled out by whom, what enters a batch, and what became of everything else.

A pure state machine. It reads no clock (`now` is passed in, in seconds), does no I/O and holds no trajectories: the
caller keeps the groups under their lease ids and writes the journal. One thread calls it.

A lease is at every moment in exactly one place:

    pending ──grant──▶ running ──accept──▶ buffered ──take──▶ in training ──trained──▶ closed

From running it goes back to pending when the attempt expires, fails, is dropped, or brings a group that is too old;
from buffered when the group has become too old. It is closed early when its group is filtered, or when it is
dead-lettered after too many failures.

`records` is what goes in and out, `lease` where each lease is and the books, `stragglers` whom a step has to wait for,
`reuse` which groups are trained again, and `ledger` the machine.
"""

from learner.ledger.ledger import Ledger
from learner.ledger.records import (
    ATTEMPT_OUTCOMES,
    LEASE_STATES,
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
    ReusePriority,
    Straggler,
)
from learner.ledger.reuse import ReusableGroup

__all__ = [
    "ATTEMPT_OUTCOMES",
    "LEASE_STATES",
    "AttemptId",
    "Batch",
    "BatchShortfall",
    "Books",
    "DeliveryAnswer",
    "EndedAttempt",
    "FailureKind",
    "FailureResult",
    "Grant",
    "GroupVerdict",
    "Ledger",
    "LedgerConfig",
    "LedgerSnapshot",
    "ReusableGroup",
    "ReusePriority",
    "Straggler",
]
