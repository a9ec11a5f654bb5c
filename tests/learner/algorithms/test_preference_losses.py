import itertools
import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from learner.algorithms import preference_losses
from learner.algorithms.preference_losses import LabelLoss, PairLoss
from learner.algorithms.ratios import sequence_sums
from tests.learner.algorithms.differences import doubles, gradient

# -log sigmoid(1.5) and -log sigmoid(-1.5).
LIKELY, UNLIKELY = math.log(1 + math.exp(-1.5)), math.log(1 + math.exp(1.5))


def dpo(chosen: Tensor, rejected: Tensor, label_smoothing: float = 0.0, beta: float = 0.5) -> PairLoss:
    """DPO against a reference of -10 for the chosen and -20 for the rejected side."""
    return preference_losses.dpo(
        chosen_logprobs=chosen,
        rejected_logprobs=rejected,
        chosen_reference_logprobs=torch.full_like(chosen, -10),
        rejected_reference_logprobs=torch.full_like(rejected, -20),
        beta=beta,
        label_smoothing=label_smoothing,
    )


def ipo(chosen: Tensor, rejected: Tensor, chosen_length: int = 3, rejected_length: int = 4) -> PairLoss:
    """IPO with beta 0.1 against the same reference."""
    return preference_losses.ipo(
        chosen_logprobs=chosen,
        rejected_logprobs=rejected,
        chosen_reference_logprobs=torch.full_like(chosen, -10),
        rejected_reference_logprobs=torch.full_like(rejected, -20),
        chosen_lengths=torch.full(chosen.shape, chosen_length),
        rejected_lengths=torch.full(rejected.shape, rejected_length),
        beta=0.1,
    )


def orpo(chosen: Tensor, rejected: Tensor, beta: float = 0.1) -> PairLoss:
    """ORPO of a chosen side of 2 tokens and a rejected one of 4."""
    return preference_losses.orpo(
        chosen_logprobs=chosen,
        rejected_logprobs=rejected,
        chosen_lengths=torch.full(chosen.shape, 2),
        rejected_lengths=torch.full(rejected.shape, 4),
        beta=beta,
    )


def simpo(chosen: Tensor, rejected: Tensor, gamma: float = 0.5, label_smoothing: float = 0.0) -> PairLoss:
    """SimPO with beta 2, of a chosen side of 2 tokens and a rejected one of 4."""
    return preference_losses.simpo(
        chosen_logprobs=chosen,
        rejected_logprobs=rejected,
        chosen_lengths=torch.full(chosen.shape, 2),
        rejected_lengths=torch.full(rejected.shape, 4),
        beta=2.0,
        gamma=gamma,
        label_smoothing=label_smoothing,
    )


def bradley_terry(chosen: Tensor, rejected: Tensor, margin: float = 0.0, centre_coefficient: float = 0.0) -> PairLoss:
    return preference_losses.bradley_terry(
        chosen_scores=chosen,
        rejected_scores=rejected,
        margins=torch.full_like(chosen, margin),
        centre_coefficient=centre_coefficient,
    )


def kto(logprobs: Tensor, desirable: list[bool], divergence: float = 0.5) -> LabelLoss:
    """KTO with beta 1 and weights 1 and 2, against a reference of -10."""
    return preference_losses.kto(
        logprobs=logprobs,
        reference_logprobs=torch.full_like(logprobs, -10),
        desirable=torch.tensor(desirable),
        divergence=torch.tensor(divergence, dtype=logprobs.dtype),
        beta=1.0,
        desirable_weight=1.0,
        undesirable_weight=2.0,
    )


def length_normalised(chosen: Tensor, rejected: Tensor, label_smoothing: float = 0.0) -> PairLoss:
    """Length-normalised DPO with beta 2, of a chosen side of 2 tokens and a rejected one of 4, by `dpo`'s reference."""
    return preference_losses.length_normalised(
        chosen_logprobs=chosen,
        rejected_logprobs=rejected,
        chosen_reference_logprobs=torch.full_like(chosen, -10),
        rejected_reference_logprobs=torch.full_like(rejected, -20),
        chosen_lengths=torch.full(chosen.shape, 2),
        rejected_lengths=torch.full(rejected.shape, 4),
        beta=2.0,
        label_smoothing=label_smoothing,
    )


OF_REWARDS: dict[str, Callable[..., PairLoss]] = {
    "robust": partial(preference_losses.robust, label_smoothing=0.1),
    "hinge": preference_losses.hinge,
    "exo": partial(preference_losses.exo, label_smoothing=0.1),
    "discopop": preference_losses.discopop,
    "apo_zero": preference_losses.apo_zero,
    "apo_down": preference_losses.apo_down,
    "nca": preference_losses.nca,
    "bco": partial(preference_losses.bco, shift=doubles(0.25)[0]),
    "sppo": partial(preference_losses.sppo, beta=0.5),
}


def of_rewards(name: str, chosen: Tensor, rejected: Tensor) -> PairLoss:
    """The loss of that name with the rewards of `dpo` above: beta 0.5 against -10 and -20."""
    return OF_REWARDS[name](
        chosen=preference_losses.reward(chosen, torch.full_like(chosen, -10), beta=0.5),
        rejected=preference_losses.reward(rejected, torch.full_like(rejected, -20), beta=0.5),
    )


PAIR_LOSSES: dict[str, Callable[[Tensor, Tensor], PairLoss]] = {
    "dpo": dpo,
    "smoothed dpo": partial(dpo, label_smoothing=0.1),
    "ipo": ipo,
    "orpo": orpo,
    "simpo": simpo,
    "length_normalised": length_normalised,
    **{name: partial(of_rewards, name) for name in OF_REWARDS},
    "bradley_terry": partial(bradley_terry, margin=0.5, centre_coefficient=0.01),
}
every_pair_loss = pytest.mark.parametrize("name", PAIR_LOSSES)


def test_dpo_is_the_logistic_loss_of_the_difference_of_rewards() -> None:
    loss = dpo(doubles(-8), doubles(-21))
    # Gaps to the reference: 2 and -1; rewards: 1 and -0.5; h = 1.5.
    assert loss.losses.tolist() == pytest.approx([LIKELY])
    assert loss.chosen_rewards.tolist() == pytest.approx([1.0])
    assert loss.rejected_rewards.tolist() == pytest.approx([-0.5])


def test_dpos_gradient_is_beta_times_the_chance_of_the_wrong_order() -> None:
    wrong = 1 / (1 + math.exp(1.5))
    assert gradient(lambda c: dpo(c, doubles(-21)).losses.sum(), doubles(-8)).tolist() == pytest.approx([-0.5 * wrong])
    assert gradient(lambda r: dpo(doubles(-8), r).losses.sum(), doubles(-21)).tolist() == pytest.approx([0.5 * wrong])


def test_dpos_gradient_vanishes_at_a_large_margin_and_is_beta_on_the_wrong_side() -> None:
    slopes = gradient(lambda c: dpo(c, torch.full_like(c, -20)).losses.sum(), doubles(190, 1e6, -210, -1e6))
    # h = 100, 5e5, -100, -5e5.
    assert slopes[:2].abs().max() < 1e-40
    assert slopes[2:].tolist() == pytest.approx([-0.5, -0.5])


def test_label_smoothing_changes_the_loss() -> None:
    # 0.9 of the loss of h = 1.5 and 0.1 of that of h = -1.5.
    smoothed = dpo(doubles(-8), doubles(-21), label_smoothing=0.1)
    assert smoothed.losses.tolist() == pytest.approx([0.9 * LIKELY + 0.1 * UNLIKELY])
    assert float(smoothed.losses) > LIKELY + 0.1


def test_with_label_smoothing_the_best_margin_is_finite() -> None:
    best = math.log(0.9 / 0.1)
    # h = 0.5 (c + 10) with the rejected side at its reference.
    at = doubles(-10 + 2 * best, -10 + 2 * (best + 1), -10 + 2 * (best - 1), 1e6)
    slopes = gradient(lambda c: dpo(c, torch.full_like(c, -20), label_smoothing=0.1).losses.sum(), at)
    assert float(slopes[0]) == pytest.approx(0, abs=1e-12)
    assert float(slopes[1]) > 0
    assert float(slopes[2]) < 0
    assert float(slopes[3]) == pytest.approx(0.5 * 0.1)  # too sure of itself: pulled back by beta e


def test_half_smoothed_labels_say_nothing_about_the_order() -> None:
    forward = dpo(doubles(-8), doubles(-21), label_smoothing=0.5).losses
    # Swapping the rewards, 1 and -0.5, swaps the sign of h.
    backward = dpo(doubles(-11), doubles(-18), label_smoothing=0.5).losses
    torch.testing.assert_close(forward, backward)


def test_ipo_averages_policy_and_reference_over_length() -> None:
    loss = ipo(doubles(-4), doubles(-22))
    # Gaps: 6 over 3 tokens is 2; -2 over 4 is -0.5; h = 2.5 and 1/(2 x 0.1) = 5.
    assert loss.losses.tolist() == pytest.approx([(2.5 - 5) ** 2])
    assert loss.chosen_rewards.tolist() == pytest.approx([0.2])
    assert loss.rejected_rewards.tolist() == pytest.approx([-0.05])


def test_ipo_does_not_change_when_both_sides_get_longer_at_the_same_gap_per_token() -> None:
    # Twice the tokens with twice the gaps: 12 over 6, -4 over 8.
    longer = ipo(doubles(2), doubles(-24), chosen_length=6, rejected_length=8)
    torch.testing.assert_close(longer.losses, ipo(doubles(-4), doubles(-22)).losses)


def test_ipos_optimum_is_a_difference_of_one_over_two_beta_and_not_infinity() -> None:
    # h = (c + 10)/3 with the rejected side at its reference: 5 at c = 5.
    at = doubles(5, 8, 2)
    assert float(ipo(at, torch.full_like(at, -20)).losses[0]) == pytest.approx(0)
    slopes = gradient(lambda c: ipo(c, torch.full_like(c, -20)).losses.sum(), at)
    # d/dc (h - 5)^2 = 2 (h - 5)/3, h = 5, 6, 4.
    assert slopes.tolist() == pytest.approx([0, 2 / 3, -2 / 3])


def test_length_normalised_dpo_compares_rewards_per_token() -> None:
    # Gaps 1 over 2 tokens and -2 over 4: rewards 2 x 0.5 = 1 and 2 x -0.5 = -1, h = 2; dpo's would be 0.5 and -1.
    loss = length_normalised(doubles(-9), doubles(-22))
    assert loss.losses.tolist() == pytest.approx([math.log(1 + math.exp(-2))])
    assert (loss.chosen_rewards.tolist(), loss.rejected_rewards.tolist()) == ([1.0], [-1.0])
    wrong = math.log(1 + math.exp(2))
    smoothed = length_normalised(doubles(-9), doubles(-22), label_smoothing=0.1)
    assert smoothed.losses.tolist() == pytest.approx([0.9 * math.log(1 + math.exp(-2)) + 0.1 * wrong])


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # Rewards 1 and -0.5, h = 1.5; L(x) = -log sigmoid(x).
        ("robust", (0.9 * LIKELY - 0.1 * UNLIKELY) / 0.8),
        ("hinge", 0.0),
        ("exo", sigmoid(1.5) * math.log(sigmoid(1.5) / 0.9) + sigmoid(-1.5) * math.log(sigmoid(-1.5) / 0.1)),
        # m = sigmoid(30) = 1 to thirteen digits.
        ("discopop", math.exp(-1.5)),
        ("apo_zero", sigmoid(-1) + sigmoid(-0.5)),
        ("apo_down", sigmoid(1) + sigmoid(-1.5)),
        ("nca", math.log(1 + math.exp(-1)) + math.log(1 + math.e) / 2 + math.log(1 + math.exp(-0.5)) / 2),
        # 1 - 0.25 and 0.25 + 0.5.
        ("bco", 2 * math.log(1 + math.exp(-0.75))),
        # (1 - 0.5)^2 + (-0.5 + 0.5)^2 over 0.25.
        ("sppo", 1.0),
    ],
)
def test_a_loss_of_two_rewards_at_numbers_worked_by_hand(name: str, expected: float) -> None:
    loss = of_rewards(name, doubles(-8), doubles(-21))
    assert loss.losses.tolist() == pytest.approx([expected], abs=1e-9)
    assert (loss.chosen_rewards.tolist(), loss.rejected_rewards.tolist()) == ([1.0], [-0.5])


def test_the_hinge_lets_a_pair_go_once_it_is_1_apart() -> None:
    # h = 0.5 (c + 10) with the rejected side at its reference: 0.5, 1.5, -1.
    losses = of_rewards("hinge", doubles(-9, -7, -12), doubles(-20, -20, -20)).losses
    assert losses.tolist() == pytest.approx([0.5, 0.0, 2.0])


def test_the_robust_loss_is_on_average_over_wrong_labels_the_loss_on_right_ones() -> None:
    right = of_rewards("robust", doubles(-8), doubles(-21)).losses
    turned = OF_REWARDS["robust"](chosen=doubles(-0.5), rejected=doubles(1.0)).losses
    assert (0.9 * right + 0.1 * turned).tolist() == pytest.approx([LIKELY])


def test_exo_is_0_where_the_policy_prefers_as_surely_as_the_labels() -> None:
    best = math.log(0.9 / 0.1)
    assert float(OF_REWARDS["exo"](chosen=doubles(best), rejected=doubles(0)).losses) == pytest.approx(0, abs=1e-12)
    slopes = gradient(lambda c: OF_REWARDS["exo"](chosen=c, rejected=torch.zeros_like(c)).losses.sum(), doubles(1, 4))
    assert float(slopes[0]) < 0 < float(slopes[1])


def test_discopop_is_the_logistic_loss_for_a_pair_in_the_wrong_order() -> None:
    # h = -1.5, m = sigmoid(-30), nothing; and at 0 half of log 2 and half of 1.
    assert float(OF_REWARDS["discopop"](chosen=doubles(-1), rejected=doubles(0.5)).losses) == pytest.approx(UNLIKELY)
    even = OF_REWARDS["discopop"](chosen=doubles(2), rejected=doubles(2)).losses
    assert even.tolist() == pytest.approx([(math.log(2) + 1) / 2])


@pytest.mark.parametrize(
    ("name", "chosen", "rejected"),
    [("apo_zero", -1, 1), ("apo_down", 1, 1), ("nca", -1, 1), ("bco", -1, 1), ("sppo", -1, 1), ("hinge", -1, 1)],
)
def test_each_loss_moves_the_two_sides_as_it_says(name: str, chosen: int, rejected: int) -> None:
    """Signs of the slopes where policy and reference agree: a negative slope is raised, a positive one lowered."""
    of_chosen = gradient(lambda c: of_rewards(name, c, doubles(-20)).losses.sum(), doubles(-10))
    of_rejected = gradient(lambda x: of_rewards(name, doubles(-10), x).losses.sum(), doubles(-20))
    if name == "apo_down":  # sigmoid' = 1/4 against the two: 0.25 - 0.25 at 0, lowered once the rejected one is behind
        of_chosen = gradient(lambda c: of_rewards(name, c, doubles(-26)).losses.sum(), doubles(-10))
    assert (float(of_chosen.sign()), float(of_rejected.sign())) == (chosen, rejected)


def test_orpo_adds_the_log_odds_ratio_to_the_likelihood_of_the_chosen_side() -> None:
    # Mean probabilities 0.8 (odds 4) and 0.5 (odds 1): -log sigmoid(ln 4) = ln(1 + 1/4), and -ln 0.8 is the same.
    loss = orpo(2 * doubles(0.8).log(), 4 * doubles(0.5).log())
    assert loss.losses.tolist() == pytest.approx([1.1 * math.log(1.25)])
    assert loss.chosen_rewards.tolist() == pytest.approx([0.1 * math.log(0.8)])
    assert loss.rejected_rewards.tolist() == pytest.approx([0.1 * math.log(0.5)])


def test_orpo_keeps_the_chosen_sides_likelihood_gradient_when_it_is_certain() -> None:
    slopes = gradient(lambda c: orpo(c, torch.full_like(c, -4)).losses.sum(), doubles(0.0, -1e-9))
    # The odds are bounded there and give nothing; the likelihood gives -1 over 2 tokens.
    assert slopes.tolist() == pytest.approx([-0.5, -0.5])


def test_simpo_wants_the_mean_logprobs_apart_by_gamma() -> None:
    # Means -1/2 = -0.5 and -6/4 = -1.5; rewards -1 and -3; h = 2 - 0.5.
    loss = simpo(doubles(-1), doubles(-6))
    assert loss.losses.tolist() == pytest.approx([LIKELY])
    assert loss.chosen_rewards.tolist() == pytest.approx([-1])
    assert loss.rejected_rewards.tolist() == pytest.approx([-3])
    assert float(simpo(doubles(-1), doubles(-6), gamma=3.5).losses) == pytest.approx(UNLIKELY)
    smoothed = simpo(doubles(-1), doubles(-6), label_smoothing=0.1)
    assert smoothed.losses.tolist() == pytest.approx([0.9 * LIKELY + 0.1 * UNLIKELY])


def test_kto_values_a_sequence_by_its_reward_beyond_the_divergence() -> None:
    # Gaps of 2 and a divergence of 0.5: s = 1.5, and -1.5 for the undesirable one, whose weight is 2.
    loss = kto(doubles(-8, -8), [True, False])
    likely = 1 / (1 + math.exp(-1.5))
    assert loss.losses.tolist() == pytest.approx([1 - likely, 2 * likely])
    assert loss.rewards.tolist() == pytest.approx([2, 2])


def test_the_weights_of_kto_keep_the_digits_of_its_logprobs() -> None:
    loss = preference_losses.kto(
        logprobs=doubles(-8, -8), reference_logprobs=doubles(-8, -8), desirable=torch.tensor([True, False]),
        divergence=doubles(0)[0], beta=1.0, desirable_weight=1.05, undesirable_weight=0.9,
    )  # fmt: skip
    assert loss.losses.tolist() == pytest.approx([0.525, 0.45], rel=1e-12)


def test_kto_pushes_the_two_labels_apart_and_leaves_alone_what_is_far_on_either_side() -> None:
    slopes = gradient(lambda x: kto(x, [True, False, True, False]).losses.sum(), doubles(-9.5, -9.5, 90, 90))
    # At s = 0 the sigmoid has slope 1/4.
    assert slopes.tolist() == pytest.approx([-0.25, 0.5, 0, 0], abs=1e-12)


def test_ktos_divergence_is_the_mean_gap_but_not_below_0_and_passes_no_gradient() -> None:
    assert float(preference_losses.kto_divergence(gaps=doubles(2, 1, -2))) == pytest.approx(1 / 3)
    assert float(preference_losses.kto_divergence(gaps=doubles(-2, -3, 1))) == 0
    assert not preference_losses.kto_divergence(gaps=doubles(2, 1).requires_grad_()).requires_grad


def test_bradley_terry_wants_the_scores_apart_by_the_margin() -> None:
    loss = bradley_terry(doubles(3), doubles(1), margin=0.5)
    assert loss.losses.tolist() == pytest.approx([LIKELY])
    assert loss.chosen_rewards.tolist() == [3]
    assert loss.rejected_rewards.tolist() == [1]
    assert float(bradley_terry(doubles(3), doubles(1), margin=3.5).losses) == pytest.approx(UNLIKELY)


def test_bradley_terry_sees_only_differences_until_it_is_centred() -> None:
    torch.testing.assert_close(
        bradley_terry(doubles(103), doubles(101)).losses, bradley_terry(doubles(3), doubles(1)).losses
    )
    # 0.1 x (3.25 + 1.75)^2 = 2.5 more; scores of 1 and -1 sum to 0 and cost nothing more.
    off = bradley_terry(doubles(3.25), doubles(1.75), centre_coefficient=0.1)
    assert off.losses.tolist() == pytest.approx([LIKELY + 2.5])
    centred = bradley_terry(doubles(0.75), doubles(-0.75), centre_coefficient=0.1)
    assert centred.losses.tolist() == pytest.approx([LIKELY])


@every_pair_loss
def test_a_pair_loss_has_the_gradient_of_finite_differences(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    chosen = (-12 + 4 * torch.rand(6, generator=generator, dtype=torch.float64)).requires_grad_()
    rejected = (-22 + 4 * torch.rand(6, generator=generator, dtype=torch.float64)).requires_grad_()
    assert torch.autograd.gradcheck(lambda c, r: PAIR_LOSSES[name](c, r).losses, (chosen, rejected))


def test_kto_has_the_gradient_of_finite_differences() -> None:
    logprobs = (-12 + 4 * torch.rand(6, dtype=torch.float64)).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: kto(x, [True, False] * 3).losses, (logprobs,))


@every_pair_loss
def test_a_pairs_loss_does_not_depend_on_the_other_pairs_or_on_the_split(name: str) -> None:
    chosen, rejected = doubles(-8, -11, -9.5, -14), doubles(-21, -18, -20, -19)
    whole = PAIR_LOSSES[name](chosen, rejected)
    halves = [PAIR_LOSSES[name](chosen[half], rejected[half]) for half in (slice(0, 3), slice(3, 4))]
    torch.testing.assert_close(whole.losses, torch.cat([half.losses for half in halves]))
    torch.testing.assert_close(whole.chosen_rewards, torch.cat([half.chosen_rewards for half in halves]))
    order = torch.tensor([2, 0, 3, 1])
    torch.testing.assert_close(whole.losses[order], PAIR_LOSSES[name](chosen[order], rejected[order]).losses)


def test_packed_sequences_of_unequal_length_give_the_loss_that_each_gives_alone() -> None:
    tokens = doubles(-1, -2, -5, -4, -4, -4, -9.5, -3, -7, -8, -2)
    sequences = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 3])
    sums = sequence_sums(values=tokens, sequences=sequences, count=4)
    # -8, -21.5, -10, -10.
    packed = dpo(sums[[0, 2]], sums[[1, 3]]).losses
    alone = [dpo(doubles(-8), doubles(-21.5)).losses, dpo(doubles(-10), doubles(-10)).losses]
    torch.testing.assert_close(packed, torch.cat(alone))


@pytest.mark.parametrize("name", [name for name in PAIR_LOSSES if name != "bradley_terry"])
def test_pair_losses_and_gradients_stay_finite_for_impossible_and_far_apart_logprobs(name: str) -> None:
    wild = [0.0, -1e-30, -1e-7, -1e3, -1e6, -math.inf]
    chosen, rejected = (torch.tensor(side) for side in zip(*itertools.product(wild, wild), strict=True))
    assert torch.isfinite(PAIR_LOSSES[name](chosen, rejected).losses).all()
    assert torch.isfinite(gradient(lambda c: PAIR_LOSSES[name](c, rejected).losses.sum(), chosen)).all()
    assert torch.isfinite(gradient(lambda r: PAIR_LOSSES[name](chosen, r).losses.sum(), rejected)).all()


def test_scores_and_labels_far_apart_stay_finite() -> None:
    scores = torch.tensor([1e6, -1e6])
    for slopes in (
        gradient(lambda c: PAIR_LOSSES["bradley_terry"](c, -scores).losses.sum(), scores),
        gradient(lambda x: kto(x, [True, False, True, False]).losses.sum(), torch.tensor([0, -1e6, -math.inf, -1e3])),
    ):
        assert torch.isfinite(slopes).all()


def test_a_side_without_trained_tokens_is_not_a_division_by_zero() -> None:
    assert torch.isfinite(ipo(doubles(0), doubles(-20), chosen_length=0).losses).all()
