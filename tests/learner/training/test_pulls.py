"""The pull of each token: the derivative of the loss by its logprob, over a step's updates, by the real trainer."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from learner.algorithms.presets.grpo import GrpoConfig
from learner.training.batch import TrainSequence, sequences_of
from learner.training.config import OptimizerConfig, TrainingConfig
from learner.training.group_pulls import StepPulls, changes_of_groups
from learner.training.pulls import PullSums, TokenPulls
from learner.training.ranks import CommandChannel, Ranks
from learner.training.trainer import Trainer
from tests.learner.samples import group, trajectory


@contextmanager
def trainer(path: Path, commands: CommandChannel, algorithm: GrpoConfig, **training: Any) -> Iterator[Trainer]:
    config = TrainingConfig(optimizer=OptimizerConfig(learning_rate=1e-2), microbatch_tokens=16, **training)
    made = Trainer(path, algorithm=algorithm, config=config, ranks=Ranks(), commands=commands, keeps_pulls=True)
    yield made
    made.close()


def batch(made: Trainer) -> list[TrainSequence]:
    """Of a group with two and three tokens, and one whose rewards are equal, 1 token each."""
    groups = (
        group(0, trajectory(0, 0, reward=1.0, token_id=7), trajectory(0, 0, 0, reward=0.0, token_id=9)),
        group(1, trajectory(0, reward=1.0), trajectory(0, reward=1.0)),
    )
    return sequences_of(groups, version=0, max_lag=0, preset=made.preset)


def pulls_of(made: Trainer) -> tuple[list[TrainSequence], TokenPulls]:
    sequences = batch(made)
    made.train_step(sequences, version=0)
    assert made.pulls is not None
    return sequences, made.pulls


def test_without_a_correction_it_is_the_negative_advantage_by_the_weight_of_the_token(
    tied_llama: Path, commands: CommandChannel
) -> None:
    """Rewards 1 and 0 are centred to 0.5 and -0.5; the step has 7 tokens, of 4 trajectories of 2, 3, 1 and 1."""
    plain = {"correction": "none", "advantage_scale": "none"}
    by_token, by_sequence = GrpoConfig(**plain), GrpoConfig(aggregation="sequence_mean", **plain)
    with trainer(tied_llama, commands, by_token) as made:
        sequences, found = pulls_of(made)
    trained = np.concatenate([each.loss_mask for each in sequences])
    assert found.pulls[trained] == pytest.approx([-0.5 / 7] * 2 + [0.5 / 7] * 3 + [0.0] * 2, abs=1e-7)
    assert found.advantages[trained].tolist() == [0.5, 0.5, -0.5, -0.5, -0.5, 0.0, 0.0]
    assert not found.pulls[~trained].any()
    with trainer(tied_llama, commands, by_sequence) as made:
        _, found = pulls_of(made)
    assert found.pulls[trained] == pytest.approx([-0.5 / 8] * 2 + [0.5 / 12] * 3 + [0.0] * 2, abs=1e-7)


def test_the_pulls_of_all_updates_are_added_and_a_clipped_token_has_none(
    tied_llama: Path, commands: CommandChannel
) -> None:
    """In the second update the good trajectory's ratio is above 1, the bad one's below: no width clips both."""
    narrow = GrpoConfig(correction="none", advantage_scale="none", clip_low=0.0, clip_high=0.0)
    wide = GrpoConfig(correction="none", advantage_scale="none", clip_low=1.0, clip_high=100.0)
    with trainer(tied_llama, commands, narrow, epochs_per_step=2) as made:
        sequences, held = pulls_of(made)
    with trainer(tied_llama, commands, wide, epochs_per_step=2) as made:
        _, free = pulls_of(made)
    trained = np.concatenate([each.loss_mask for each in sequences])
    assert held.clipped is not None
    assert free.clipped is not None
    assert held.clipped[trained].tolist() == [1.0] * 5 + [0.0] * 2
    assert held.pulls[trained] == pytest.approx([-0.5 / 7] * 2 + [0.5 / 7] * 3 + [0.0] * 2, abs=1e-7)
    assert not free.clipped.any()
    assert (np.abs(free.pulls[trained][:5]) > 1.01 * np.abs(held.pulls[trained][:5])).all()


def test_no_number_of_a_step_changes_because_pulls_are_kept(tied_llama: Path, commands: CommandChannel) -> None:
    with trainer(tied_llama, commands, GrpoConfig(), updates_per_step=2) as made:
        kept = made.train_step(batch(made), version=0)
    plain = Trainer(
        tied_llama,
        algorithm=GrpoConfig(),
        config=TrainingConfig(optimizer=OptimizerConfig(learning_rate=1e-2), microbatch_tokens=16, updates_per_step=2),
        ranks=Ranks(),
        commands=commands,
    )
    same = plain.train_step(batch(plain), version=0)
    plain.close()
    assert (kept.loss, kept.grad_norm, kept.behavior_kl) == (same.loss, same.grad_norm, same.behavior_kl)
    assert plain.pulls is None


def test_a_gradient_that_several_ranks_average_counts_once() -> None:
    """Of two ranks the engine doubles the loss, and then averages."""
    sums = PullSums(3, ranks=2)
    logprobs = torch.zeros(2, requires_grad=True)
    sums.watch(logprobs, torch.tensor([2, 0]))
    (2 * (logprobs * torch.tensor([3.0, -5.0])).sum()).backward()  # type: ignore[no-untyped-call]
    found = sums.over_ranks(advantages=torch.zeros(3), clipped=[(torch.tensor([1]), None)])
    assert found.pulls.tolist() == [-5.0, 0.0, 3.0]
    assert found.clipped is None


def step(pulls: list[float], clipped: list[float], *, origins: list[tuple[int, int, int]]) -> StepPulls:
    return StepPulls(
        origins=np.array(origins, dtype=np.int64),
        lengths=np.array([2] * len(origins), dtype=np.int64),
        pulls=np.array(pulls, dtype=np.float32),
        advantages=np.array([-2.0] * len(pulls), dtype=np.float32),
        clipped=np.array(clipped, dtype=np.float32),
        epochs=2,
    )


def test_the_change_of_a_group_is_counted_token_by_token_also_where_another_trajectory_is_trained(
    tmp_path: Path,
) -> None:
    """By hand. The first group's pulls swap their signs; of the second another trajectory is trained."""
    run = step([1.0, -1.0, 0.5, 0.0], [], origins=[(0, 0, 0), (1, 0, 0)])
    now = step([-1.0, 1.0, 0.25, 0.25], [0, 2, 1, 1], origins=[(0, 0, 0), (1, 1, 0)])
    run.save(tmp_path / "run.npz")
    groups = [group(7, trajectory(0, 0)), group(8, trajectory(0, 0, reward=0.25), trajectory(0, 0)), group(9)]
    one, two, none = changes_of_groups(groups, step=3, run=StepPulls.load(tmp_path / "run.npz"), now=now)
    assert (one.pull_change, one.pull_run, one.pull) == (4.0, 2.0, 2.0)
    assert (two.pull_change, two.pull_run, two.pull) == (1.0, 0.5, 0.5)
    assert (none.pull_change, none.pull_run, none.pull, none.advantage) == (0.0, 0.0, 0.0, 0.0)
    assert (one.clipped_share_run, one.clipped_share, two.clipped_share) == (None, 0.5, 0.5)
    assert (one.advantage_run, one.advantage) == (2.0, 2.0)
    assert (two.step, two.lease_id, two.rewards) == (3, 8, (0.25, 1.0))
