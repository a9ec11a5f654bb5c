import math

import pytest
import torch
from torch import Tensor

from learner.algorithms import advantages
from learner.algorithms.knobs import AdvantageScale
from tests.learner.algorithms.steps import floats, integers

SCALES: tuple[AdvantageScale, ...] = ("std", "none", "mean", "batch")


def one_group(*rewards: float, scale: AdvantageScale) -> list[float]:
    values: list[float] = advantages.group(
        rewards=floats(rewards), groups=integers([3] * len(rewards)), scale=scale
    ).tolist()
    return values


def test_a_group_is_centred_and_divided_by_its_unbiased_deviation() -> None:
    # Mean 0.5; squares 4 x 0.25 over 3 degrees of freedom: deviation sqrt(1/3).
    expected = 0.5 / (math.sqrt(1 / 3) + 1e-6)
    result = one_group(1.0, 0.0, 0.0, 1.0, scale="std")
    assert result == pytest.approx([expected, -expected, -expected, expected], rel=1e-12)


def test_without_scaling_rewards_are_only_centred() -> None:
    assert one_group(3.0, 1.0, 2.0, scale="none") == [1.0, -1.0, 0.0]


def test_scaled_by_the_mean_a_rare_success_weighs_more() -> None:
    # Mean 0.25: (1 - 0.25) / 0.25 = 3 and -0.25 / 0.25 = -1.
    assert one_group(1.0, 0.0, 0.0, 0.0, scale="mean") == pytest.approx([3.0, -1.0, -1.0, -1.0], rel=1e-5)


def test_scaled_over_the_batch_groups_of_little_spread_stay_small() -> None:
    """Groups 1, 0 and 0.5, 0.4: centred 0.5, -0.5, 0.05, -0.05. All four: mean 0.475, squares 0.275625 + 0.225625 +
    0.000625 + 0.005625 = 0.5075, over three: deviation sqrt(0.1691667) = 0.4112987.
    """
    found = advantages.group(rewards=floats([1.0, 0.5, 0.0, 0.4]), groups=integers([0, 1, 0, 1]), scale="batch")
    assert found.tolist() == pytest.approx([1.215661, 0.121566, -1.215661, -0.121566], abs=1e-5)


def test_scaling_by_a_mean_that_is_not_positive_never_turns_signs_around() -> None:
    assert one_group(-1.0, -3.0, scale="mean") == [0.0, 0.0]
    assert one_group(-1.0, 1.0, scale="mean") == [0.0, 0.0]


def test_a_mean_that_is_positive_by_rounding_only_scales_nothing() -> None:
    # In float64 the sum of these is 5.6e-17; advantages of 0.1 / 1e-6 would be an accident.
    assert sum([0.1, 0.1, 0.1, -0.3]) > 0
    assert one_group(-0.3, 0.1, 0.1, 0.1, scale="mean") == [0.0] * 4


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("rewards", [[0.7], [0.1] * 7, [0.0, 0.0], [1e9 / 3] * 3])
def test_a_group_without_spread_or_of_one_has_no_advantage(scale: AdvantageScale, rewards: list[float]) -> None:
    assert one_group(*rewards, scale=scale) == [0.0] * len(rewards)


@pytest.mark.parametrize("scale", SCALES)
def test_rewards_that_differ_by_rounding_have_next_to_no_advantage(scale: AdvantageScale) -> None:
    # 0.1 + 0.2 is the number after 0.3; the 1e-6 in the divisor keeps the gap of 6e-17 from becoming an advantage of 1.
    assert one_group(0.1 + 0.2, 0.3, scale=scale) == pytest.approx([0.0, 0.0], abs=1e-9)


def test_groups_of_different_sizes_may_lie_interleaved() -> None:
    # Group 9: 1, 0, 2 with mean 1 and deviation 1. Group 4: 5, 7 with mean 6 and deviation sqrt(2). Group 0: one.
    rewards, groups = floats([1.0, 5.0, 0.0, 8.0, 7.0, 2.0]), integers([9, 4, 9, 0, 4, 9])
    plain = advantages.group(rewards=rewards, groups=groups, scale="none")
    assert plain.tolist() == [0.0, -1.0, -1.0, 0.0, 1.0, 1.0]
    scaled = advantages.group(rewards=rewards, groups=groups, scale="std")
    root = math.sqrt(2)
    assert scaled.tolist() == pytest.approx([0.0, -1 / root, -1.0, 0.0, 1 / root, 1.0], rel=1e-5)
    assert scaled.dtype == torch.float64


def test_leaving_one_out_compares_a_reward_with_the_mean_of_the_others() -> None:
    # 1 - (2 + 6) / 2 = -3; 2 - (1 + 6) / 2 = -1.5; 6 - (1 + 2) / 2 = 4.5. The group of one has nobody to compare with.
    result = advantages.leave_one_out(rewards=floats([1.0, 2.0, 50.0, 6.0]), groups=integers([0, 0, 1, 0]))
    assert result.tolist() == pytest.approx([-3.0, -1.5, 0.0, 4.5], rel=1e-12)


def test_leaving_one_out_gives_equal_rewards_exactly_nothing() -> None:
    result = advantages.leave_one_out(rewards=floats([0.1] * 7), groups=integers([0] * 7))
    assert result.tolist() == [0.0] * 7


def batch(rewards: list[float], groups: list[int], sequences: list[int], baseline: bool, *tokens: float) -> Tensor:
    return advantages.batch(
        rewards=floats(rewards),
        groups=integers(groups),
        sequences=integers(sequences),
        subtract_group_mean=baseline,
        token_rewards=floats(tokens) if tokens else None,
    )


def test_a_batch_is_normalised_over_tokens_not_over_trajectories() -> None:
    # Tokens 1, -1, -1, -1: mean -0.5, variance (2.25 + 3 x 0.25) / 4 = 0.75; 1.5 / sqrt(0.75) = sqrt(3).
    result = batch([1.0, -1.0], [0, 1], [0, 1, 1, 1], False)
    third = -1 / math.sqrt(3)
    assert result.tolist() == pytest.approx([math.sqrt(3), third, third, third], rel=1e-5)


@pytest.mark.parametrize("baseline", [False, True])
def test_a_token_of_a_batch_is_credited_with_what_comes_from_it_on(baseline: bool) -> None:
    # To go: 1 - 0.1 - 0.2 = 0.7, 1 - 0.2 = 0.8, and 0. Mean 0.5; variance (0.04 + 0.09 + 0.25) / 3. The baseline is the
    # same 0.5 for all of them here, and the normalisation takes it out again.
    result = batch([1.0, 0.0], [5, 5], [0, 0, 1], baseline, -0.1, -0.2, 0.0)
    deviation = math.sqrt(0.38 / 3)
    assert result.tolist() == pytest.approx([0.2 / deviation, 0.3 / deviation, -0.5 / deviation], rel=1e-5)


def test_the_group_baseline_of_a_batch_takes_out_how_hard_a_task_is() -> None:
    # Less the means 0.5 and 10.5: 0.5, -0.5, 0.5, -0.5, with deviation 0.5. Without it the easy task wins over all.
    rewards, groups, sequences = [1.0, 0.0, 11.0, 10.0], [0, 0, 1, 1], [0, 1, 2, 3]
    assert batch(rewards, groups, sequences, True).tolist() == pytest.approx([1.0, -1.0, 1.0, -1.0], rel=1e-5)
    assert batch(rewards, groups, sequences, False).sign().tolist() == [-1.0, -1.0, 1.0, 1.0]


def test_a_trajectory_without_trained_tokens_does_not_move_the_normalisation_of_a_batch() -> None:
    # Trajectory 1 failed and has no token here: its reward of 100 is in no mean.
    assert batch([1.0, 100.0, -1.0], [0, 1, 2], [0, 2], False).tolist() == pytest.approx([1.0, -1.0], rel=1e-5)


def test_a_batch_of_equal_rewards_or_of_one_token_or_of_none_has_no_advantage() -> None:
    assert batch([0.1, 0.1], [0, 1], [0, 0, 1, 1, 1, 1, 1], False).tolist() == [0.0] * 7
    assert batch([0.3], [0], [0], False).tolist() == [0.0]
    assert batch([0.3, 0.4], [0, 1], [], False).tolist() == []


def test_components_are_told_apart_where_their_sum_is_not() -> None:
    # Two groups of two. In the first only component 0 differs, in the second both do. 0.5 / sqrt(0.5) = sqrt(0.5) per
    # component that differs: sums +-sqrt(0.5) and +-2 sqrt(0.5). Mean 0, variance (2 x 0.5 + 2 x 2) / 4 = 1.25.
    components = floats([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0]).reshape(4, 2)
    groups = integers([0, 0, 1, 1])
    result = advantages.per_component(components=components, groups=groups, weights=[1.0, 1.0])
    one, both = math.sqrt(0.5 / 1.25), math.sqrt(2 / 1.25)
    assert result.tolist() == pytest.approx([one, -one, both, -both], rel=1e-5)
    summed = advantages.group(rewards=components.sum(dim=1), groups=groups, scale="std")
    assert float(summed[0]) == pytest.approx(float(summed[2]), rel=1e-5)


def test_a_component_of_weight_zero_has_no_say() -> None:
    components = floats([1.0, 0.0, 0.0, 9.0, 1.0, 5.0, 0.0, 7.0]).reshape(4, 2)
    result = advantages.per_component(components=components, groups=integers([0, 0, 1, 1]), weights=[2.0, 0.0])
    assert result.tolist() == pytest.approx([1.0, -1.0, 1.0, -1.0], rel=1e-5)


def test_trajectories_that_are_not_trained_stay_out_of_the_normalisation_of_components() -> None:
    # Normalised in the group: sqrt(0.5) x (1, -1, 1, -1). Of the first three the mean is m = sqrt(0.5) / 3 and the
    # variance 0.5 - m^2 = 0.5 x 8 / 9: (1 - 1/3) / sqrt(8 / 9) = 1 / sqrt(2) and (-4/3) / sqrt(8 / 9) = -sqrt(2).
    result = advantages.per_component(
        components=floats([1.0, 0.0, 1.0, 0.0]).reshape(4, 1),
        groups=integers([0, 0, 1, 1]),
        weights=[1.0],
        counted=torch.tensor([True, True, True, False]),
    )
    root = math.sqrt(2)
    assert result.tolist() == pytest.approx([1 / root, -root, 1 / root, 0.0], rel=1e-5)


def test_without_components_there_is_no_advantage() -> None:
    result = advantages.per_component(components=floats([]).reshape(3, 0), groups=integers([0, 0, 0]), weights=[])
    assert result.tolist() == [0.0, 0.0, 0.0]


def test_a_teacher_asks_for_what_it_finds_likelier_than_the_policy_does() -> None:
    # ln(0.5 / 0.25) = ln 2; ln(0.1 / 0.2) = -ln 2; no difference, no advantage.
    policy = floats([0.25, 0.2, 0.3]).log().requires_grad_()
    result = advantages.teacher(teacher_logprobs=floats([0.5, 0.1, 0.3]).log(), policy_logprobs=policy)
    assert result.tolist() == pytest.approx([math.log(2), -math.log(2), 0.0])
    assert not result.requires_grad


def test_the_expected_advantage_of_a_teacher_is_minus_the_reverse_divergence() -> None:
    policy, teacher = floats([0.7, 0.2, 0.1]), floats([0.6, 0.25, 0.15])
    expected = (policy * advantages.teacher(teacher_logprobs=teacher.log(), policy_logprobs=policy.log())).sum()
    assert float(expected) == pytest.approx(-float((policy * (policy / teacher).log()).sum()), rel=1e-12)
