"""Baselines by lengths, rewards of sets of answers, and of implied ones: numbers by hand, and by counting all sets."""

import itertools
import math
import random

import numpy as np
import pytest
import torch
from torch import Tensor

from learner.algorithms import advantages
from learner.algorithms.presets.gvpo import GvpoConfig
from tests.learner.algorithms.differences import central_differences, gradient
from tests.learner.algorithms.steps import floats, integers
from tests.learner.algorithms.test_stale_tokens import POLICY, SEQUENCES, loss_at


def weighted(rewards: list[float], groups: list[int], lengths: list[int]) -> list[float]:
    made: list[float] = advantages.length_weighted(
        rewards=floats(rewards), groups=integers(groups), lengths=integers(lengths)
    ).tolist()
    return made


def test_a_baseline_by_lengths_counts_a_reward_once_for_each_token() -> None:
    """Group 7: (1 x 2 + 0 x 6 + 3 x 2) / 10 = 0.8. Group 2: (1 x 1 + 0 x 3) / 4 = 0.25. Group 5 is one."""
    found = weighted([1.0, 1.0, 0.0, 9.0, 0.0, 3.0], [7, 2, 7, 5, 2, 7], [2, 1, 6, 4, 3, 2])
    assert found == pytest.approx([0.2, 0.75, -0.8, 0.0, -0.25, 2.2])


def test_over_the_tokens_of_a_group_advantages_by_lengths_sum_to_nothing() -> None:
    rewards, lengths = [0.3, 0.9, -1.0, 4.0], [5, 1, 9, 2]
    found = weighted(rewards, [0] * 4, lengths)
    assert np.dot(found, lengths) == pytest.approx(0, abs=1e-12)
    shifted = weighted([reward + 5 for reward in rewards], [0] * 4, lengths)
    assert shifted == pytest.approx(found)


@pytest.mark.parametrize("lengths", [[3, 3, 3], [1, 5, 2], [0, 0, 0]])
def test_equal_rewards_have_exactly_no_advantage_whatever_the_lengths(lengths: list[int]) -> None:
    assert weighted([0.1] * 3, [0] * 3, lengths) == [0.0] * 3


def test_a_group_without_tokens_has_no_advantage_and_one_trajectory_without_them_does_not_count() -> None:
    assert weighted([1.0, 0.0], [0, 0], [0, 0]) == [0.0, 0.0]
    assert weighted([5.0, 1.0, 0.0], [0, 0, 0], [0, 1, 1]) == pytest.approx([4.5, 0.5, -0.5])


def test_of_equal_lengths_it_is_the_mean() -> None:
    rewards, groups = [1.0, 0.0, 0.0, 2.0, 7.0], [0, 0, 0, 1, 1]
    plain = advantages.group(rewards=floats(rewards), groups=integers(groups), scale="none")
    assert weighted(rewards, groups, [4] * 5) == pytest.approx(plain.tolist())


def sets_of(right: list[bool], groups: list[int], k: int) -> list[float]:
    made: list[float] = advantages.pass_at_k(right=torch.tensor(right), groups=integers(groups), k=k).tolist()
    return made


def test_sets_of_two_of_four_answers() -> None:
    """Two of four are right: of 6 sets one is wrong, so the mean is 5/6, the deviation sqrt(5/36). A right answer: 1/6
    over it, 1/sqrt(5). A wrong one is in 3 sets, one of them wrong: 2/3 - 5/6, -1/sqrt(5). One of four right, in group
    3: 3 wrong sets of 6, mean and deviation 1/2; right 1; a wrong one 1/3 - 1/2 over 1/2, -1/3.
    """
    root = 1 / math.sqrt(5)
    expected = [root, -1 / 3, 1.0, root, -root, -1 / 3, -1 / 3, -root]
    found = sets_of([True, False, True, True, False, False, False, False], [8, 3, 3, 8, 8, 3, 3, 8], 2)
    assert found == pytest.approx(expected)


@pytest.mark.parametrize(
    ("right", "k"),
    [
        ([True, True, True], 2),
        ([False, False, False], 2),
        ([True, True, True, False], 2),  # each set of two has a right one
        ([True, True, False, False], 3),
        ([True], 4),
        ([False], 4),
        ([True, False], 4),  # the one set is all of the group
    ],
)
def test_where_all_sets_are_right_or_none_is_nothing_is_learned(right: list[bool], k: int) -> None:
    assert sets_of(right, [0] * len(right), k) == [0.0] * len(right)


@pytest.mark.parametrize("seed", range(8))
def test_the_advantage_is_that_of_all_sets_by_count(seed: int) -> None:
    chance = random.Random(seed)
    size = chance.randint(2, 9)
    k = chance.randint(1, size)
    right = [chance.random() < 0.3 for _ in range(size)]
    sets = list(itertools.combinations(range(size), k))
    rewards = np.array([any(right[index] for index in one) for one in sets], dtype=float)
    deviation = rewards.std()
    normal = np.zeros(len(sets)) if deviation == 0 else (rewards - rewards.mean()) / deviation
    expected = [normal[[index in one for one in sets]].mean() for index in range(size)]
    assert sets_of(right, [0] * size, k) == pytest.approx(expected, abs=1e-9)
    assert sum(sets_of(right, [0] * size, k)) == pytest.approx(0, abs=1e-9)


def test_a_set_of_one_is_the_group_with_the_deviation_of_the_population() -> None:
    # Mean 1/4, deviation sqrt(3)/4: 3/sqrt(3) and -1/sqrt(3).
    third = 1 / math.sqrt(3)
    assert sets_of([True, False, False, False], [0] * 4, 1) == pytest.approx([3 * third, -third, -third, -third])


def test_group_variance_takes_off_what_the_policy_implies_already() -> None:
    """Rewards 1, 0, 2: 0, -1, 1 about the mean. Log ratios 1, -2, 4: 0, -3, 3, times 0.2. Group 6 is one."""
    made = advantages.group_variance(
        rewards=floats([1.0, 0.0, 5.0, 2.0]),
        groups=integers([4, 4, 6, 4]),
        log_ratios=floats([1.0, -2.0, 3.0, 4.0]),
        beta=0.2,
    )
    assert made.tolist() == pytest.approx([0.0, -0.4, 0.0, 0.4])


@pytest.mark.parametrize("beta", [0.1, 1.0])
def test_a_gvpo_step_has_the_gradient_of_its_squares_over_trajectories(beta: float) -> None:
    """By finite differences of the squares over 2 beta, by which each log p of a trajectory of several tokens moves its
    log ratio; the sequences have 2, 3, 2 and 1 tokens in two groups of two, and each is a quarter of the sum.
    """
    behavior = POLICY + floats([0.2, -0.1, 0.3, 0.0, -0.2, 0.1, 0.0, 0.4])
    preset = GvpoConfig(beta=beta).preset()

    def objective(policy: Tensor) -> Tensor:
        rewards = np.array([1.0, 0.0, 0.0, 1.0])
        ratios = np.bincount(SEQUENCES.numpy(), weights=(policy - behavior).numpy(), minlength=4)
        errors = rewards - beta * ratios
        squares = sum((part - part.mean()) ** 2 @ np.ones(2) for part in (errors[:2], errors[2:]))
        return torch.tensor(squares / (2 * beta) / 4, dtype=torch.float64)

    found = gradient(lambda policy: loss_at(preset, policy, behavior=behavior, proximal=POLICY), POLICY)
    torch.testing.assert_close(found, central_differences(objective, POLICY), rtol=1e-5, atol=1e-7)
