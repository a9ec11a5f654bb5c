"""A bettor's wealth against one hypothesis: an e-process that may begin at any time, over a row of stakes.

Pure. A round's growth factor must be at most 1 on average while the hypothesis holds. Wealth that was bet from the
first round on would be lost to a generator that is honest for long, and then is not. So a part of it is put in at each
round n, w(n) = 1/(n (n + 1)), which add up to 1:

    S(n) = (S(n - 1) + w(n)) growth(n)

is an e-process, since each part is one. A change after n rounds costs 2 log n nats to notice.
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray


def log_mean_exp(logs: Iterable[float]) -> float:
    """log of the mean of exponentials: the mean of e-values is an e-value. -inf for nothing but -inf, or nothing."""
    values = np.fromiter(logs, dtype=np.float64)
    if not values.size or values.max() == -math.inf:
        return -math.inf
    top = float(values.max())
    return top + math.log(float(np.exp(values - top).mean()))


class Wager:
    """The wealth of one bettor, spread evenly over `stakes`."""

    def __init__(self, stakes: Sequence[float]) -> None:
        self._stakes = np.array(stakes, dtype=np.float64)
        self._logs = np.full(len(stakes), -math.inf)
        self._rounds = 0

    @property
    def stakes(self) -> NDArray[np.float64]:
        """The stakes, [K]."""
        return self._stakes

    @property
    def evidence(self) -> float:
        """log of the wealth, in nats; -inf before the first round."""
        return log_mean_exp(self._logs)

    def settle(self, log_growth: NDArray[np.float64]) -> None:
        """Ends a round: log of the growth factor of each stake, [K], finite."""
        self._rounds += 1
        put_in = -math.log(self._rounds * (self._rounds + 1.0))
        self._logs = np.logaddexp(self._logs, put_in) + log_growth


def growth_of_shares(stakes: NDArray[np.float64], shares: NDArray[np.float64]) -> NDArray[np.float64]:
    """log growth [K] of bets that the mean of `shares` [B], each at least 0, is above 1: prod(1 + stake (share - 1)).

    At most 1 on average if no share's mean, given the ones before, is above 1. 0 <= stake < 1.
    """
    return growth_of_means(stakes, shares - 1.0)


def growth_of_means(stakes: NDArray[np.float64], values: NDArray[np.float64]) -> NDArray[np.float64]:
    """log growth [K] of bets that the mean of `values` [N] is above 0: prod(1 + stake value), stake * value > -1.

    At most 1 on average if the sum of the values' means, each given what was before, is not above 0: as
    prod(1 + stake mean) <= exp(stake sum(means)).
    """
    return np.asarray(np.log1p(np.outer(stakes, values)).sum(axis=1))
