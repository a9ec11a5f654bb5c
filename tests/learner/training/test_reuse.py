"""A run that trains groups again ends at the same weights when it is resumed, by the real trainer and journal."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from learner.algorithms.old_tokens import LEFT_OUT_OF_OLD, OldTokenBound
from learner.journal.checkpoints import Checkpoints
from learner.journal.journal import FOLDER, Journal
from learner.leases.worth import worth_of
from learner.ledger import Batch, Ledger, LedgerConfig
from learner.recovery import logged_steps, recover
from learner.training.batch import GroupsAgain, sequences_of
from learner.training.ranks import CommandChannel
from learner.training.step import StepMetrics
from learner.training.trainer import Trainer
from protocol.trajectories import TrajectoryGroup
from tests.learner.samples import LEDGER
from tests.learner.training.test_replay import trainer
from tests.learner.training.tiny_model import random_group

REUSING = replace(LEDGER, max_lag=3, reused_per_step=1, reuse_priority="advantage")
BEYOND = replace(REUSING, max_lag=1, max_lag_of_reused=3)
STEPS = 5


def weights(made: Trainer) -> dict[str, torch.Tensor]:
    return {each.name: each.value.clone() for each in made.host_copy().tensors}


class ReusingRun:
    """A learner without its processes; `groups` are buffered or may be trained again."""

    def __init__(self, ledger: Ledger, journal: Journal, made: Trainer) -> None:
        self.ledger, self.journal, self.trainer = ledger, journal, made
        self.lags: list[tuple[int, ...]] = []
        self.left_out = 0.0
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
        self.lags.append(batch.reused_lags)
        again = GroupsAgain(len(batch.reused), self.ledger.config.reused_lag)
        metrics = train_within(self.trainer, taken, version=version, max_lag=self.ledger.config.max_lag, again=again)
        self.left_out += metrics.means.get(LEFT_OUT_OF_OLD, 0)
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


@pytest.mark.parametrize(("config", "old"), [(REUSING, None), (BEYOND, OldTokenBound(1, 0.008))])
def test_a_killed_run_ends_at_the_weights_of_one_that_was_not(
    config: LedgerConfig, old: OldTokenBound | None, tied_llama: Path, commands: CommandChannel, tmp_path: Path
) -> None:
    open_trainer = partial(trainer, tied_llama, commands, old_tokens=old)
    with ExitStack() as stack:
        journal = stack.enter_context(Journal.open(tmp_path / FOLDER))
        run = ReusingRun(Ledger(config), journal, stack.enter_context(open_trainer()))
        for _ in range(2):
            run.step()
        run.checkpoint(tmp_path)
        run.step()  # killed behind this step, one that goes on makes two more
        kept = {path: path.read_bytes() for path in (tmp_path / FOLDER).iterdir()}
        while len(run.reused) < STEPS:
            run.step()
        expected = weights(run.trainer)
    assert all(run.reused[2:]), run.reused
    if old is not None:
        assert max(lag for lags in run.lags[3:] for lag in lags) > 1, "otherwise the mask is not seen below"
        assert run.left_out > 0

    steps = logged_steps(tmp_path, version=2)
    with ExitStack() as stack:  # as `learner replay` does
        made = stack.enter_context(open_trainer())
        made.load(tmp_path / "checkpoint-00000002" / "trainer")
        for step in steps:
            batch = step.read()
            again = GroupsAgain(batch.reused, batch.bound_of_reused(config.reused_lag))
            train_within(made, batch.groups, version=batch.version, max_lag=batch.bound(config.max_lag), again=again)
        assert all(torch.equal(value, expected[name]) for name, value in weights(made).items())

    for path, content in kept.items():
        path.write_bytes(content)
    recovered = recover(tmp_path, config=config, resume=True, incarnation=2)
    with ExitStack() as stack:
        journal = stack.enter_context(Journal.open(tmp_path / FOLDER))
        made = stack.enter_context(open_trainer())
        assert recovered.trainer_folder is not None
        made.load(recovered.trainer_folder)
        second = ReusingRun(recovered.ledger, journal, made)
        second.groups = {one.lease_id: one for one in recovered.used_groups()}
        for step in recovered.batches:
            again = GroupsAgain(len(step.reused), config.reused_lag)
            train_within(made, step.read().groups, version=step.version, max_lag=config.max_lag, again=again)
            second.ledger.trained(step.version + 1)
        second.ledger.served_changed(second.ledger.version)
        while second.ledger.version < STEPS:
            second.step()
        assert second.reused == run.reused[3:]
        assert all(torch.equal(value, expected[name]) for name, value in weights(made).items())


def train_within(
    made: Trainer, groups: Sequence[TrajectoryGroup], *, version: int, max_lag: int, again: GroupsAgain
) -> StepMetrics:
    sequences = sequences_of(groups, version=version, max_lag=max_lag, again=again, preset=made.preset)
    return made.train_step(sequences, version=version)
