"""The posterior of each task's pass rate, against numbers that were worked out by hand."""

import json

import numpy as np
import pytest

from learner.leases.pass_rates import PassRates, TaskCounts, expected_variance


def shapes(rates: PassRates, task: int, *, at: int) -> tuple[float, float]:
    alpha, beta = rates.shapes([task], at=at)
    return float(alpha[0]), float(beta[0])


def test_counts_are_added_to_the_prior_and_halve_in_each_half_life() -> None:
    rates = PassRates(half_life_steps=2.0)
    assert shapes(rates, 7, at=5) == (1.0, 1.0), "nothing is known of it"
    rates.note(7, passed=3, failed=1, at=0)
    assert shapes(rates, 7, at=0) == (4.0, 2.0)
    assert shapes(rates, 7, at=2) == (2.5, 1.5)
    assert shapes(rates, 7, at=4) == (1.75, 1.25)
    rates.note(7, passed=1, failed=1, at=4)
    assert shapes(rates, 7, at=4) == (2.75, 2.25)
    assert shapes(rates, 7, at=6) == (1.875, 1.625)
    assert shapes(rates, 8, at=6) == (1.0, 1.0), "another task"


def test_without_a_half_life_and_with_another_prior() -> None:
    rates = PassRates(half_life_steps=None, prior=(0.5, 2.0))
    rates.note(1, passed=2, failed=6, at=0)
    assert shapes(rates, 1, at=10**6) == (2.5, 8.0)


def test_steps_that_a_resume_takes_back_forget_nothing_and_remember_nothing_better() -> None:
    rates = PassRates(half_life_steps=2.0)
    rates.note(7, passed=4, failed=0, at=10)
    assert shapes(rates, 7, at=4) == (5.0, 1.0)
    rates.note(7, passed=0, failed=2, at=4)
    assert shapes(rates, 7, at=10) == (5.0, 3.0)
    assert shapes(rates, 7, at=12) == (3.0, 2.0)


def test_the_expected_spread_is_that_of_the_beta_distribution() -> None:
    """Of Beta(1, 1) ∫ p(1 − p) dp = 1/6; of Beta(4, 2) 20 ∫ p⁴(1 − p)² dp = 20 · 4!2!/7! = 4/21."""
    alpha, beta = np.array([1.0, 4.0, 400.0, 1.0]), np.array([1.0, 2.0, 400.0, 99.0])
    expected = [1 / 6, 4 / 21, 400 * 400 / (800 * 801), 99 / (100 * 101)]
    assert expected_variance(alpha, beta) == pytest.approx(expected, rel=1e-12)
    drawn = np.random.default_rng(0).beta(4.0, 2.0, size=200_000)
    assert float(np.mean(drawn * (1 - drawn))) == pytest.approx(4 / 21, abs=5e-4)


def test_what_is_known_survives_json_to_the_last_bit_and_what_is_forgotten_goes() -> None:
    rates = PassRates(half_life_steps=3.0)
    rates.note(1, passed=1, failed=2, at=0)
    rates.note(2, passed=1, failed=0, at=20)
    rates.note(1, passed=0, failed=1, at=1)
    told = [[task, counts.passed, counts.failed, counts.at] for task, counts in rates.known(at=20)]
    again = PassRates(half_life_steps=3.0)
    again.reset((task, TaskCounts(*counts)) for task, *counts in json.loads(json.dumps(told)))
    for task in (1, 2, 3):
        assert shapes(again, task, at=21) == shapes(rates, task, at=21)
    # Of 3.79 rollouts at step 1 less than 0.01 is left 26 steps later: 3.79 / 2 ** (26 / 3) = 0.0093.
    assert {task for task, _ in rates.known(at=26)} == {1, 2}
    assert {task for task, _ in rates.known(at=27)} == {2}
