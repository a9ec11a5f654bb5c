import itertools
import math
from typing import get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from learner.algorithms import corrections
from learner.algorithms.aggregation import token_weights
from learner.algorithms.corrections import Rules, Weight, Window
from tests.learner.algorithms.differences import doubles, gradient, logs

ICEPOP = Window(low=0.5, high=5.0)
# w of six tokens: 4 and 0.3 of trajectory 0; 2, 2 and 2 of trajectory 1; 0.9 of trajectory 2.
RATIOS = doubles(4, 0.3, 2, 2, 2, 0.9)
SEQUENCES = torch.tensor([0, 0, 1, 1, 1, 2])
BEHAVIOR = logs(0.1, 0.5, 0.2, 0.2, 0.2, 0.4)
PROXIMAL = BEHAVIOR + RATIOS.log()


def correct(rules: Rules, part: Tensor | None = None) -> corrections.Corrected:
    index = torch.arange(len(RATIOS)) if part is None else part
    return corrections.correct(
        rules=rules,
        proximal_logprobs=PROXIMAL[index],
        behavior_logprobs=BEHAVIOR[index],
        sequences=SEQUENCES[index],
        count=3,
    )


def kept_tokens(rules: Rules) -> Tensor:
    return corrections.kept_tokens(
        rules=rules, proximal_logprobs=PROXIMAL, behavior_logprobs=BEHAVIOR, sequences=SEQUENCES, count=3
    )


def test_the_token_mask_rejects_by_the_ratio_of_learner_to_behavior_and_not_by_its_inverse() -> None:
    masked = corrections.mask_token(proximal_logprobs=PROXIMAL, behavior_logprobs=BEHAVIOR, window=ICEPOP)
    # The inverse ratios are 0.25, 3.3, 0.5, ...: a window over them would reject the first token and keep the second.
    assert masked.kept.tolist() == [True, False, True, True, True, True]
    assert masked.weights.tolist() == pytest.approx([4, 0, 2, 2, 2, 0.9])


def test_the_token_mask_includes_its_ends() -> None:
    masked = corrections.mask_token(
        proximal_logprobs=doubles(0.0, 0.0), behavior_logprobs=doubles(0.0, -1e-9), window=Window(low=0.5, high=1.0)
    )
    assert masked.kept.tolist() == [True, False]


def test_the_sequence_mask_rejects_whole_trajectories_by_the_geometric_mean_of_their_ratios() -> None:
    masked = corrections.mask_sequence(
        proximal_logprobs=PROXIMAL,
        behavior_logprobs=BEHAVIOR,
        sequences=SEQUENCES,
        count=3,
        window=Window(low=0.8, high=1.5),
    )
    # sqrt(4 x 0.3) = 1.095 is within, though both its tokens are not; 2 is not; 0.9 is.
    assert masked.kept.tolist() == [True, True, False, False, False, True]
    assert masked.weights.tolist() == [1, 1, 0, 0, 0, 1]


def test_the_sequence_mask_means_the_same_for_a_long_trajectory_as_for_a_short_one() -> None:
    # Nine tokens and one, each with w = 1.2: the product is 5.2 for the long one, the geometric mean 1.2 for both.
    behavior = torch.full((10,), -1.0, dtype=torch.float64)
    masked = corrections.mask_sequence(
        proximal_logprobs=behavior + math.log(1.2),
        behavior_logprobs=behavior,
        sequences=torch.tensor([0] * 9 + [1]),
        count=2,
        window=Window(low=0.8, high=1.5),
    )
    assert masked.kept.all()


def test_the_sequence_weight_is_the_product_of_a_trajectorys_ratios_up_to_the_cap() -> None:
    weights = corrections.sequence(
        proximal_logprobs=PROXIMAL, behavior_logprobs=BEHAVIOR, sequences=SEQUENCES, count=3, cap=5.0
    )
    # 4 x 0.3 = 1.2; 2 x 2 x 2 = 8, capped at 5; 0.9.
    assert weights.tolist() == pytest.approx([1.2, 1.2, 5, 5, 5, 0.9])


@pytest.mark.parametrize(
    ("rules", "weights"),
    [
        (Rules(), [2, 0.3, 2, 2, 2, 0.9]),
        (Rules(cap=3.0), [3, 0.3, 2, 2, 2, 0.9]),
        (Rules(weight="none"), [1, 1, 1, 1, 1, 1]),
        (Rules(weight="none", token_window=ICEPOP), [4, 0, 2, 2, 2, 0.9]),
        (Rules(cap=3.0, token_window=ICEPOP), [3, 0, 2, 2, 2, 0.9]),
        (Rules(weight="none", sequence_window=Window(low=0.8, high=1.5)), [1, 1, 0, 0, 0, 1]),
        (Rules(weight="sequence", cap=5.0, token_window=ICEPOP), [1.2, 0, 5, 5, 5, 0.9]),
        (Rules(token_window=ICEPOP, sequence_window=Window(low=0.8, high=1.5)), [2, 0, 0, 0, 0, 0.9]),
    ],
)
def test_corrections_compose_into_one_weight(rules: Rules, weights: list[float]) -> None:
    corrected = correct(rules)
    assert corrected.weights.tolist() == pytest.approx(weights)
    assert corrected.kept.tolist() == [weight > 0 for weight in weights]
    torch.testing.assert_close(corrected.kept, kept_tokens(rules))


def test_a_filtered_token_leaves_the_numerator_and_the_denominator() -> None:
    rules = Rules(cap=3.0, token_window=ICEPOP)
    kept = kept_tokens(rules)
    lengths = corrections.counted_lengths(kept=kept, sequences=SEQUENCES, count=3)
    assert lengths.tolist() == [1, 3, 1]
    token_losses = doubles(1, 100, 2, 3, 4, 5)
    # Over the five kept tokens: (3 x 1 + 2 x 2 + 2 x 3 + 2 x 4 + 0.9 x 5)/5 = 25.5/5.
    assert _step_loss(rules, token_losses, lengths, [SEQUENCES >= 0]) == pytest.approx(25.5 / 5)
    original = corrections.counted_lengths(kept=kept, sequences=SEQUENCES, count=3, keep_original_count=True)
    assert original.tolist() == [2, 3, 1]
    assert _step_loss(rules, token_losses, original, [SEQUENCES >= 0]) == pytest.approx(25.5 / 6)


@pytest.mark.parametrize(
    "rules",
    [
        Rules(cap=3.0, token_window=ICEPOP),
        Rules(sequence_window=Window(low=0.8, high=1.5)),
        Rules(weight="sequence", token_window=ICEPOP, sequence_window=Window(low=0.95, high=3.0)),
    ],
)
def test_with_counts_of_the_whole_step_a_filtered_loss_does_not_depend_on_the_split(rules: Rules) -> None:
    lengths = corrections.counted_lengths(kept=kept_tokens(rules), sequences=SEQUENCES, count=3)
    token_losses = doubles(1, 100, 2, 3, 4, 5)
    whole = _step_loss(rules, token_losses, lengths, [SEQUENCES >= 0])
    for split in ([[0], [1], [2]], [[0, 2], [1]], [[1, 2], [0]]):
        parts = [torch.isin(SEQUENCES, torch.tensor(numbers)) for numbers in split]
        assert _step_loss(rules, token_losses, lengths, parts) == pytest.approx(whole)


def _step_loss(rules: Rules, token_losses: Tensor, lengths: Tensor, parts: list[Tensor]) -> float:
    """The token mean of a step, microbatch by microbatch, each a mask over the tokens."""
    aggregation = token_weights(
        trained_lengths=lengths.numpy().astype(np.int64), aggregation="token", constant_length=1
    )
    weights = torch.from_numpy(aggregation)[SEQUENCES]
    return sum(
        float((weights[part] * correct(rules, torch.nonzero(part)[:, 0]).weights * token_losses[part]).sum())
        for part in parts
    )


def test_a_trajectory_that_is_filtered_whole_counts_for_nothing() -> None:
    lengths = corrections.counted_lengths(
        kept=kept_tokens(Rules(sequence_window=Window(low=0.8, high=1.5))), sequences=SEQUENCES, count=3
    )
    # The mean over trajectories is over two of them, not three.
    weights = token_weights(trained_lengths=lengths.numpy(), aggregation="sequence_mean", constant_length=1)
    assert weights.tolist() == pytest.approx([1 / 4, 0, 1 / 2])


def test_no_correction_passes_a_gradient() -> None:
    leaf = PROXIMAL.clone().requires_grad_()
    everything = Rules(weight="sequence", token_window=ICEPOP, sequence_window=Window(low=0.5, high=2.0))
    for rules in (Rules(), Rules(weight="none", token_window=ICEPOP), everything):
        corrected = corrections.correct(
            rules=rules, proximal_logprobs=leaf, behavior_logprobs=BEHAVIOR, sequences=SEQUENCES, count=3
        )
        assert not corrected.weights.requires_grad


@pytest.mark.parametrize("weight", get_args(Weight))
def test_weights_stay_finite_for_impossible_and_far_apart_logprobs(weight: Weight) -> None:
    wild = [0.0, -1e-30, -90.0, -1000.0, -math.inf]
    proximal, behavior = (torch.tensor(side) for side in zip(*itertools.product(wild, wild), strict=True))
    for sequences in (torch.zeros(25, dtype=torch.int64), torch.arange(25)):
        corrected = corrections.correct(
            rules=Rules(weight=weight, token_window=ICEPOP, sequence_window=ICEPOP),
            proximal_logprobs=proximal,
            behavior_logprobs=behavior,
            sequences=sequences,
            count=25,
        )
        assert torch.isfinite(corrected.weights).all()
    # Two policies that both call a token impossible agree about it.
    same = corrections.importance_ratio(
        proximal_logprobs=torch.tensor([-math.inf]), behavior_logprobs=torch.tensor([-math.inf])
    )
    assert same.tolist() == [1.0]


def test_the_interpolated_proximal_moves_from_behavior_to_policy_as_a_token_gets_staler() -> None:
    # alpha = 1, 1/2 and 1/4: -1; (-1 - 3)/2 = -2; (-1 - 3 x 3)/4 = -2.5.
    proximal = corrections.interpolated_proximal(
        behavior_logprobs=doubles(-1, -1, -1), policy_logprobs=doubles(-3, -3, -3), lags=torch.tensor([0, 1, 3])
    )
    assert proximal.tolist() == pytest.approx([-1, -2, -2.5])


def test_the_interpolated_proximal_passes_no_gradient_and_stays_finite() -> None:
    def total(policy: Tensor) -> Tensor:
        anchor = corrections.interpolated_proximal(
            behavior_logprobs=doubles(-math.inf, -1), policy_logprobs=policy, lags=torch.tensor([0, 2])
        )
        assert torch.isfinite(anchor).all()
        return (policy - anchor).sum()

    assert gradient(total, doubles(-2, -3)).tolist() == [1, 1]
