"""Costs of what pieces of work hold, fitted to sums over them by least squares; no cost is below 0."""

from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from protocol.costs import CostSums

_SINGULAR = 1e-9


def fitted_costs(sums: CostSums) -> tuple[float, ...]:
    """CPU seconds of each count. Counts that cannot be told apart, and those whose best cost is below 0, have 0."""
    products, seconds = np.array(sums.products), np.array(sums.seconds)
    best, least = np.zeros(len(seconds)), 0.0
    for size in range(1, len(seconds) + 1):
        for chosen in combinations(range(len(seconds)), size):
            found = _solved(products, seconds, chosen)
            if found is None:
                continue
            missed = float(found @ products @ found - 2 * found @ seconds)
            if missed < least - abs(least) * _SINGULAR:
                best, least = found, missed
    return tuple(best.tolist())


def _solved(
    products: NDArray[np.float64], seconds: NDArray[np.float64], chosen: tuple[int, ...]
) -> NDArray[np.float64] | None:
    """With all other costs 0; None if one of these is not above 0, or they cannot be told apart."""
    part = products[np.ix_(chosen, chosen)]
    scale = np.sqrt(np.diag(part))
    if not scale.all() or np.linalg.det(part / np.outer(scale, scale)) < _SINGULAR:
        return None
    costs = np.linalg.solve(part, seconds[list(chosen)])
    if costs.min() <= 0:
        return None
    found = np.zeros(len(seconds))
    found[list(chosen)] = costs
    return found
