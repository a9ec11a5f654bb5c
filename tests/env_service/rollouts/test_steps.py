"""Contents of an environment's step: nonsense costs its own trajectory alone, as the step is refused by itself."""

import math

import numpy as np
import pytest

from env_service.environments.interface import Step
from env_service.rollouts.conversation import Nonsense, checked


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf, np.float32("nan"), "1.0", None])
def test_a_reward_that_is_no_finite_number_is_nonsense(reward: float) -> None:
    with pytest.raises(Nonsense, match="as its reward, expected a finite number"):
        checked(Step(stop="solved", reward=reward), plain=True)


def test_a_metric_that_is_no_finite_number_is_named() -> None:
    with pytest.raises(Nonsense, match="nan as its depth, expected a finite number"):
        checked(Step(stop="solved", metrics={"depth": math.nan}), plain=True)


@pytest.mark.parametrize("reward", [1, 0.5, True, np.float32(0.5), np.int64(1)])
def test_numbers_of_any_kind_are_rewards(reward: float) -> None:
    assert checked(Step(stop="solved", reward=reward), plain=True).reward == reward
