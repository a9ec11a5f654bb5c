"""How the losses of a step's tokens become one number.

Each aggregation is a weight per trajectory, shared by its tokens and computed once for the whole step from global
counts: the loss is the sum of weight x token loss, so no split into microbatches or ranks can change it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from learner.algorithms.knobs import Aggregation


def token_weights(
    *, trained_lengths: NDArray[np.int64], aggregation: Aggregation, constant_length: int
) -> NDArray[np.float64]:
    """The weight of each token of each trajectory, [S], given their `trained_lengths` [S] in tokens.

    A trajectory without trained tokens has weight 0 and is not counted. `token`: 1/tokens (arXiv 2503.14476);
    `sequence_mean`: 1/(trajectories x its length) (arXiv 2402.03300); `sequence_sum`: 1/trajectories;
    `constant`: 1/(trajectories x constant_length) (arXiv 2503.20783).

    A token that a filter takes out of the loss leaves the counts too when `trained_lengths` are those without it; with
    the original lengths, and weights given to the remaining tokens only, the original count stays.
    """
    present = trained_lengths > 0
    trajectories = int(present.sum())
    if trajectories == 0:
        return np.zeros(trained_lengths.shape, dtype=np.float64)
    if aggregation == "sequence_mean":
        return present / (trajectories * np.maximum(trained_lengths, 1).astype(np.float64))
    divisor = {
        "token": int(trained_lengths.sum()),
        "sequence_sum": trajectories,
        "constant": trajectories * constant_length,
    }[aggregation]
    return present / float(divisor)


def once_for_each(
    weigh: Callable[[NDArray[np.int64]], NDArray[np.float64]],
    *,
    trained_lengths: NDArray[np.int64],
    trajectories: NDArray[np.int64],
) -> NDArray[np.float64]:
    """The weight of each token of each sequence, [S]; a trajectory counts once, by the tokens of all its sequences.

    `trained_lengths` and `trajectories` are of the sequences, [S]; `weigh` is one of the functions here, for
    trajectories.
    """
    _, of_trajectory = np.unique(trajectories, return_inverse=True)
    whole = np.bincount(of_trajectory, weights=trained_lengths).astype(np.int64)
    return weigh(whole)[of_trajectory]


def sequence_weights(*, trained_lengths: NDArray[np.int64]) -> NDArray[np.float64]:
    """The weight of each sequence in a loss per sequence (as in kto), [S]: the mean over those with trained tokens."""
    return _mean_over(trained_lengths > 0)


def pair_weights(*, pairs: NDArray[np.int64], trained_lengths: NDArray[np.int64]) -> NDArray[np.float64]:
    """The weight of a pair's loss in the mean over pairs, at both its sequences, [S]; 0 for a sequence without a pair.

    `pairs` [P, 2] are chosen and rejected sequence (0 to S - 1); a sequence is in one pair at most. A pair of which one
    side has no trained token is not counted. Summed over the chosen, the weights are 1, whatever the split.
    """
    assert len(np.unique(pairs)) == pairs.size, "a sequence is in more than one pair"
    per_pair = _mean_over((trained_lengths[pairs[:, 0]] > 0) & (trained_lengths[pairs[:, 1]] > 0))
    weights = np.zeros(trained_lengths.shape, dtype=np.float64)
    weights[pairs] = per_pair[:, np.newaxis]
    return weights


def _mean_over(counted: NDArray[np.bool_]) -> NDArray[np.float64]:
    return counted / float(max(1, counted.sum()))
