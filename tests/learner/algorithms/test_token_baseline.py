"""The optimal baseline of each place: numbers by hand, and what makes it the best one."""

import random
from dataclasses import replace

import pytest
import torch

from learner.algorithms.presets.otb import OtbConfig
from learner.algorithms.token_baseline import optimal_token
from tests.learner.algorithms.differences import doubles
from tests.learner.algorithms.steps import floats, integers, random_trajectories, step_of
from tests.learner.algorithms.test_stale_tokens import POLICY, batch_of


def made_of(rewards: list[float], groups: list[int], lengths: list[int], norms: list[float]) -> list[float]:
    sequences = torch.repeat_interleave(torch.arange(len(lengths)), integers(lengths))
    found: list[float] = optimal_token(
        rewards=floats(rewards), groups=integers(groups), sequences=sequences, norms=floats(norms)
    ).tolist()
    return found


def test_each_place_has_a_baseline_by_the_energy_up_to_there() -> None:
    """Group 5: rewards 1 and 0, energies 1, 3, 4 and 3, 4. Baselines 1/4 and 3/7; of the third place one is left.
    Group 2: rewards 2 and 1 with energies 1 and 3: (2 + 3) / 4. Group 8 is one.
    """
    found = made_of([1.0, 2.0, 0.0, 7.0, 1.0], [5, 2, 5, 8, 2], [3, 1, 2, 2, 1], [1, 2, 1, 1, 3, 1, 0.5, 0.5, 3])
    assert found == pytest.approx([3 / 4, 4 / 7, 0, 0.75, -1 / 4, -3 / 7, 0, 0, -0.25])


def test_of_equal_energy_it_is_the_mean_of_those_that_go_on() -> None:
    assert made_of([3.0, 0.0, 1.0], [0, 0, 0], [2, 1, 2], [1.0] * 5) == pytest.approx([5 / 3, 1, -4 / 3, -1 / 3, -1])


def test_rewards_of_tokens_count_from_their_token_on() -> None:
    """To go: 1 - 0.2 - 0.1 = 0.7 and 0.9 against 0 and 0, with energies 1, 2 and 3, 4: baselines 0.175 and 0.3."""
    found = optimal_token(
        rewards=floats([1.0, 0.0]),
        groups=integers([0, 0]),
        sequences=integers([0, 0, 1, 1]),
        norms=floats([1.0, 1.0, 3.0, 1.0]),
        token_rewards=floats([-0.2, -0.1, 0.0, 0.0]),
    )
    assert found.tolist() == pytest.approx([0.525, 0.6, -0.175, -0.3])


def test_nothing_to_compare_and_no_energy_give_exactly_nothing() -> None:
    assert made_of([0.1, 0.1, 0.1], [0, 0, 0], [2, 1, 2], [0.3, 0.1, 0.7, 0.2, 0.9]) == [0.0] * 5
    assert made_of([1.0, 0.0], [0, 0], [1, 1], [0.0, 0.0]) == [0.0, 0.0]
    assert made_of([1.0, 0.0], [0, 0], [0, 0], []) == []


@pytest.mark.parametrize("seed", range(20))
def test_no_other_baseline_of_a_place_has_less_variance(seed: int) -> None:
    """The sum of W (G - B)^2 is least in B where that of W (G - B) is 0, at each place that two trajectories have."""
    step = step_of(random_trajectories(random.Random(seed)))
    norms = step.values.square()
    found = optimal_token(rewards=step.rewards, groups=step.groups, sequences=step.sequences, norms=norms)
    sums: dict[tuple[int, int], float] = {}
    energy, place, last = 0.0, 0, -1
    for sequence, norm, advantage in zip(step.sequences.tolist(), norms.tolist(), found.tolist(), strict=True):
        energy, place = (norm, 0) if sequence != last else (energy + norm, place + 1)
        key = (int(step.groups[sequence]), place)
        sums[key] = sums.get(key, 0.0) + energy * advantage
        last = sequence
    assert list(sums.values()) == pytest.approx([0.0] * len(sums), abs=1e-9)


def test_stale_tokens_give_as_much_energy_as_the_loss_lets_them() -> None:
    """Groups of rewards 1, 0 and 0, 1, of 2 and 3, and 2 and 1 tokens. Behavior 1 nat above at the first token: weight
    e^-1, squared e^-2; a nat below at the third: 1, the cap. Norms 0.5: energies e^-2/2 and 1/2 at the first place.
    """
    preset = OtbConfig(ratio_cap=1.0).preset()
    assert preset.advantages is not None
    assert preset.passes.logit_norms
    batch = batch_of(POLICY + doubles(1, 0, -1, 0, 0, 0, 0, 0), POLICY)
    half = torch.full_like(POLICY, 0.5)
    made = preset.advantages(replace(batch, logit_norms=half)).advantages.tolist()
    old = float(torch.exp(doubles(-2.0)))
    first = old / (old + 1)
    second = (old + 1) / (old + 3)
    assert made == pytest.approx([1 - first, 1 - second, -first, -second, 0, -0.5, 0, 0.5])
