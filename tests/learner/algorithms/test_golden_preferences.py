"""Losses of pairs, divergences and corrections against the numbers of public implementations.

    the family of dpo                  huggingface/trl at f2cd5771, trl/trainer/dpo_trainer.py: _compute_loss; bco_pair
                                       there has no shift
    simpo, orpo                        the same, trl/experimental/cpo/cpo_trainer.py, orpo/orpo_trainer.py
    kto                                the same, trl/trainer/kto_trainer.py: _compute_loss
    jensen_shannon, and its ends       the same, trl/experimental/gkd/gkd_trainer.py: generalized_jsd_loss
    skewed_forward_kl, _reverse_kl     jongwooko/distillm at d47e77ff, distillm/losses.py, less the teacher's entropy
    adaptive_kl                        wutaiqiang/LLM_KD_AKL at ff278be6, AKL.py
    truncate, sequence                 verl-project/verl at 1dda039b, verl/trainer/ppo/rollout_corr_helper.py:
                                       compute_rollout_correction_weights
    mask_token, weighing as IcePop     THUDM/slime at 624b824a, slime/backends/megatron_utils/loss.py: icepop_function
    mask_divergence                    huggingface/trl at f2cd5771, trl/trainer/grpo_trainer.py: get_off_policy_mask
    within_second_moment               inclusionAI/AReaL at 4aef98d8, areal/trainer/ppo/actor.py: _apply_m2po_masking
    interpolated_proximal              the same: compute_prox_logp_approximations, loglinear

DistiLLM and AKL compute in float32.
"""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from learner.algorithms import preference_losses, ratios
from learner.algorithms.preference_losses import PairLoss, reward
from learner.algorithms.ratios import Gap, RatioRules, RatioWindow
from tests.learner.algorithms.differences import doubles, gradient
from tests.learner.algorithms.golden import BEFORE, COUNT, SEQUENCES

CHOSEN, REJECTED = doubles(-3.1, -7.4, -2.0), doubles(-4.0, -6.2, -2.5)
CHOSEN_REFERENCE, REJECTED_REFERENCE = doubles(-3.5, -6.9, -2.2), doubles(-3.6, -6.6, -1.9)
SIDES = {"chosen_logprobs": CHOSEN, "rejected_logprobs": REJECTED}
REFERENCES = {"chosen_reference_logprobs": CHOSEN_REFERENCE, "rejected_reference_logprobs": REJECTED_REFERENCE}
LENGTHS = {"chosen_lengths": torch.tensor([3, 6, 2]), "rejected_lengths": torch.tensor([4, 5, 3])}
STUDENT = doubles(1.0, 0.2, -0.5, 0.3, 0.0, -1.0, 0.4, 2.0, 0.1, 0.6)
"""Logits of five tokens at two places."""
TEACHER = doubles(0.5, 0.9, -1.0, 0.0, 0.2, 0.3, -0.4, 1.0, 0.8, -0.6).reshape(2, 5).log_softmax(dim=-1)
NOW = BEFORE + doubles(0.02, -0.3, 0.35, 0.9, -0.25, -0.6, 0.04, -0.7, 0.15, -0.05)
GAP = Gap(NOW, BEFORE, SEQUENCES, COUNT)
SIGNS = doubles(1.5, -0.5, -1.2, -0.8)[SEQUENCES]


def of_rewards(loss: Callable[..., PairLoss], *, scale: float, **knobs: object) -> PairLoss:
    return loss(
        chosen=reward(CHOSEN, CHOSEN_REFERENCE, beta=scale),
        rejected=reward(REJECTED, REJECTED_REFERENCE, beta=scale),
        **knobs,
    )


@pytest.mark.parametrize(
    ("made", "losses"),
    [
        (
            preference_losses.dpo(**SIDES, **REFERENCES, beta=0.5, label_smoothing=0.0),
            (0.51301525, 0.94324895, 0.51301525),
        ),
        (
            preference_losses.length_normalised(**SIDES, **REFERENCES, **LENGTHS, beta=5.0, label_smoothing=0.0),
            (0.27109773, 1.18262989, 0.20141328),
        ),
        (
            of_rewards(preference_losses.robust, scale=0.5, label_smoothing=0.1),
            (0.46301525, 0.99949895, 0.46301525),
        ),
        (of_rewards(preference_losses.hinge, scale=0.5), (0.6, 1.45, 0.6)),
        (preference_losses.ipo(**SIDES, **REFERENCES, **LENGTHS, beta=0.5), (0.58777778, 1.35334444, 0.49)),
        (
            of_rewards(preference_losses.exo, scale=0.5, label_smoothing=1e-3),
            (2.09922623, 3.55007466, 2.09922623),
        ),
        (of_rewards(preference_losses.discopop, scale=0.1), (0.87790084, 0.78951859, 0.87790084)),
        (of_rewards(preference_losses.apo_zero, scale=0.5), (0.90033201, 1.1120105, 0.9005783)),
        (of_rewards(preference_losses.apo_down, scale=0.5), (0.95114634, 1.04846273, 0.92629153)),
        (of_rewards(preference_losses.nca, scale=0.5), (1.29627774, 1.51297856, 1.29377261)),
        (of_rewards(preference_losses.bco, scale=0.5, shift=doubles(0.0)[0]), (1.19627774, 1.62407829, 1.1987519)),
        (of_rewards(preference_losses.sppo, scale=0.5, beta=0.5), (0.72, 4.21, 0.8)),
        (
            preference_losses.simpo(**SIDES, **LENGTHS, beta=2.0, gamma=1.0, label_smoothing=0.1),
            (1.25576466, 1.20486509, 1.43396253),
        ),
        (preference_losses.orpo(**SIDES, **LENGTHS, beta=0.1), (1.1052938, 1.30217944, 1.08418964)),
    ],
    ids=lambda given: None if isinstance(given, PairLoss) else str(given[0]),
)
def test_a_loss_of_pairs_is_that_of_the_public_code(made: PairLoss, losses: tuple[float, ...]) -> None:
    assert made.losses.tolist() == pytest.approx(list(losses), abs=2e-8)


def test_a_loss_of_single_examples_is_that_of_the_public_code() -> None:
    made = preference_losses.kto(
        logprobs=torch.cat([CHOSEN[:2], REJECTED[:2]]),
        reference_logprobs=torch.cat([CHOSEN_REFERENCE[:2], REJECTED_REFERENCE[:2]]),
        desirable=torch.tensor([True, True, False, False]),
        divergence=doubles(0.3)[0],
        beta=0.5,
        desirable_weight=1.05,
        undesirable_weight=0.9,
    )
    assert made.losses.tolist() == pytest.approx([0.5118777337, 0.6286220431, 0.372044179, 0.4612476568], abs=1e-9)


def mean_over_places(divergence: Callable[..., Tensor], logits: Tensor) -> Tensor:
    student = logits.reshape(2, 5).log_softmax(dim=-1)
    return divergence(student_logprobs=student, teacher_logprobs=TEACHER, tail=False).mean()


@pytest.mark.parametrize(
    ("divergence", "value"),
    [
        (ratios.forward_kl, 0.26517176),
        (ratios.reverse_kl, 0.20818752),
        (partial(ratios.jensen_shannon, beta=0.3), 0.04946949),
        (partial(ratios.skewed_forward_kl, skew=0.1), 0.195958),
        (partial(ratios.skewed_reverse_kl, skew=0.1), 0.172308445),
        (partial(ratios.adaptive_kl, head_mass=0.5), 0.22821391),
    ],
)
def test_a_divergence_is_that_of_the_public_code(divergence: Callable[..., Tensor], value: float) -> None:
    assert float(mean_over_places(divergence, STUDENT)) == pytest.approx(value, abs=2e-7)


def test_the_adaptive_divergence_has_the_gradient_of_its_authors_code() -> None:
    found = gradient(partial(mean_over_places, partial(ratios.adaptive_kl, head_mass=0.5)), STUDENT)
    first = (0.07144759, -0.08337795, 0.01594211, 0.01843041, -0.02244215)
    second = (-0.04638755, 0.00648375, 0.08567777, -0.07949241, 0.03371846)
    assert found.tolist() == pytest.approx([*first, *second], abs=1e-7)


def test_weights_of_tokens_and_of_sequences_under_a_cap_and_over_their_mean() -> None:
    tokens = ratios.correct(GAP, RatioRules(weight="truncate", cap=1.3), advantages=SIGNS)
    plain = (1.02020134, 0.74081822, 1.3, 1.3, 0.77880078, 0.54881164, 1.04081077, 0.4965853, 1.16183424, 0.95122942)
    assert tokens.weights.tolist() == pytest.approx(list(plain), abs=1e-8)
    scaled = (1.09239889, 0.7932444, 1.39199832, 1.39199832, 0.83391491, 0.58764991, 1.11446681, 0.53172762)
    assert (tokens.weights * ratios.self_normalising_scale(tokens)).tolist() == pytest.approx(
        [*scaled, 1.24405486, 1.01854597], abs=1e-8
    )
    whole = ratios.correct(GAP, RatioRules(weight="sequence", cap=1.3), advantages=SIGNS)
    assert whole.weights.tolist() == pytest.approx(
        [*[1.07250818] * 3, 1.3, *[0.42741493] * 2, *[0.57120906] * 4], abs=1e-8
    )


def test_tokens_outside_a_window_weigh_nothing_and_the_others_their_ratio() -> None:
    rules = RatioRules(weight="none", token_window=RatioWindow(0.5, 1.5))
    made = ratios.correct(GAP, rules, advantages=SIGNS).weights
    theirs = (1.02020134, 0.74081822, 1.41906755, 0, 0.77880078, 0.54881164, 1.04081077, 0, 1.16183424, 0.95122942)
    assert made.tolist() == pytest.approx(list(theirs), abs=1e-8)


def test_tokens_that_are_left_out_by_a_divergence_and_by_a_second_moment() -> None:
    assert ratios.mask_divergence(GAP, advantages=SIGNS, limit=0.1).int().tolist() == [1, 1, 1, 1, 0, 0, 0, 0, 0, 0]
    everything = torch.ones(len(NOW), dtype=torch.bool)
    for limit, kept in (
        (0.04, [1, 1, 0, 0, 1, 0, 1, 0, 1, 1]),
        (0.1, [1, 1, 1, 0, 1, 1, 1, 0, 1, 1]),
        (0.2, [1] * 10),
    ):
        assert ratios.within_second_moment(GAP, limit=limit, among=everything).int().tolist() == kept


def test_a_proximal_policy_by_interpolation() -> None:
    """Lags of 0, 1, 3 and 4 versions."""
    made = ratios.interpolated_proximal(
        behavior_logprobs=BEFORE[:4], policy_logprobs=NOW[:4], lags=torch.tensor([0, 1, 3, 4])
    )
    assert made.tolist() == pytest.approx([-0.1, -1.35, -0.4375, -1.58], abs=1e-7)
