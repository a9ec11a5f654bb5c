"""How the losses of a step's tokens become one number.

Each aggregation is a weight per trajectory, shared by its tokens and computed once for the whole step from global
counts: the loss is the sum of weight x token loss, so no split into microbatches or ranks can change it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from learner.algorithms.config import Aggregation


def token_weights(
    *, trained_lengths: NDArray[np.int64], aggregation: Aggregation, constant_length: int
) -> NDArray[np.float64]:
    """The weight of each token of each trajectory, [S], given their `trained_lengths` [S] in tokens.

    A trajectory without trained tokens has weight 0 and is not counted. `token`: 1/tokens (arXiv 2503.14476);
    `sequence_mean`: 1/(trajectories x its length) (arXiv 2402.03300); `sequence_sum`: 1/trajectories;
    `constant`: 1/(trajectories x constant_length) (arXiv 2503.20783).
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
