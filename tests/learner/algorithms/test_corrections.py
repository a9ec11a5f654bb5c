import itertools
import math
from typing import get_args

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from learner.algorithms import ratios
from learner.algorithms.policy_loss import token_weights
from learner.algorithms.ratios import Gap, RatioRules, RatioWindow, Weight
from tests.learner.algorithms.differences import doubles, gradient, logs

ICEPOP = RatioWindow(low=0.5, high=5.0)
# w of six tokens: 4 and 0.3 of trajectory 0; 2, 2 and 2 of trajectory 1; 0.9 of trajectory 2.
RATIOS = doubles(4, 0.3, 2, 2, 2, 0.9)
SEQUENCES = torch.tensor([0, 0, 1, 1, 1, 2])
BEHAVIOR = logs(0.1, 0.5, 0.2, 0.2, 0.2, 0.4)
PROXIMAL = BEHAVIOR + RATIOS.log()
GAP = Gap(PROXIMAL, BEHAVIOR, SEQUENCES, 3)
ADVANTAGES = doubles(1, 1, 1, -1, -1, -1)


def correct(rules: RatioRules, part: Tensor | None = None) -> ratios.TokenCorrections:
    index = torch.arange(len(RATIOS)) if part is None else part
    gap = Gap(PROXIMAL[index], BEHAVIOR[index], SEQUENCES[index], 3)
    return ratios.correct(gap, rules, advantages=ADVANTAGES[index])


def kept_lengths(rules: RatioRules) -> NDArray[np.int64]:
    """Number of tokens of each trajectory that pass the filters, [3]."""
    return np.bincount(SEQUENCES[ratios.kept_tokens(GAP, rules)], minlength=3).astype(np.int64)


def test_truncation_weights_a_token_by_how_much_likelier_the_learner_finds_it_up_to_the_cap() -> None:
    # Learner against behavior: 0.2 / 0.4 = 0.5; 0.3 / 0.2 = 1.5; 0.9 / 0.1 = 9, capped.
    gap = Gap(logs(0.2, 0.3, 0.9), logs(0.4, 0.2, 0.1), torch.tensor([0, 0, 0]), 1)
    corrected = ratios.correct(gap, RatioRules(), advantages=doubles(1, 1, 1))
    assert corrected.weights.tolist() == pytest.approx([0.5, 1.5, 2.0])
    assert corrected.bounded.tolist() == [False, False, True]


def test_the_token_mask_rejects_by_the_ratio_of_learner_to_behavior_and_not_by_its_inverse() -> None:
    # The inverse ratios are 0.25, 3.3, 0.5, ...: a window over them would reject the first token and keep the second.
    assert ratios.mask_token(GAP, ICEPOP).tolist() == [True, False, True, True, True, True]


def test_the_token_mask_includes_its_ends() -> None:
    gap = Gap(doubles(0.0, 0.0), doubles(0.0, -1e-9), torch.tensor([0, 1]), 2)
    assert ratios.mask_token(gap, RatioWindow(low=0.5, high=1.0)).tolist() == [True, False]


def test_the_sequence_mask_rejects_whole_trajectories_by_the_geometric_mean_of_their_ratios() -> None:
    # sqrt(4 x 0.3) = 1.095 is within, though both its tokens are not; 2 is not; 0.9 is.
    kept = ratios.mask_sequence(GAP, RatioWindow(low=0.8, high=1.5))
    assert kept.tolist() == [True, True, False, False, False, True]


def test_the_sequence_mask_means_the_same_for_a_long_trajectory_as_for_a_short_one() -> None:
    # Nine tokens and one, each with w = 1.2: the product is 5.2 for the long one, the geometric mean 1.2 for both.
    behavior = torch.full((10,), -1.0, dtype=torch.float64)
    gap = Gap(behavior + math.log(1.2), behavior, torch.tensor([0] * 9 + [1]), 2)
    assert ratios.mask_sequence(gap, RatioWindow(low=0.8, high=1.5)).all()


def test_the_sequence_weight_is_the_product_of_a_trajectorys_ratios_up_to_the_cap() -> None:
    # 4 x 0.3 = 1.2; 2 x 2 x 2 = 8, capped at 5; 0.9.
    assert ratios.sequence(GAP).tolist() == pytest.approx([1.2, 1.2, 8, 8, 8, 0.9])
    capped = correct(RatioRules(weight="sequence", cap=5.0))
    assert capped.weights.tolist() == pytest.approx([1.2, 1.2, 5, 5, 5, 0.9])
    assert capped.bounded.tolist() == [False, False, True, True, True, False]


def test_the_geometric_weight_is_a_trajectorys_mean_ratio_whatever_its_length() -> None:
    # sqrt(4 x 0.3) = sqrt(1.2); the cube root of 8; 0.9.
    root = math.sqrt(1.2)
    assert correct(RatioRules(weight="geometric", cap=5.0)).weights.tolist() == pytest.approx(
        [root, root, 2, 2, 2, 0.9]
    )
    assert correct(RatioRules(weight="geometric", cap=1.5)).weights.tolist() == pytest.approx(
        [root, root, 1.5, 1.5, 1.5, 0.9]
    )


def test_a_floor_leaves_no_token_without_a_gradient_and_raises_no_filtered_one() -> None:
    two_sided = correct(RatioRules(cap=3.0, floor=0.5))
    # 4 to 3 and 0.3 to 0.5; the others are within.
    assert two_sided.weights.tolist() == pytest.approx([3, 0.5, 2, 2, 2, 0.9])
    assert two_sided.bounded.tolist() == [True, True, False, False, False, False]
    filtered = correct(RatioRules(cap=3.0, floor=0.5, token_window=ICEPOP))
    assert filtered.weights.tolist() == pytest.approx([3, 0, 2, 2, 2, 0.9])
    assert filtered.bounded.tolist() == [True, False, False, False, False, False]


def test_bad_tokens_have_a_cap_of_their_own() -> None:
    # 4, 0.3 and the first 2 are good; the other two and 0.9 are bad.
    apart = correct(RatioRules(cap=1.0, bad_cap=5.0))
    assert apart.weights.tolist() == pytest.approx([1, 0.3, 1, 2, 2, 0.9])
    assert apart.bounded.tolist() == [True, False, True, False, False, False]
    below = correct(RatioRules(cap=5.0, bad_cap=1.5, floor=0.5))
    assert below.weights.tolist() == pytest.approx([4, 0.5, 2, 1.5, 1.5, 0.9])
    assert correct(RatioRules(cap=3.0, bad_cap=3.0)).weights.tolist() == correct(RatioRules(cap=3.0)).weights.tolist()


def test_one_extreme_token_vetoes_its_whole_trajectory_and_no_other() -> None:
    # 0.3 is below 0.5 and takes 4 along; 0.9 is not below.
    vetoed = ratios.veto(GAP, 0.5)
    assert vetoed.tolist() == [False, False, True, True, True, True]
    assert correct(RatioRules(token_veto=0.5)).weights.tolist() == pytest.approx([0, 0, 2, 2, 2, 0.9])
    assert ratios.veto(GAP, 0.3 - 1e-9).all()


def test_the_off_policy_mask_takes_out_what_is_bad_where_the_policy_has_left_it() -> None:
    """Means of behavior - proximal: -ln(4 x 0.3)/2 = -0.09, -ln 2 = -0.69, and -ln 0.9 = 0.105, of which only the last
    is above 0.1; its one token has a negative advantage. A good token there would stay.
    """
    assert ratios.mask_divergence(GAP, advantages=ADVANTAGES, limit=0.1).tolist() == [True] * 5 + [False]
    assert ratios.mask_divergence(GAP, advantages=-ADVANTAGES, limit=0.1).all()
    assert ratios.mask_divergence(GAP, advantages=ADVANTAGES, limit=0.106).all()
    assert correct(RatioRules(divergence_limit=0.1)).weights.tolist() == pytest.approx([2, 0.3, 2, 2, 2, 0])


@pytest.mark.parametrize(
    ("limit", "kept"),
    [
        (0.34, [True, True, True, True, True, True]),
        (0.32, [True, False, True, True, True, True]),  # the second by behavior against proximal
        (0.31, [False, False, True, True, True, True]),  # the first by proximal against behavior
        (0.1, [False, False, False, False, False, True]),
    ],
)
def test_the_mask_by_divergence_looks_at_a_token_against_all_others_in_both_directions(
    limit: float, kept: list[bool]
) -> None:
    """Proximal 0.4, 0.15, 0.4, ..., 0.36 to behavior 0.1, 0.5, 0.2, ..., 0.4. 0.4 ln 4 + 0.6 ln(0.6/0.9) = 0.311, and
    back 0.1 ln(1/4) + 0.9 ln(0.9/0.6) = 0.226. Then 0.270 and 0.337; 0.105 and 0.092; below 0.01.
    """
    assert ratios.mask_binary_kl(GAP, limit).tolist() == kept
    assert correct(RatioRules(binary_kl_limit=limit)).kept.tolist() == kept


@pytest.mark.parametrize(
    ("limit", "kept"),
    [
        (0.81, [True, True, True, True, True, True]),
        (0.6, [False, True, True, True, True, True]),
        (0.5, [False, False, True, True, True, True]),
        (0.3, [False, False, False, False, False, True]),  # of equals none is preferred
        (0.01, [False] * 6),
    ],
)
def test_under_a_second_moment_the_farthest_tokens_go_until_the_mean_of_the_others_is_small(
    limit: float, kept: list[bool]
) -> None:
    """Squares of log w: 1.922, 1.450, 0.480 three times, 0.011. Means of the smallest: 0.011, 0.246, 0.324, 0.363,
    0.580, 0.804.
    """
    everything = torch.ones(6, dtype=torch.bool)
    assert ratios.within_second_moment(GAP, limit=limit, among=everything).tolist() == kept


def test_a_second_moment_is_of_the_tokens_that_others_have_left_in() -> None:
    # Without the first two the mean is 0.363.
    among = torch.tensor([False, False, True, True, True, True])
    assert torch.equal(ratios.within_second_moment(GAP, limit=0.37, among=among), among)
    nothing = torch.zeros(6, dtype=torch.bool)
    assert torch.equal(ratios.within_second_moment(GAP, limit=0.37, among=nothing), nothing)


def test_self_normalised_weights_have_a_mean_of_1_over_what_is_kept() -> None:
    # 4, 2, 2, 2, 0.9 capped at 3: 3 + 2 + 2 + 2 + 0.9 = 9.9 over five kept tokens.
    corrected = correct(RatioRules(cap=3.0, token_window=ICEPOP))
    assert ratios.self_normalising_scale(corrected) == pytest.approx(5 / 9.9)
    nothing = correct(RatioRules(token_window=RatioWindow(low=100, high=101)))
    assert ratios.self_normalising_scale(nothing) == 1.0


@pytest.mark.parametrize(
    ("rules", "weights"),
    [
        (RatioRules(), [2, 0.3, 2, 2, 2, 0.9]),
        (RatioRules(cap=3.0), [3, 0.3, 2, 2, 2, 0.9]),
        (RatioRules(weight="none"), [1, 1, 1, 1, 1, 1]),
        (RatioRules(weight="none", token_window=ICEPOP), [4, 0, 2, 2, 2, 0.9]),
        (RatioRules(cap=3.0, token_window=ICEPOP), [3, 0, 2, 2, 2, 0.9]),
        (RatioRules(weight="none", sequence_window=RatioWindow(low=0.8, high=1.5)), [1, 1, 0, 0, 0, 1]),
        (RatioRules(weight="sequence", cap=5.0, token_window=ICEPOP), [1.2, 0, 5, 5, 5, 0.9]),
        (RatioRules(token_window=ICEPOP, sequence_window=RatioWindow(low=0.8, high=1.5)), [2, 0, 0, 0, 0, 0.9]),
    ],
)
def test_corrections_compose_into_one_weight(rules: RatioRules, weights: list[float]) -> None:
    corrected = correct(rules)
    assert corrected.weights.tolist() == pytest.approx(weights)
    assert corrected.kept.tolist() == [weight > 0 for weight in weights]
    torch.testing.assert_close(corrected.kept, ratios.kept_tokens(GAP, rules))


def test_a_filtered_token_leaves_the_numerator_and_the_denominator() -> None:
    rules = RatioRules(cap=3.0, token_window=ICEPOP)
    lengths = kept_lengths(rules)
    assert lengths.tolist() == [1, 3, 1]
    token_losses = doubles(1, 100, 2, 3, 4, 5)
    # Over the five kept tokens: (3 x 1 + 2 x 2 + 2 x 3 + 2 x 4 + 0.9 x 5)/5 = 25.5/5.
    assert _step_loss(rules, token_losses, lengths, [SEQUENCES >= 0]) == pytest.approx(25.5 / 5)
    original = np.array([2, 3, 1])
    assert _step_loss(rules, token_losses, original, [SEQUENCES >= 0]) == pytest.approx(25.5 / 6)


@pytest.mark.parametrize(
    "rules",
    [
        RatioRules(cap=3.0, token_window=ICEPOP),
        RatioRules(sequence_window=RatioWindow(low=0.8, high=1.5)),
        RatioRules(weight="sequence", token_window=ICEPOP, sequence_window=RatioWindow(low=0.95, high=3.0)),
        RatioRules(weight="geometric", floor=0.5, token_veto=0.5),
    ],
)
def test_with_counts_of_the_whole_step_a_filtered_loss_does_not_depend_on_the_split(rules: RatioRules) -> None:
    lengths = kept_lengths(rules)
    token_losses = doubles(1, 100, 2, 3, 4, 5)
    whole = _step_loss(rules, token_losses, lengths, [SEQUENCES >= 0])
    for split in ([[0], [1], [2]], [[0, 2], [1]], [[1, 2], [0]]):
        parts = [torch.isin(SEQUENCES, torch.tensor(numbers)) for numbers in split]
        assert _step_loss(rules, token_losses, lengths, parts) == pytest.approx(whole)


def _step_loss(rules: RatioRules, token_losses: Tensor, lengths: NDArray[np.int64], parts: list[Tensor]) -> float:
    """The token mean of a step, microbatch by microbatch, each a mask over the tokens."""
    aggregation = token_weights(trained_lengths=lengths, aggregation="token", constant_length=1)
    weights = torch.from_numpy(aggregation)[SEQUENCES]
    return sum(
        float((weights[part] * correct(rules, torch.nonzero(part)[:, 0]).weights * token_losses[part]).sum())
        for part in parts
    )


def test_a_trajectory_that_is_filtered_whole_counts_for_nothing() -> None:
    lengths = kept_lengths(RatioRules(sequence_window=RatioWindow(low=0.8, high=1.5)))
    # The mean over trajectories is over two of them, not three.
    weights = token_weights(trained_lengths=lengths, aggregation="sequence_mean", constant_length=1)
    assert weights.tolist() == pytest.approx([1 / 4, 0, 1 / 2])


def test_no_correction_passes_a_gradient() -> None:
    leaf = PROXIMAL.clone().requires_grad_()
    everything = RatioRules(weight="sequence", token_window=ICEPOP, sequence_window=RatioWindow(low=0.5, high=2.0))
    for rules in (RatioRules(), RatioRules(weight="none", token_window=ICEPOP), everything):
        corrected = ratios.correct(Gap(leaf, BEHAVIOR, SEQUENCES, 3), rules, advantages=ADVANTAGES)
        assert not corrected.weights.requires_grad


@pytest.mark.parametrize("weight", get_args(Weight))
def test_weights_stay_finite_for_impossible_and_far_apart_logprobs(weight: Weight) -> None:
    wild = [0.0, -1e-30, -90.0, -1000.0, -math.inf]
    proximal, behavior = (torch.tensor(side) for side in zip(*itertools.product(wild, wild), strict=True))
    for sequences in (torch.zeros(25, dtype=torch.int64), torch.arange(25)):
        gap, bad = Gap(proximal, behavior, sequences, 25), torch.full((25,), -1.0)
        filters = RatioRules(weight=weight, token_window=ICEPOP, sequence_window=ICEPOP)
        for rules in (filters, RatioRules(weight=weight, floor=0.1, token_veto=1e-4, divergence_limit=0.5)):
            corrected = ratios.correct(gap, rules, advantages=bad)
            assert torch.isfinite(corrected.weights).all()
            assert math.isfinite(ratios.self_normalising_scale(corrected))
    # Two policies that both call a token impossible agree about it.
    same = ratios.importance_ratio(
        proximal_logprobs=torch.tensor([-math.inf]), behavior_logprobs=torch.tensor([-math.inf])
    )
    assert same.tolist() == [1.0]


def test_the_interpolated_proximal_moves_from_behavior_to_policy_as_a_token_gets_staler() -> None:
    # alpha = 1, 1/2 and 1/4: -1; (-1 - 3)/2 = -2; (-1 - 3 x 3)/4 = -2.5.
    proximal = ratios.interpolated_proximal(
        behavior_logprobs=doubles(-1, -1, -1), policy_logprobs=doubles(-3, -3, -3), lags=torch.tensor([0, 1, 3])
    )
    assert proximal.tolist() == pytest.approx([-1, -2, -2.5])


def test_the_interpolated_proximal_passes_no_gradient_and_stays_finite() -> None:
    def total(policy: Tensor) -> Tensor:
        anchor = ratios.interpolated_proximal(
            behavior_logprobs=doubles(-math.inf, -1), policy_logprobs=policy, lags=torch.tensor([0, 2])
        )
        assert torch.isfinite(anchor).all()
        return (policy - anchor).sum()

    assert gradient(total, doubles(-2, -3)).tolist() == [1, 1]
