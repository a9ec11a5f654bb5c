import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.algorithms.knobs import Aggregation
from learner.algorithms.policy_loss import pair_weights, sequence_weights, token_weights

LENGTHS = np.array([1, 3, 0, 4])


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token", [1 / 8, 1 / 8, 0, 1 / 8]),  # 8 tokens
        ("sequence_mean", [1 / 3, 1 / 9, 0, 1 / 12]),  # 3 trajectories that have tokens
        ("sequence_sum", [1 / 3, 1 / 3, 0, 1 / 3]),
        ("constant", [1 / 30, 1 / 30, 0, 1 / 30]),  # 3 trajectories x 10
    ],
)
def test_weights_count_the_tokens_and_trajectories_that_are_trained(
    aggregation: Aggregation, expected: list[float]
) -> None:
    weights = token_weights(trained_lengths=LENGTHS, aggregation=aggregation, constant_length=10)
    assert weights.tolist() == pytest.approx(expected)


def test_the_means_give_every_step_a_total_weight_of_one() -> None:
    aggregations: tuple[Aggregation, ...] = ("token", "sequence_mean")
    for aggregation in aggregations:
        weights = token_weights(trained_lengths=LENGTHS, aggregation=aggregation, constant_length=10)
        assert float((weights * LENGTHS).sum()) == pytest.approx(1.0)


def test_a_step_in_which_nothing_is_trained_has_no_weights_rather_than_nan() -> None:
    weights = token_weights(trained_lengths=np.zeros(3, dtype=np.int64), aggregation="token", constant_length=10)
    assert weights.tolist() == [0.0, 0.0, 0.0]


def test_the_constant_divides_by_trajectories_times_length_and_so_does_not_favour_short_ones() -> None:
    # Losses of 1 at every token of 1 + 3 + 4: 8 / (3 x 10), not 8 / 10.
    weights = token_weights(trained_lengths=LENGTHS, aggregation="constant", constant_length=10)
    assert float((weights * LENGTHS).sum()) == pytest.approx(8 / 30)


AGGREGATIONS: tuple[Aggregation, ...] = ("token", "sequence_mean", "sequence_sum", "constant")


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_sequence_has_its_weight_wherever_it_lies(aggregation: Aggregation) -> None:
    order = np.array([3, 1, 0, 2])
    weights = token_weights(trained_lengths=LENGTHS, aggregation=aggregation, constant_length=10)
    shuffled = token_weights(trained_lengths=LENGTHS[order], aggregation=aggregation, constant_length=10)
    assert shuffled.tolist() == weights[order].tolist()


def by_definition(losses: list[list[float]], aggregation: Aggregation) -> float:
    """The aggregations as they are written down, over trajectories that have tokens; constant_length is 10."""
    present = [tokens for tokens in losses if tokens]
    sums = [sum(tokens) for tokens in present]
    means = [sum(tokens) / len(tokens) for tokens in present]
    return {
        "token": sum(sums) / sum(len(tokens) for tokens in present),
        "sequence_mean": sum(means) / len(present),
        "sequence_sum": sum(sums) / len(present),
        "constant": sum(sums) / (len(present) * 10),
    }[aggregation]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10**9))
def test_weighted_sums_are_the_aggregation_however_the_step_is_split(aggregation: Aggregation, seed: int) -> None:
    chance = random.Random(seed)
    losses = [[1.5], *([chance.gauss(0, 1) for _ in range(chance.randint(0, 6))] for _ in range(chance.randint(0, 7)))]
    cut = chance.randint(0, len(losses))
    lengths = np.array([len(tokens) for tokens in losses])
    weights = token_weights(trained_lengths=lengths, aggregation=aggregation, constant_length=10)
    weighted = [weight * sum(tokens) for weight, tokens in zip(weights.tolist(), losses, strict=True)]
    total = sum(weighted[:cut]) + sum(weighted[cut:])
    assert total == pytest.approx(by_definition(losses, aggregation), abs=1e-9)


def test_a_filtered_token_leaves_the_numerator_and_the_denominator() -> None:
    # Losses 2 | 1, 1, 4, and a filter takes out the 4: the mean of the three that are left is 4/3. With the lengths
    # before the filter it would be 4/4.
    filtered = token_weights(trained_lengths=np.array([1, 2]), aggregation="token", constant_length=10)
    original = token_weights(trained_lengths=np.array([1, 3]), aggregation="token", constant_length=10)
    kept = np.array([2.0, 1.0 + 1.0])  # sums per sequence
    assert float((filtered * kept).sum()) == pytest.approx(4 / 3)
    assert float((original * kept).sum()) == pytest.approx(1.0)


def test_a_loss_per_sequence_is_averaged_over_those_that_have_tokens() -> None:
    assert sequence_weights(trained_lengths=LENGTHS).tolist() == pytest.approx([1 / 3, 1 / 3, 0, 1 / 3])
    assert sequence_weights(trained_lengths=np.zeros(2, dtype=np.int64)).tolist() == [0.0, 0.0]


def test_a_loss_per_pair_is_averaged_over_pairs_and_both_sides_know_the_weight() -> None:
    # Three pairs, one of which has an empty side: two count. Sequence 1 is in no pair.
    lengths = np.array([2, 5, 1, 4, 3, 0, 9])
    pairs = np.array([[4, 0], [5, 6], [2, 3]])
    weights = pair_weights(pairs=pairs, trained_lengths=lengths)
    assert weights.tolist() == [0.5, 0.0, 0.5, 0.5, 0.5, 0.0, 0.0]
    assert float(weights[pairs[:, 0]].sum()) == 1.0


def test_a_step_without_pairs_has_no_weights_rather_than_nan() -> None:
    weights = pair_weights(pairs=np.zeros((0, 2), dtype=np.int64), trained_lengths=LENGTHS)
    assert weights.tolist() == [0.0] * 4


def test_a_sequence_in_two_pairs_has_no_single_weight() -> None:
    with pytest.raises(AssertionError, match="more than one pair"):
        pair_weights(pairs=np.array([[0, 1], [0, 3]]), trained_lengths=LENGTHS)
