"""Taking up a run: the newest checkpoint, the batches logged after it, and the groups that no batch has used yet."""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from learner.history.checkpoints import Checkpoints, read_ledger
from learner.history.journal import JournalDamaged, LoggedBatch, LoggedFilter, LoggedGroup, read_journal
from learner.intake.intake import TakenBatch
from learner.ledger import Ledger, LedgerConfig
from protocol.trajectories import TrajectoryGroup

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Recovered:
    """Where a learner begins: at `version`, with `batches` to train again and `spare_groups` for later ones."""

    ledger: Ledger
    version: int
    trainer_folder: Path | None
    batches: tuple[TakenBatch, ...]
    spare_groups: tuple[TrajectoryGroup, ...]


def recover(folder: Path, *, config: LedgerConfig, resume: bool) -> Recovered:
    """The start of a run, or its resumption from the newest checkpoint and the journal.

    Raises JournalDamaged, also when the journal does not follow the checkpoint.
    """
    if not resume:
        return Recovered(ledger=Ledger(config), version=0, trainer_folder=None, batches=(), spare_groups=())
    checkpoint = Checkpoints(folder, keep=1).newest()
    ledger = Ledger(config) if checkpoint is None else Ledger.restore(config, read_ledger(checkpoint))
    version = ledger.version
    path = folder / "journal.log"
    journal = _read(path, version=version)
    batches = journal.batches
    _check_order(batches, version=version, path=path)
    taken = tuple(_taken(batch, journal.groups) for batch in batches)
    for batch in batches:
        ledger.replay(batch.lease_ids)
    ledger.replay_filtered(journal.filtered)
    ledger.replay_dead_lettered(_dead_lettered(folder / "dead_letters.jsonl"))
    used = {lease_id for batch in batches for lease_id in batch.lease_ids} | set(journal.filtered)
    spare = tuple(group for lease_id, group in journal.groups.items() if lease_id not in used)
    log.info("resuming at version %d: %d logged batches to replay, %d groups at hand", version, len(taken), len(spare))
    trainer_folder = None if checkpoint is None else checkpoint / "trainer"
    return Recovered(ledger=ledger, version=version, trainer_folder=trainer_folder, batches=taken, spare_groups=spare)


@dataclass(frozen=True)
class _Journal:
    """What a checkpoint does not cover: batches from its version on, and groups that no earlier batch has used."""

    groups: dict[int, TrajectoryGroup]
    batches: list[LoggedBatch]
    filtered: list[int]


def _read(path: Path, *, version: int) -> _Journal:
    journal = _Journal(groups={}, batches=[], filtered=[])
    for record in read_journal(path):
        match record:
            case LoggedGroup(group=group):
                journal.groups[group.lease_id] = group
            case LoggedBatch() if record.version >= version:
                journal.batches.append(record)
            case LoggedBatch(lease_ids=lease_ids):
                for lease_id in lease_ids:  # groups are many megabytes: none is kept that was trained long ago
                    journal.groups.pop(lease_id, None)
            case LoggedFilter(lease_id=lease_id):
                journal.filtered.append(lease_id)
    return journal


def _check_order(batches: Sequence[LoggedBatch], *, version: int, path: Path) -> None:
    logged = [batch.version for batch in batches]
    if logged != list(range(version, version + len(batches))):
        raise JournalDamaged(
            f"{path}: after the checkpoint of version {version} it holds batches of versions {logged}, expected "
            f"{version}, {version + 1} and so on: is it of another run than the checkpoint?"
        )


def _taken(batch: LoggedBatch, groups: dict[int, TrajectoryGroup]) -> TakenBatch:
    members = tuple(groups[lease_id] for lease_id in batch.lease_ids)
    oldest = [group.oldest_version for group in members]
    lags = tuple(batch.version - version for version in oldest if version is not None)
    return TakenBatch(version=batch.version, groups=members, lags=lags)


def _dead_lettered(path: Path) -> list[int]:
    if not path.exists():
        return []
    # What follows the last line's end was being written when the learner died; its lease is simply granted again.
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return [int(json.loads(line)["lease_id"]) for line in lines]
