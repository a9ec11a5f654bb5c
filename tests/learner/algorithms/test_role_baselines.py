"""Baselines of roles: numbers by hand, and what is carried from step to step."""

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from learner.algorithms.preset import Advantages, CarriedState, ScoredBatch
from learner.algorithms.presets.rae import RaeConfig
from learner.algorithms.role_baselines import RoleAdvantages, by_role
from learner.algorithms.shaping import RunningMoments
from tests.learner.algorithms.steps import floats, integers
from tests.learner.algorithms.test_stale_tokens import POLICY, batch_of

FIRST, SECOND = 7, -3


def of_roles(rewards: list[float], roles: list[int], before: dict[int, float], decay: float = 0.5) -> RoleAdvantages:
    return by_role(rewards=floats(rewards), roles=integers(roles), baselines=before, decay=decay)


def test_a_reward_counts_against_what_its_role_had_before_the_step() -> None:
    """First player: 0.5 before, rewards 1, 0, 1, 1 of mean 0.75: 0.5^4 0.5 + (1 - 0.5^4) 0.75 = 0.734375 after. Second:
    nothing before, one reward of -1: -0.5 after. Role 9 has not played, and keeps its own.
    """
    made = of_roles([1.0, -1.0, 0.0, 1.0, 1.0], [FIRST, SECOND, FIRST, FIRST, FIRST], {FIRST: 0.5, 9: 0.25})
    assert made.advantages.tolist() == [0.5, -1.0, -0.5, 0.5, 0.5]
    assert made.baselines == pytest.approx({FIRST: 0.734375, SECOND: -0.5, 9: 0.25})


def test_equal_rewards_move_a_baseline_as_one_game_after_the_other_does() -> None:
    one_by_one = 0.2
    for _ in range(6):
        one_by_one = 0.95 * one_by_one + 0.05 * 0.8
    assert of_roles([0.8] * 6, [FIRST] * 6, {FIRST: 0.2}, decay=0.95).baselines == pytest.approx({FIRST: one_by_one})


def test_the_order_of_a_steps_games_changes_nothing() -> None:
    rewards, roles = [1.0, -1.0, 0.3, 0.7, 0.1], [FIRST, SECOND, FIRST, SECOND, FIRST]
    order = random.Random(1).sample(range(5), 5)
    made, shuffled = (
        of_roles([rewards[i] for i in places], [roles[i] for i in places], {FIRST: 0.1}) for places in (range(5), order)
    )
    assert shuffled.advantages.tolist() == made.advantages[torch.tensor(order)].tolist()
    assert shuffled.baselines == made.baselines


def test_without_decay_the_baseline_is_the_mean_of_the_step_before() -> None:
    assert of_roles([1.0, 0.0], [FIRST, FIRST], {FIRST: 9.0}, decay=0.0).baselines == {FIRST: 0.5}


def advantages_of(batch: ScoredBatch, **knobs: object) -> Advantages:
    preset = RaeConfig.model_validate({"baseline_decay": 0.5, **knobs}).preset()
    assert preset.advantages is not None
    return preset.advantages(batch)


def per_trajectory(made: Advantages) -> Tensor:
    """Of 2, 3, 2 and 1 tokens."""
    return made.advantages[torch.tensor([0, 2, 5, 7])]


def test_the_next_step_starts_from_the_baselines_that_this_one_left() -> None:
    """Rewards 1, 0, 0, 1; the first and the last trajectory are the first player's. 0.5^2 0 + 0.75 x 1 = 0.75."""
    batch = replace(batch_of(POLICY, POLICY), roles=integers([FIRST, SECOND, SECOND, FIRST]))
    made = advantages_of(batch)
    assert per_trajectory(made).tolist() == [1.0, 0.0, 0.0, 1.0]
    assert made.carried is not None
    assert made.carried.baselines == {FIRST: 0.75, SECOND: 0.0}
    assert made.means == {"role_baseline_gap": 0.75}
    following = advantages_of(replace(batch, carried=made.carried))
    assert per_trajectory(following).tolist() == [0.25, 0.0, 0.0, 0.25]


def test_what_else_is_carried_goes_on_beside_the_baselines() -> None:
    """Normalised by the deviation of 0, 0, 1 and 1, a half: rewards of 2, less 0.75; the next baseline is 1.6875."""
    batch = replace(
        batch_of(POLICY, POLICY),
        roles=integers([FIRST, SECOND, SECOND, FIRST]),
        carried=CarriedState(kl_coefficient=0.3, baselines={FIRST: 0.75}),
    )
    made = advantages_of(batch, reward_normalisation="scale")
    assert per_trajectory(made).tolist() == pytest.approx([1.25, 0.0, 0.0, 1.25], abs=1e-5)
    assert made.carried is not None
    assert made.carried.kl_coefficient == 0.3
    assert made.carried.rewards == RunningMoments(count=4, mean=0.5, squares=1.0)
    assert made.carried.baselines == pytest.approx({FIRST: 1.6875, SECOND: 0.0}, abs=1e-5)


def test_baselines_that_are_not_finite_are_not_carried() -> None:
    assert CarriedState(baselines={FIRST: 0.5}).is_finite
    assert not CarriedState(baselines={FIRST: 0.5, SECOND: float("nan")}).is_finite
