"""VCPO: the off-policy baseline of least variance, the trajectory's ratio, and the step's scale, by hand."""

import math
import random

import pytest
import torch
from pydantic import TypeAdapter

from learner.algorithms.advantages import least_variance
from learner.algorithms.policy_loss import sequence_reinforce
from learner.algorithms.preset import Preset
from learner.algorithms.presets.registry import AlgorithmConfig
from learner.algorithms.ratios import effective_share
from tests.learner.algorithms.differences import doubles, logs
from tests.learner.algorithms.steps import floats, integers
from tests.learner.algorithms.test_stale_tokens import POLICY, SEQUENCES, batch_of, slope

ADAPTER: TypeAdapter[AlgorithmConfig] = TypeAdapter(AlgorithmConfig)


def preset(**knobs: object) -> Preset:
    return ADAPTER.validate_python({"type": "vcpo", **knobs}).preset()


def made_of(rewards: list[float], groups: list[int], ratios: list[float], norms: list[float]) -> list[float]:
    found: list[float] = least_variance(
        rewards=floats(rewards),
        groups=integers(groups),
        log_ratios=floats(ratios).log(),
        norms=floats(norms),
        scale="none",
    ).tolist()
    return found


def test_a_trajectory_weighs_by_its_squared_ratio_and_its_norm() -> None:
    """Group 5: weights 2^2 x 3 = 12 and 1 x 4 = 4, rewards 1 and 0: b = 3/4. Group 2: 1/4 x 8 = 2, 9 x 2 = 18, rewards
    3 and 1: b = 24/20. Group 8 is one.
    """
    found = made_of([1, 3, 0, 7, 1], [5, 2, 5, 8, 2], [2, 0.5, 1, 1, 3], [3, 8, 4, 1, 2])
    assert found == pytest.approx([0.25, 1.8, -0.75, 0, -0.2])


def test_it_is_divided_by_the_deviation_of_the_group() -> None:
    """Rewards 1 and 0 deviate by 0.7071."""
    found = least_variance(
        rewards=floats([1, 0]), groups=integers([0, 0]), log_ratios=floats([0, 0]), norms=floats([3, 1]), scale="std"
    )
    assert found.tolist() == pytest.approx([0.25 * 2**0.5, -0.75 * 2**0.5], rel=1e-5)


def test_nothing_to_compare_and_no_norm_give_exactly_nothing() -> None:
    assert made_of([0.1, 0.1], [0, 0], [1, 5], [0.3, 0.1]) == [0.0, 0.0]
    assert made_of([1, 0], [0, 0], [1, 1], [0, 0]) == [0.0, 0.0]
    assert made_of([], [], [], []) == []


@pytest.mark.parametrize("shift", [-2000.0, 2000.0])
def test_ratios_of_any_size_are_compared(shift: float) -> None:
    """Trajectories of a thousand tokens have ratios far beyond what a number holds."""
    found = least_variance(
        rewards=floats([1, 0]),
        groups=integers([0, 0]),
        log_ratios=floats([math.log(2) + shift, shift]),
        norms=floats([3, 4]),
        scale="none",
    )
    assert found.tolist() == pytest.approx([0.25, -0.75])


@pytest.mark.parametrize("seed", range(5))
def test_no_other_baseline_has_less_variance(seed: int) -> None:
    """The sum of W^2 g (R - b)^2 is least where that of W^2 g (R - b) is 0."""
    chance = random.Random(seed)
    ratios, norms = ([chance.uniform(0.1, 3) for _ in range(6)] for _ in range(2))
    found = made_of([chance.random() for _ in range(6)], [0] * 6, ratios, norms)
    assert sum(w * w * g * a for w, g, a in zip(ratios, norms, found, strict=True)) == pytest.approx(0, abs=1e-12)


def test_the_effective_share_of_ratios() -> None:
    """Of 1, 1, 2: 16 / (3 x 6)."""
    assert effective_share(floats([1, 1, 2]).log()) == pytest.approx(16 / 18)
    assert effective_share(floats([0.0] * 5)) == pytest.approx(1)
    assert effective_share(floats([900.0, 0, 0, 0])) == pytest.approx(1 / 4)
    assert effective_share(floats([])) == 1.0


def test_the_loss_is_weighted_by_the_capped_ratio_of_the_trajectory() -> None:
    """Ratios 2 x 1.5 = 3, capped at 2.5; and 0.5."""
    policy = logs(0.2, 0.3, 0.1).requires_grad_()
    made = sequence_reinforce(
        policy_logprobs=policy,
        behavior_logprobs=logs(0.1, 0.2, 0.2),
        advantages=doubles(2, 2, -1),
        sequences=torch.tensor([0, 0, 1]),
        count=2,
        cap=2.5,
    )
    (slopes,) = torch.autograd.grad(made.losses.sum(), policy)
    assert slopes.tolist() == pytest.approx([-5, -5, 0.5])


@pytest.mark.parametrize(("rule", "power"), [("sqrt", 0.5), ("linear", 1.0), ("none", 0.0)])
def test_a_step_is_as_small_as_its_effective_share_says(rule: str, power: float) -> None:
    """Trajectories of 2, 3, 2 and 1 tokens, of which the last is 1 nat more likely now: ratios 1, 1, 1, e."""
    made_by = preset(step_scale=rule)
    assert made_by.advantages is not None
    behavior = POLICY - torch.where(SEQUENCES == 3, 1.0, 0.0)
    made = made_by.advantages(batch_of(behavior, POLICY))
    share = (3 + math.e) ** 2 / (4 * (3 + math.e**2))
    assert made.means["effective_trajectory_share"] == pytest.approx(share)
    assert made.step_scale == pytest.approx(share**power)


def test_fresh_trajectories_take_a_whole_step() -> None:
    made_by = preset()
    assert made_by.advantages is not None
    made = made_by.advantages(batch_of(POLICY, POLICY))
    assert made.step_scale == pytest.approx(1)
    assert bool((slope(made_by, POLICY) != 0).all())
