"""The bettor's wealth: hand-worked rounds, how seldom a fair game makes it rich, and how soon it notices a change."""

import math

import numpy as np
import pytest

from learner.trust.wagers import Wager, growth_of_means, growth_of_shares, log_mean_exp


@pytest.mark.parametrize(
    ("logs", "expected"),
    [
        ([0.0, math.log(3)], math.log(2)),
        ([-math.inf, math.log(4)], math.log(2)),
        ([], -math.inf),
        ([-math.inf], -math.inf),
    ],
)
def test_the_mean_of_e_values_is_taken_of_their_logarithms(logs: list[float], expected: float) -> None:
    assert log_mean_exp(logs) == pytest.approx(expected)


def test_a_part_of_the_wealth_is_put_in_at_each_round() -> None:
    """(0 + 1/2) 2 = 1, and (1 + 1/6) 3 = 3.5."""
    wager = Wager([0.5])
    assert wager.evidence == -math.inf

    wager.settle(np.log([2.0]))
    assert wager.evidence == pytest.approx(0.0)
    wager.settle(np.log([3.0]))
    assert wager.evidence == pytest.approx(math.log(3.5))


def test_the_wealth_is_spread_evenly_over_the_stakes() -> None:
    wager = Wager([0.1, 0.9])

    wager.settle(np.log([2.0, 6.0]))

    assert wager.evidence == pytest.approx(math.log((1 + 3) / 2))


def test_bets_on_shares_and_on_means_by_hand() -> None:
    """(1 + 0.5 (3 - 1)) (1 + 0.5 (0 - 1)) = 1, and (1 + 0.2) (1 - 0.1 2) = 0.96."""
    assert growth_of_shares(np.array([0.5]), np.array([3.0, 0.0])) == pytest.approx([0.0])
    assert growth_of_means(np.array([0.1, 0.2]), np.array([2.0, -1.0])) == pytest.approx(
        [math.log(1.2 * 0.9), math.log(1.4 * 0.8)]
    )


def _best_evidence(random: np.random.Generator, *, mean: float, rounds: int) -> float:
    wager, best = Wager([0.1, 0.5, 0.9]), -math.inf
    for _ in range(rounds):
        wager.settle(growth_of_shares(wager.stakes, random.exponential(mean, size=2)))
        best = max(best, wager.evidence)
    return best


def test_a_fair_game_seldom_makes_rich_however_often_one_looks() -> None:
    random = np.random.default_rng(0)

    best = np.array([_best_evidence(random, mean=1.0, rounds=150) for _ in range(300)])

    assert (best >= math.log(20)).mean() <= 0.05
    assert best.max() > 0, "or the test could not fail"


def test_an_unfair_game_makes_rich() -> None:
    random = np.random.default_rng(0)

    best = np.array([_best_evidence(random, mean=2.0, rounds=150) for _ in range(30)])

    assert best.min() > 16


def test_a_game_that_becomes_unfair_late_makes_rich_all_the_same() -> None:
    """A product from the first round on would have lost some 500 nats by then."""
    wager, lost = Wager([0.5]), 0.0
    for _ in range(1000):
        growth = growth_of_shares(wager.stakes, np.array([0.2]))
        wager.settle(growth)
        lost += float(growth[0])
    rounds = 0
    while wager.evidence < 16:
        wager.settle(growth_of_shares(wager.stakes, np.array([3.0])))
        rounds += 1

    assert lost < -500
    # 2 log 1000 = 13.8 nats for the late start and 16 of evidence, at log 2 a round
    assert rounds == pytest.approx((2 * math.log(1000) + 16) / math.log(2), abs=3)
