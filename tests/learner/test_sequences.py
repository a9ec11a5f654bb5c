"""From groups to training sequences, and the bound on lag at their door."""

import numpy as np
import pytest
import torch

from learner.intake.task_order import TaskOrder
from learner.sequences import LagBoundBroken, sequences_of
from tests.learner.samples import group, trajectory


def centred(rewards: torch.Tensor) -> torch.Tensor:
    return rewards - rewards.mean()


def test_a_trajectory_becomes_a_sequence_with_its_groups_advantage_on_sampled_tokens_only() -> None:
    first = group(0, trajectory(3, 3, reward=1.0), trajectory(2, 3, 4, reward=0.0))
    second = group(1, trajectory(4, reward=5.0), trajectory(4, reward=5.0))
    sequences = sequences_of([first, second], version=4, max_lag=2, advantages=centred)
    assert [sequence.advantages.tolist() for sequence in sequences] == [
        [0, 0, 0.5, 0.5],
        [0, 0, -0.5, -0.5, -0.5],
        [0, 0, 0],
        [0, 0, 0],
    ]
    assert [sequence.lags.tolist() for sequence in sequences] == [[0, 0, 1, 1], [0, 0, 2, 1, 0], [0, 0, 0], [0, 0, 0]]
    assert [sequence.mixed_versions for sequence in sequences] == [False, True, False, False]
    assert sequences[0].loss_mask.tolist() == [False, False, True, True]
    assert np.array_equal(sequences[0].behavior_logprobs, first.trajectories[0].behavior_logprobs)


def test_a_token_beyond_the_bound_is_never_let_through() -> None:
    with pytest.raises(LagBoundBroken, match="lags 0 to 3 at version 5; the bound is 0 to 2"):
        sequences_of([group(0, trajectory(2, 5, 5))], version=5, max_lag=2, advantages=centred)


def test_a_token_of_a_version_that_is_yet_to_come_is_never_let_through() -> None:
    with pytest.raises(LagBoundBroken, match="lags -1 to 0"):
        sequences_of([group(0, trajectory(5, 6))], version=5, max_lag=2, advantages=centred)


def test_every_task_comes_once_an_epoch_in_another_order_and_the_same_after_a_restart() -> None:
    order, again = TaskOrder(count=10, seed=3), TaskOrder(count=10, seed=3)
    epochs = [[order.task_index(epoch * 10 + place) for place in range(10)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert [again.task_index(lease_id) for lease_id in range(29, -1, -1)] == [
        task for epoch in reversed(epochs) for task in reversed(epoch)
    ]


def test_seeds_differ_by_lease_attempt_and_run() -> None:
    seeds = {
        TaskOrder(count=10, seed=seed).lease_seed(lease_id, attempt=attempt)
        for seed in range(3)
        for lease_id in range(3)
        for attempt in range(3)
    }
    assert len(seeds) == 27
    assert all(0 <= seed < 1 << 63 for seed in seeds)
