"""A short run of the real trainer, with the journal, checkpoints and numbers that a replay reads."""

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from learner.changed_settings import WhatIf, differences_of
from learner.config import LearnerConfig
from learner.journal.checkpoints import Checkpoints
from learner.journal.journal import FOLDER, Journal
from learner.ledger import Batch, Ledger
from learner.replay import beginning_of
from learner.run_demonstrations import demonstrations_of
from learner.run_settings import settings_of_run
from learner.training.batch import sequences_of
from learner.training.ranks import CommandChannel, Ranks
from learner.training.trainer import Trainer
from learner.what_if import compared
from learner.what_if_text import ShownWhatIf
from protocol.trajectories import TrajectoryGroup
from services.config import made_with
from tests.learner.samples import LEDGER
from tests.learner.training.tiny_model import random_group

STEPS = 4

torch.set_num_threads(1)  # as the processes that train it again: the last bits depend on it


def sampled(lease_id: int, *, version: int) -> TrajectoryGroup:
    """Three trajectories of random tokens; every third group has rewards that are all equal."""
    rewards = (1.0, 1.0, 1.0) if lease_id % 3 == 2 else (1.0, 0.0, 0.5)
    return random_group(lease_id, version=version, rewards=rewards)


@dataclass(frozen=True)
class TrainedRun:
    """A run of four steps, of two groups each, that has ended."""

    folder: Path
    open_trainer: Callable[[LearnerConfig], Trainer]

    def what_if(
        self, *changes: str, version: int | None = None, groups: int = 10, to: Path | None = None
    ) -> ShownWhatIf:
        """Shows the run by the changes, as the command does."""
        run, changed = settings_of_run(self.folder), settings_of_run(self.folder, changes=changes)
        asked = WhatIf(run, changed, differences=differences_of(run, changed, asked=changes), groups=groups, to=to)
        base, steps = beginning_of(run, version)
        return compared(asked, base=base, steps=steps, open_trainer=self.open_trainer)

    def lines(self) -> list[dict[str, Any]]:
        """The lines of its metrics.jsonl."""
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]


def trained_run(
    directory: Path, model: Path, commands: CommandChannel, *, checkpoint_at: int | None = None, **tables: Any
) -> TrainedRun:
    """Trains it with these settings of the learner, and writes its folder."""
    training = {"microbatch_tokens": 32, "optimizer": {"learning_rate": 1e-2}, **tables.pop("training", {})}
    run = {"directory": directory, "name": "one"}
    config = LearnerConfig.model_validate(
        {"model": model, "run": run, "training": training, "groups_per_step": 2, "max_lag": 1, **tables}
    )

    def opened(settings: LearnerConfig) -> Trainer:
        return Trainer(
            model,
            algorithm=settings.algo,
            config=settings.training,
            ranks=Ranks(),
            commands=commands,
            keeps_pulls=True,
            demonstration_weight=settings.demonstrations.weight,
        )

    folder = config.run.folder
    folder.mkdir(parents=True)
    made_with.write(folder, config.made_with())
    trainer, ledger, shown = opened(config), Ledger(LEDGER), demonstrations_of(config)
    ledger.served_changed(0)
    with Journal.open(folder / FOLDER) as journal, (folder / "metrics.jsonl").open("w") as metrics:
        checkpoints = Checkpoints(folder, keep=2, journal=journal, whole_journal=True)
        groups: dict[int, TrajectoryGroup] = {}
        for version in range(STEPS):
            for grant in ledger.grant(now=0.0, holder="e", room=100):
                groups[grant.lease_id] = sampled(grant.lease_id, version=version)
                journal.append_group(groups[grant.lease_id])
                ledger.accept(lease_id=grant.lease_id, attempt=grant.attempt, oldest_version=version, size=1)
            batch = ledger.take(now=0.0)
            assert isinstance(batch, Batch)
            journal.append_batch(version=version, lease_ids=batch.lease_ids)
            taken = [groups.pop(lease_id) for lease_id in batch.lease_ids]
            sequences = sequences_of(taken, version=version, max_lag=1, preset=trainer.preset)
            given = () if shown is None else shown.of_step(version)
            made = dataclasses.asdict(trainer.train_step(sequences, version=version, demonstrations=given))
            metrics.write(json.dumps({"kind": "step", "step": version + 1, "reward_mean": 0.5, **made}) + "\n")
            ledger.trained(version + 1)
            ledger.served_changed(version + 1)
            if version + 1 == checkpoint_at:
                snapshot = ledger.snapshot()
                journal.rotate(version=version + 1, groups=groups.values())
                checkpoints.write(version=version + 1, ledger=snapshot, save_trainer=trainer.save)
    trainer.close()
    return TrainedRun(folder=folder, open_trainer=opened)
