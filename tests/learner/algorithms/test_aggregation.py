import numpy as np
import pytest

from learner.algorithms.aggregation import token_weights
from learner.algorithms.config import Aggregation

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
