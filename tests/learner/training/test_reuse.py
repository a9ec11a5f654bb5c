"""A run that trains groups again ends at the same weights when it is resumed, by the real trainer and journal."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch

from learner.journal.checkpoints import Checkpoints
from learner.journal.journal import FOLDER, Journal
from learner.leases.worth import worth_of
from learner.ledger import Batch, Ledger
from learner.recovery import logged_steps, recover
from learner.training.batch import sequences_of
from learner.training.ranks import CommandChannel
from learner.training.trainer import Trainer
from protocol.trajectories import TrajectoryGroup
from tests.learner.samples import LEDGER
from tests.learner.training.test_replay import trainer
from tests.learner.training.tiny_model import random_group

REUSING = replace(LEDGER, max_lag=3, reused_per_step=1, reuse_priority="advantage")
STEPS = 5


def weights(made: Trainer) -> dict[str, torch.Tensor]:
    return {each.name: each.value.clone() for each in made.host_copy().tensors}


class ReusingRun:
    """A learner without its processes; `groups` are buffered or may be trained again."""

    def __init__(self, ledger: Ledger, journal: Journal, made: Trainer) -> None:
        self.ledger, self.journal, self.trainer = ledger, journal, made
        self.groups: dict[int, TrajectoryGroup] = {}
        self.reused: list[tuple[int, ...]] = []
        ledger.served_changed(ledger.version)

    def step(self) -> None:
        version = self.ledger.version
        for grant in self.ledger.grant(now=0.0, holder="e", room=LEDGER.groups_per_step):
            one = random_group(grant.lease_id, version=version)
            self.groups[grant.lease_id] = one
            self.journal.append_group(one)
            self.ledger.accept(
                lease_id=grant.lease_id, attempt=grant.attempt, oldest_version=version, size=1, worth=worth_of(one)
            )
        batch = self.ledger.take(now=0.0)
        assert isinstance(batch, Batch)
        self.journal.append_batch(version=version, lease_ids=batch.lease_ids, reused=batch.reused)
        taken = [self.groups[lease_id] for lease_id in (*batch.lease_ids, *batch.reused)]
        self.reused.append(batch.reused)
        sequences = sequences_of(taken, version=version, max_lag=REUSING.max_lag, preset=self.trainer.preset)
        self.trainer.train_step(sequences, version=version)
        self.ledger.trained(version + 1)
        self.ledger.served_changed(version + 1)

    def checkpoint(self, folder: Path) -> None:
        version, snapshot = self.ledger.version, self.ledger.snapshot()
        used = [(self.groups[lease_id], each.reuses) for lease_id, each in self.ledger.reusable.items()]
        self.journal.prepare(version=version, groups=(), used=used)
        self.journal.rotate(version=version, groups=())
        Checkpoints(folder, keep=1, journal=self.journal).write(
            version=version, ledger=snapshot, save_trainer=self.trainer.save
        )


def test_a_killed_run_ends_at_the_weights_of_one_that_was_not(
    tied_llama: Path, commands: CommandChannel, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        journal = stack.enter_context(Journal.open(tmp_path / FOLDER))
        run = ReusingRun(Ledger(REUSING), journal, stack.enter_context(trainer(tied_llama, commands)))
        for _ in range(2):
            run.step()
        run.checkpoint(tmp_path)
        run.step()  # killed behind this step, one that goes on makes two more
        kept = {path: path.read_bytes() for path in (tmp_path / FOLDER).iterdir()}
        while len(run.reused) < STEPS:
            run.step()
        expected = weights(run.trainer)
    assert all(run.reused[2:]), run.reused

    steps = logged_steps(tmp_path, version=2)
    with ExitStack() as stack:  # as `learner replay` does
        made = stack.enter_context(trainer(tied_llama, commands))
        made.load(tmp_path / "checkpoint-00000002" / "trainer")
        for step in steps:
            batch = step.read()
            train_within(made, batch.groups, version=batch.version, max_lag=batch.bound(REUSING.max_lag))
        assert all(torch.equal(value, expected[name]) for name, value in weights(made).items())

    for path, content in kept.items():
        path.write_bytes(content)
    recovered = recover(tmp_path, config=REUSING, resume=True, incarnation=2)
    with ExitStack() as stack:
        journal = stack.enter_context(Journal.open(tmp_path / FOLDER))
        made = stack.enter_context(trainer(tied_llama, commands))
        assert recovered.trainer_folder is not None
        made.load(recovered.trainer_folder)
        again = ReusingRun(recovered.ledger, journal, made)
        again.groups = {one.lease_id: one for one in recovered.used_groups()}
        for step in recovered.batches:
            train_within(made, step.read().groups, version=step.version, max_lag=REUSING.max_lag)
            again.ledger.trained(step.version + 1)
        again.ledger.served_changed(again.ledger.version)
        while again.ledger.version < STEPS:
            again.step()
        assert again.reused == run.reused[3:]
        assert all(torch.equal(value, expected[name]) for name, value in weights(made).items())


def train_within(made: Trainer, groups: tuple[TrajectoryGroup, ...], *, version: int, max_lag: int) -> None:
    made.train_step(sequences_of(groups, version=version, max_lag=max_lag, preset=made.preset), version=version)
