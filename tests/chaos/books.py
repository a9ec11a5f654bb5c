"""The learner's books, from what a run leaves: its summary, or the ledger in its newest checkpoint."""

import json
from collections import Counter
from pathlib import Path

from tests.chaos.invariants import KeptBooks


def books_of(run: Path) -> KeptBooks:
    """Raises FileNotFoundError for a run that has left neither."""
    ledgers = sorted(run.glob("checkpoint-*/ledger.json"))
    if not ledgers:
        raise FileNotFoundError(f"{run} has no checkpoint with a ledger")
    ledger = json.loads(ledgers[-1].read_text(encoding="utf-8"))
    closed, outcomes = Counter(ledger["closed"]), Counter(ledger["outcomes"])
    return KeptBooks(
        version=ledger["version"],
        leases=ledger["cursor"],
        trained=closed["trained"],
        filtered=closed["filtered"],
        dead_lettered=closed["dead_lettered"],
        outstanding=len(ledger["lease_ids"]),
        attempts=outcomes.total(),
        accepted=outcomes["accepted"],
        failed=outcomes["failed"],
        expired=outcomes["expired"],
        dropped=outcomes["dropped"],
        running=outcomes["running"],
    )
