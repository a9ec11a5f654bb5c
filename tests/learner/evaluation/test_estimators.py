"""The numbers of an evaluation, worked by hand, and what they promise for any samples."""

import math
from itertools import combinations, permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.evaluation.results import consensus_at_k, majority, pass_at_k, wilson_interval, win_rate

Z_SQUARED = 3.8414588206941236
"""The square of 1.9599639845, the normal distribution's 97.5 % quantile."""


def test_pass_at_k_by_hand() -> None:
    # Of 5 samples 2 are right. Of the C(5, 2) = 10 pairs, C(3, 2) = 3 hold no right one.
    assert pass_at_k(samples=5, correct=2, k=2) == pytest.approx(1 - 3 / 10)
    # C(3, 3) / C(5, 3) = 1 / 10.
    assert pass_at_k(samples=5, correct=2, k=3) == pytest.approx(0.9)
    assert pass_at_k(samples=5, correct=2, k=4) == 1.0, "only three are wrong"
    assert pass_at_k(samples=5, correct=0, k=5) == 0.0
    assert pass_at_k(samples=1, correct=1, k=1) == 1.0


def test_pass_at_1_is_the_share_of_right_samples() -> None:
    assert pass_at_k(samples=7, correct=3, k=1) == pytest.approx(3 / 7)


def test_pass_at_k_needs_no_large_numbers() -> None:
    # One right sample is among k of n with chance k / n; C(4096, 2048) is beyond float64.
    assert pass_at_k(samples=4096, correct=1, k=2048) == pytest.approx(0.5, rel=1e-12)


@given(st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(case: tuple[int, int, int]) -> None:
    samples, correct, k = case
    subsets = list(combinations(range(samples), k))
    solved = sum(min(subset) < correct for subset in subsets)
    assert pass_at_k(samples=samples, correct=correct, k=k) == pytest.approx(solved / len(subsets), abs=1e-12)


def test_the_commonest_answer_wins() -> None:
    assert majority(["3", "3", "4"], [True, True, False]) == 1.0
    assert majority(["3", "4", "4"], [True, False, False]) == 0.0


def test_a_tie_is_broken_evenly() -> None:
    # 3 and 4 have two votes each, 5 has one: each of the two wins with chance 1/2.
    assert majority(["3", "4", "5", "4", "3"], [True, False, True, False, True]) == 0.5
    # Of three answers with one vote each, one is right.
    assert majority(["1", "2", "3"], [False, True, False]) == pytest.approx(1 / 3)


def test_who_gives_no_answer_does_not_vote() -> None:
    assert majority([None, None, "3"], [False, False, True]) == 1.0
    assert majority([None, None], [False, False]) == 0.0


def test_an_answer_that_was_judged_both_ways_counts_by_its_share() -> None:
    assert majority(["3", "3", "3", "4"], [True, False, True, True]) == pytest.approx(2 / 3)


def test_consensus_is_over_disjoint_runs_of_samples() -> None:
    answers = ["3", "3", "4", "4", "4", "3", "3"]
    right = [answer == "3" for answer in answers]
    # 3 3 4 → right; 4 4 3 → wrong; the last 3 is left over.
    assert consensus_at_k(answers, right, k=3) == 0.5
    # 3 3 → right; 4 4 → wrong; 4 3 → a tie, 1/2.
    assert consensus_at_k(answers, right, k=2) == pytest.approx((1 + 0 + 0.5) / 3)
    # Four votes for 3, three for 4.
    assert consensus_at_k(answers, right, k=7) == 1.0


def test_consensus_of_one_is_the_share_of_right_samples() -> None:
    assert consensus_at_k(["1", "2", "3", "2"], [False, True, False, True], k=1) == 0.5


@given(st.lists(st.sampled_from(["1", "2", None]), min_size=1, max_size=5), st.integers(1, 5))
def test_consensus_is_unbiased_over_the_order_of_samples(answers: list[str | None], k: int) -> None:
    k = min(k, len(answers))

    def right(given: tuple[str | None, ...]) -> list[bool]:
        return [answer == "1" for answer in given]

    orders = [consensus_at_k(order, right(order), k=k) for order in permutations(answers)]
    subsets = [majority(subset, right(subset)) for subset in combinations(answers, k)]
    assert math.fsum(orders) / len(orders) == pytest.approx(math.fsum(subsets) / len(subsets))


def test_the_interval_of_nothing_and_of_everything_by_hand() -> None:
    # With share 0, centre and half width are both z²/2n / (1 + z²/n): from 0 to z²/(n + z²).
    assert wilson_interval(share=0.0, count=10) == pytest.approx((0.0, Z_SQUARED / (10 + Z_SQUARED)), abs=1e-12)
    assert wilson_interval(share=1.0, count=10) == pytest.approx((10 / (10 + Z_SQUARED), 1.0), abs=1e-12)


def test_the_interval_of_a_half_by_hand() -> None:
    # sqrt(z²/4n + z⁴/4n²) / (1 + z²/n) = z/2 · sqrt(n + z²)/n · n/(n + z²) = z / (2 sqrt(n + z²)).
    half = math.sqrt(Z_SQUARED) / (2 * math.sqrt(96 + Z_SQUARED))
    assert wilson_interval(share=0.5, count=96) == pytest.approx((0.5 - half, 0.5 + half))
    assert half == pytest.approx(0.098, abs=1e-3)


def test_the_interval_without_a_task_is_everything() -> None:
    assert wilson_interval(share=0.0, count=0) == (0.0, 1.0)


@given(st.floats(0, 1), st.integers(1, 10_000))
def test_an_interval_holds_its_share_and_is_mirrored_with_it(share: float, count: int) -> None:
    low, high = wilson_interval(share=share, count=count)
    assert 0.0 <= low <= share + 1e-12
    assert share - 1e-12 <= high <= 1.0
    assert wilson_interval(share=1 - share, count=count) == pytest.approx((1 - high, 1 - low), abs=1e-9)


def test_a_win_rate_by_hand() -> None:
    assert win_rate([[1.0], [0.0], [0.5]], [[0.0], [0.0], [1.0]]) == pytest.approx((1 + 0.5 + 0) / 3)
    # 1 against 0, 0, 1: 1 + 1 + ½; 0 against 0, 0, 1: ½ + ½ + 0.
    assert win_rate([[1.0, 0.0]], [[0.0, 0.0, 1.0]]) == pytest.approx(3.5 / 6)


def test_tasks_count_alike_whatever_the_number_of_their_samples() -> None:
    assert win_rate([[1.0], [0.0] * 9], [[0.0], [1.0] * 9]) == 0.5


REWARDS = st.lists(st.integers(0, 2).map(float), min_size=1, max_size=3)


@given(st.lists(st.tuples(REWARDS, REWARDS), min_size=1, max_size=5))
def test_two_win_rates_of_one_pair_of_models_sum_to_one(tasks: list[tuple[list[float], list[float]]]) -> None:
    ours, theirs = [task[0] for task in tasks], [task[1] for task in tasks]
    assert win_rate(ours, theirs) + win_rate(theirs, ours) == pytest.approx(1.0)
    assert win_rate(ours, ours) == pytest.approx(0.5)
