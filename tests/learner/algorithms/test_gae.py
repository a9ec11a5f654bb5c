import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.algorithms import advantages
from tests.learner.algorithms.steps import floats, integers, random_trajectories, step_of


def gae(
    rewards: list[float], values: list[float], sequences: list[int], *, gamma: float, policy: float, value: float
) -> advantages.Gae:
    return advantages.gae(
        rewards=floats(rewards),
        values=floats(values),
        sequences=integers(sequences),
        gamma=gamma,
        policy_lambda=policy,
        value_lambda=value,
    )


def test_advantages_and_returns_each_have_their_own_lambda() -> None:
    # Deltas from the end: 1 - 0.3 = 0.7; 0.9 x 0.3 - 0.4 = -0.13; 0.9 x 0.4 - 0.5 = -0.14.
    # lambda 0.5, factor 0.45: 0.7; -0.13 + 0.45 x 0.7 = 0.185; -0.14 + 0.45 x 0.185 = -0.05675.
    # lambda 1 for the returns: the discounted rewards 1, 0.9 and 0.81, whatever the values say.
    result = gae([0.0, 0.0, 1.0], [0.5, 0.4, 0.3], [0, 0, 0], gamma=0.9, policy=0.5, value=1.0)
    assert result.advantages.tolist() == pytest.approx([-0.05675, 0.185, 0.7], rel=1e-12)
    assert result.returns.tolist() == pytest.approx([0.81, 0.9, 1.0], rel=1e-12)


def test_a_trajectory_sees_nothing_of_the_one_that_follows_it() -> None:
    # One token each: the advantage is r - V and the return r, although a next value lies beside it.
    result = gae([1.0, 2.0], [0.25, 50.0], [0, 1], gamma=1.0, policy=0.95, value=0.95)
    assert result.advantages.tolist() == [0.75, -48.0]
    assert result.returns.tolist() == [1.0, 2.0]


def test_with_lambda_zero_an_advantage_is_the_one_step_error() -> None:
    result = gae([0.1, 0.2], [1.0, 3.0], [4, 4], gamma=1.0, policy=0.0, value=0.0)
    assert result.advantages.tolist() == pytest.approx([0.1 + 3.0 - 1.0, 0.2 - 3.0], rel=1e-12)
    assert result.returns.tolist() == pytest.approx([0.1 + 3.0, 0.2], rel=1e-12)


def test_the_sum_reaches_over_a_long_trajectory() -> None:
    # Rewards of 1 without discount: the token with k tokens to go, itself included, has k.
    length = 1000
    result = gae([1.0] * length, [0.0] * length, [0] * length, gamma=1.0, policy=1.0, value=1.0)
    assert result.advantages.tolist() == [float(length - at) for at in range(length)]


def test_whitening_changes_the_advantages_only() -> None:
    # Advantages 1 and 3: mean 2, deviation 1.
    rewards, values, sequences = floats([1.0, 3.0]), floats([0.0, 0.0]), integers([0, 1])
    result = advantages.gae(
        rewards=rewards,
        values=values,
        sequences=sequences,
        gamma=1.0,
        policy_lambda=1.0,
        value_lambda=1.0,
        whiten=True,
    )
    assert result.advantages.tolist() == pytest.approx([-1.0, 1.0], rel=1e-5)
    assert result.returns.tolist() == [1.0, 3.0]


def test_the_adaptive_lambda_grows_with_the_trajectory_and_is_never_negative() -> None:
    # 40 tokens: 1 - 1 / (0.05 x 40) = 0.5. 10 tokens: 1 - 1 / 0.5 is negative, so 0.
    result = advantages.length_adaptive_lambda(sequences=integers([0] * 40 + [1] * 10), alpha=0.05)
    assert result.tolist() == pytest.approx([0.5] * 40 + [0.0] * 10)
    # The weights 1, lambda, lambda^2, ... of the errors sum to 1 / (1 - lambda) = alpha x length = 2.
    assert 1 / (1 - float(result[0])) == pytest.approx(2.0)


def test_lambda_may_differ_from_token_to_token() -> None:
    # Values 0, rewards 1, 1 | 1, 1: with lambda 0.5 the first of two tokens has 1.5, with 0 it has 1.
    result = advantages.gae(
        rewards=floats([1.0, 1.0, 1.0, 1.0]),
        values=floats([0.0, 0.0, 0.0, 0.0]),
        sequences=integers([0, 0, 1, 1]),
        gamma=1.0,
        policy_lambda=floats([0.5, 0.5, 0.0, 0.0]),
        value_lambda=1.0,
    )
    assert result.advantages.tolist() == [1.5, 1.0, 1.0, 1.0]
    assert result.returns.tolist() == [2.0, 1.0, 2.0, 1.0]


def test_a_step_without_trained_tokens_has_no_advantages() -> None:
    result = gae([], [], [], gamma=1.0, policy=0.95, value=0.95)
    assert result.advantages.tolist() == []
    assert result.returns.tolist() == []


def backwards(rewards: list[float], values: list[float], sequences: list[int], factor: float) -> list[float]:
    """The recursion A_t = delta_t + factor A_{t+1} as it stands in the paper, one token at a time, gamma 1."""
    result = [0.0] * len(rewards)
    for at in reversed(range(len(rewards))):
        last = at + 1 == len(rewards) or sequences[at + 1] != sequences[at]
        after = 0.0 if last else values[at + 1]
        result[at] = rewards[at] + after - values[at] + (0.0 if last else factor * result[at + 1])
    return result


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10**9))
def test_the_sums_are_those_of_the_recursion(seed: int) -> None:
    step = step_of(random_trajectories(random.Random(seed)))
    rewards, values, sequences = step.token_rewards.tolist(), step.values.tolist(), step.sequences.tolist()
    result = gae(rewards, values, sequences, gamma=1.0, policy=0.9, value=1.0)
    assert result.advantages.tolist() == pytest.approx(backwards(rewards, values, sequences, 0.9), abs=1e-12)
    # With gamma = lambda = 1 values telescope away: the return is the sum of the rewards to come.
    to_go = backwards(rewards, [0.0] * len(rewards), sequences, 1.0)
    assert result.returns.tolist() == pytest.approx(to_go, abs=1e-12)
    assert result.returns.dtype == torch.float64
