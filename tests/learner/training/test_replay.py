"""A resumed run trains its logged batches again with the same losses, by the real trainer, journal and checkpoint."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from learner.algorithms.old_tokens import OldTokenBound
from learner.algorithms.presets.grpo import GrpoConfig
from learner.journal.checkpoints import Checkpoints
from learner.journal.journal import FOLDER, Journal
from learner.ledger import Batch, Ledger
from learner.recovery import recover
from learner.training.batch import sequences_of
from learner.training.config import OptimizerConfig, TrainingConfig
from learner.training.ranks import CommandChannel, Ranks
from learner.training.step import StepMetrics
from learner.training.trainer import Trainer
from protocol.trajectories import TrajectoryGroup
from tests.learner.samples import LEDGER
from tests.learner.training.tiny_model import random_group

CONFIG = TrainingConfig(optimizer=OptimizerConfig(learning_rate=1e-2), microbatch_tokens=32)


IN_PARTS = CONFIG.model_copy(update={"partial_batches": True})


@contextmanager
def trainer(
    path: Path,
    commands: CommandChannel,
    *,
    config: TrainingConfig = CONFIG,
    old_tokens: OldTokenBound | None = None,
) -> Iterator[Trainer]:
    made = Trainer(path, algorithm=GrpoConfig(), config=config, ranks=Ranks(), commands=commands, old_tokens=old_tokens)
    yield made
    made.close()


def train(made: Trainer, groups: list[TrajectoryGroup], *, version: int) -> StepMetrics:
    sequences = sequences_of(tuple(groups), version=version, max_lag=LEDGER.max_lag, preset=made.preset)
    return made.train_step(sequences, version=version)


def test_replayed_losses_are_those_of_the_first_time(
    tied_llama: Path, commands: CommandChannel, tmp_path: Path
) -> None:
    ledger, losses, norms = Ledger(LEDGER), [], []
    ledger.served_changed(0)
    with Journal.open(tmp_path / FOLDER) as journal, trainer(tied_llama, commands) as made:
        checkpoints = Checkpoints(tmp_path, keep=2, journal=journal)
        groups: dict[int, TrajectoryGroup] = {}
        for version in range(5):
            for grant in ledger.grant(now=0.0, holder="e", room=100):
                groups[grant.lease_id] = random_group(grant.lease_id, version=version)
                journal.append_group(groups[grant.lease_id])
                ledger.accept(lease_id=grant.lease_id, attempt=grant.attempt, oldest_version=version, size=1)
            batch = ledger.take(now=0.0)
            assert isinstance(batch, Batch)
            journal.append_batch(version=version, lease_ids=batch.lease_ids)
            metrics = train(made, [groups.pop(lease_id) for lease_id in batch.lease_ids], version=version)
            losses.append(metrics.loss)
            norms.append(metrics.grad_norm)
            ledger.trained(version + 1)
            ledger.served_changed(version + 1)
            if version == 1:
                snapshot = ledger.snapshot()
                journal.rotate(version=2, groups=groups.values())
                checkpoints.write(version=2, ledger=snapshot, save_trainer=made.save)

    recovered = recover(tmp_path, config=LEDGER, resume=True, incarnation=2)
    assert recovered.trainer_folder is not None
    with trainer(tied_llama, commands) as made:
        made.load(recovered.trainer_folder)
        again = [train(made, list(batch.read().groups), version=batch.version) for batch in recovered.batches]
    assert [batch.version for batch in recovered.batches] == [2, 3, 4]
    assert [metrics.loss for metrics in again] == pytest.approx(losses[2:], abs=1e-6)
    assert [metrics.grad_norm for metrics in again] == pytest.approx(norms[2:], rel=1e-6)
    assert any(abs(loss) > 1e-4 for loss in losses)


def test_a_step_that_was_begun_when_the_learner_died_is_begun_anew_and_is_the_same(
    tied_llama: Path, commands: CommandChannel, tmp_path: Path
) -> None:
    """It stands nowhere but in the journal's groups; what came of it early or late, before or after, is equal bits."""
    steps = [[random_group(3 * version + number, version=version) for number in range(3)] for version in range(2)]
    taken = [sequences_of(step, version=v, max_lag=1, preset=GrpoConfig().preset()) for v, step in enumerate(steps)]
    with trainer(tied_llama, commands, config=IN_PARTS) as made:
        made.train_step(taken[0], version=0)
        made.save(tmp_path / "checkpoint")
        made.begin_step(taken[1][:6], version=1)
        assert made.train_step(taken[1], version=1).microbatches > 1
        expected = {each.name: each.value for each in made.host_copy().tensors}
    with trainer(tied_llama, commands, config=IN_PARTS) as made:
        made.load(tmp_path / "checkpoint")
        made.begin_step(taken[1][:3] + taken[1][6:], version=1)  # and it dies
    with trainer(tied_llama, commands, config=IN_PARTS) as made:
        made.load(tmp_path / "checkpoint")
        made.train_step(taken[1], version=1)
        for each in made.host_copy().tensors:
            assert each.value.equal(expected[each.name]), each.name
