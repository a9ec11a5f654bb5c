import math

import pytest
import torch

from learner.algorithms import advantages
from learner.algorithms.config import AdvantageScale


def test_a_group_is_centred_and_divided_by_its_unbiased_deviation() -> None:
    # Mean 0.5; squares 4 x 0.25 over 3 degrees of freedom: deviation sqrt(1/3).
    expected = 0.5 / (math.sqrt(1 / 3) + 1e-6)
    result = advantages.group(rewards=torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=torch.float64), scale="std")
    assert result.tolist() == pytest.approx([expected, -expected, -expected, expected], rel=1e-12)


def test_without_scaling_rewards_are_only_centred() -> None:
    result = advantages.group(rewards=torch.tensor([3.0, 1.0, 2.0]), scale="none")
    assert result.tolist() == [1.0, -1.0, 0.0]


def test_scaled_by_the_mean_a_rare_success_weighs_more() -> None:
    # Mean 0.25: (1 - 0.25) / 0.25 = 3 and -0.25 / 0.25 = -1.
    result = advantages.group(rewards=torch.tensor([1.0, 0.0, 0.0, 0.0]), scale="mean")
    assert result.tolist() == pytest.approx([3.0, -1.0, -1.0, -1.0], rel=1e-5)


def test_scaling_by_a_mean_that_is_not_positive_never_turns_signs_around() -> None:
    result = advantages.group(rewards=torch.tensor([-1.0, -3.0]), scale="mean")
    assert result.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("scale", ["std", "none", "mean"])
@pytest.mark.parametrize("rewards", [[0.7], [0.1] * 7, [0.0, 0.0]])
def test_a_group_without_spread_or_of_one_has_no_advantage(scale: AdvantageScale, rewards: list[float]) -> None:
    assert advantages.group(rewards=torch.tensor(rewards), scale=scale).tolist() == [0.0] * len(rewards)
