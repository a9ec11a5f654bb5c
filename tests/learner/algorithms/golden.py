"""Ten tokens of four trajectories on which other implementations were run, and the weights of the means over them."""

import numpy as np
import torch
from torch import Tensor

from learner.algorithms.knobs import Aggregation
from learner.algorithms.policy_loss import token_weights
from tests.learner.algorithms.differences import doubles

LENGTHS = (3, 1, 2, 4)
SEQUENCES = torch.tensor([0, 0, 0, 1, 2, 2, 3, 3, 3, 3])
COUNT = 4
BEFORE = doubles(-0.1, -1.2, -0.7, -2.3, -0.4, -1.6, -0.05, -3.1, -0.9, -0.3)
"""Logprobs of the older policy: behavior or proximal, whatever a loss compares with."""
MOVES = doubles(0.02, -0.3, 0.35, 0.6, -0.25, 0.1, 0.04, -0.7, 0.15, -0.05)
"""Logprobs of the policy less those."""
ADVANTAGES = doubles(1.5, -0.5, -1.2, 0.8)[SEQUENCES]
UNEVEN = ADVANTAGES + doubles(0.1, -0.2, 0.3, 0.0, 0.4, -0.1, 0.2, -0.3, 0.1, 0.0)
"""Advantages that differ from token to token."""


def weights_of(aggregation: Aggregation) -> Tensor:
    """The weight of each token in a mean; the constant length is 4, the longest trajectory's."""
    weights = token_weights(trained_lengths=np.array(LENGTHS), aggregation=aggregation, constant_length=4)
    return torch.tensor(weights)[SEQUENCES]
