"""From groups to training sequences, and the bound on lag at their door."""

import numpy as np
import pytest

from learner.algorithms.config import BestOfKConfig, GdpoConfig, GigpoConfig, GrpoConfig, OnlineDpoConfig
from learner.algorithms.presets.registry import build_preset
from learner.leases.granting import TaskOrder
from learner.training.batch import ComponentMissing, LagBoundBroken, Teaching, sequences_of
from protocol.trajectories import Trajectory
from tests.learner.samples import group, trajectory

GRPO = build_preset(GrpoConfig())


def test_a_trajectory_becomes_a_sequence_with_its_reward_and_the_lag_of_each_sampled_token() -> None:
    first = group(0, trajectory(3, 3, reward=1.0), trajectory(2, 3, 4, reward=0.0))
    second = group(1, trajectory(4, reward=5.0), trajectory(4, reward=5.0, finish="length"))
    sequences = sequences_of([first, second], version=4, max_lag=2, preset=GRPO)
    assert [sequence.reward for sequence in sequences] == [1.0, 0.0, 5.0, 5.0]
    assert [sequence.group for sequence in sequences] == [0, 0, 1, 1]
    assert [sequence.pair for sequence in sequences] == [-1, -1, -1, -1]
    assert [sequence.truncated for sequence in sequences] == [False, False, False, True]
    assert [sequence.lags.tolist() for sequence in sequences] == [[0, 0, 1, 1], [0, 0, 2, 1, 0], [0, 0, 0], [0, 0, 0]]
    assert [sequence.mixed_versions for sequence in sequences] == [False, True, False, False]
    assert sequences[0].loss_mask.tolist() == [False, False, True, True]
    assert np.array_equal(sequences[0].behavior_logprobs, first.trajectories[0].behavior_logprobs)


def test_of_a_group_only_those_are_taken_that_the_algorithm_selects() -> None:
    rewards = (0.5, 2.0, -1.0, 2.0)
    groups = [group(number, *(trajectory(4, reward=reward) for reward in rewards)) for number in range(2)]
    pairs = sequences_of(groups, version=4, max_lag=0, preset=build_preset(OnlineDpoConfig()))
    assert [(sequence.pair, sequence.reward) for sequence in pairs] == [(0, 2.0), (0, -1.0), (1, 2.0), (1, -1.0)]
    best = sequences_of(groups, version=4, max_lag=0, preset=build_preset(BestOfKConfig()))
    assert [(sequence.pair, sequence.reward) for sequence in best] == [(-1, 2.0), (-1, 2.0)]


def rewarded(**components: float) -> Trajectory:
    made = trajectory(4)
    return made.model_copy(update={"reward": made.reward.model_copy(update={"components": components})})


def test_an_algorithm_has_the_reward_components_that_it_weighs_in_its_own_order() -> None:
    gdpo = build_preset(GdpoConfig(components={"form": 0.5, "right": 1.0}))
    groups = [group(0, rewarded(right=1.0, other=7.0, form=0.25), rewarded(form=0.0, right=0.0))]
    assert [s.components for s in sequences_of(groups, version=4, max_lag=0, preset=gdpo)] == [(0.25, 1.0), (0.0, 0.0)]
    assert [s.components for s in sequences_of(groups, version=4, max_lag=0, preset=GRPO)] == [(), ()]


@pytest.mark.parametrize(("given", "said"), [({}, "gave none"), ({"right": 1.0, "parsed": 0.0}, "gave parsed, right")])
def test_a_component_that_a_reward_lacks_is_named_with_those_that_it_has(given: dict[str, float], said: str) -> None:
    gdpo = build_preset(GdpoConfig(components={"form": 0.5, "right": 1.0}))
    with pytest.raises(ComponentMissing, match=f"environment .* has no form: verifier test {said}.*algo.components"):
        sequences_of([group(0, rewarded(**given))], version=4, max_lag=0, preset=gdpo)


def test_equal_prompts_are_equal_states() -> None:
    groups = [group(0, trajectory(4), trajectory(4)), group(1, trajectory(4))]
    states = [s.turns[0].state for s in sequences_of(groups, version=4, max_lag=0, preset=GRPO)]
    assert states[0] == states[1] == states[2]


def test_each_group_has_its_teacher_by_number() -> None:
    groups = [group(0, trajectory(4), trajectory(4)), group(1, trajectory(4))]
    taught = sequences_of(groups, version=4, max_lag=0, preset=GRPO, teaching=[Teaching(index=2), Teaching()])
    assert [sequence.teacher for sequence in taught] == [2, 2, 0]
    assert [len(sequence.teacher_logprobs) for sequence in taught] == [0, 0, 0]


def test_what_a_teacher_said_goes_with_the_trajectory_that_it_said_it_of() -> None:
    """Of the best and the worst of a group, the third and the first, the logprobs of the third and the first."""
    rewards = (0.0, 0.5, 1.0)
    said = [np.full(3, -float(number), dtype=np.float32) for number in range(3)]
    groups = [group(0, *(trajectory(4, reward=reward) for reward in rewards))]
    taught = sequences_of(
        groups, version=4, max_lag=0, preset=build_preset(OnlineDpoConfig()), teaching=[Teaching(logprobs=said)]
    )
    assert [sequence.teacher_logprobs.tolist() for sequence in taught] == [[-2.0] * 3, [0.0] * 3]
    assert [sequence.teacher for sequence in taught] == [0, 0]


def test_a_token_beyond_the_bound_is_never_let_through() -> None:
    with pytest.raises(LagBoundBroken, match="lags 0 to 3 at version 5; the bound is 0 to 2"):
        sequences_of([group(0, trajectory(2, 5, 5))], version=5, max_lag=2, preset=GRPO)


def test_a_token_of_a_version_that_is_yet_to_come_is_never_let_through() -> None:
    with pytest.raises(LagBoundBroken, match="lags -1 to 0"):
        sequences_of([group(0, trajectory(5, 6))], version=5, max_lag=2, preset=GRPO)


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


def test_a_turn_has_its_own_reward_where_the_algorithm_asks_for_it() -> None:
    gigpo = build_preset(GigpoConfig(turn_rewards=True))
    told = group(0, rewarded(turn_0=0.25, other=1.0))
    (asked,) = sequences_of([told], version=4, max_lag=0, preset=gigpo)
    assert [turn.reward for turn in asked.turns] == [0.25]
    (plain,) = sequences_of([told], version=4, max_lag=0, preset=build_preset(GigpoConfig()))
    assert [turn.reward for turn in plain.turns] == [0.0]
    with pytest.raises(
        ComponentMissing, match=r"for 1 turns has no component turn_0: it has other\. Use an environment"
    ):
        sequences_of([group(0, rewarded(other=1.0))], version=4, max_lag=0, preset=gigpo)
