"""The ledger of leases: which task is rolled out by whom, what enters a batch, and what became of everything else.

A pure state machine. It reads no clock (`now` is passed in, in seconds), does no I/O and holds no trajectories: the
caller keeps the groups under their lease ids and writes the journal. One thread calls it.

A lease is at every moment in exactly one place:

    granted for the first time ──▶ running ──accept──▶ buffered ──take──▶ in training ──trained──▶ closed
                          ▲           │                   │
                          │   expire, fail, drop, stale   │ filter, or too old for every later step
                          └─ pending ◀┴───────────────────┴──▶ closed (filtered), pending

`records` is what goes in and out, `lease` the state of one lease, `stragglers` whom a step has to wait for, and
`ledger` the machine.
"""

from learner.ledger.ledger import Ledger
from learner.ledger.records import (
    Answer,
    AttemptId,
    Batch,
    Books,
    EndedAttempt,
    FailureKind,
    FailureResult,
    Grant,
    LedgerConfig,
    LedgerSnapshot,
    Straggler,
    Verdict,
    Waiting,
)

__all__ = [
    "Answer",
    "AttemptId",
    "Batch",
    "Books",
    "EndedAttempt",
    "FailureKind",
    "FailureResult",
    "Grant",
    "Ledger",
    "LedgerConfig",
    "LedgerSnapshot",
    "Straggler",
    "Verdict",
    "Waiting",
]
