"""Estimates of a Kullback-Leibler divergence from logprobs of sampled tokens. Tensors are [N], results in nats.

Source of k1, k2 and k3: John Schulman, "Approximating KL Divergence", http://joschu.net/blog/kl-approx.html (2020).
"""

from __future__ import annotations

import torch
from torch import Tensor

# Beyond this the exponential is not an estimate of anything, and its gradient would drown the batch.
LOG_RATIO_BOUND = 10.0


def k3(*, policy_logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """exp(d) - 1 - d, never negative, d = reference - policy bounded by 10: estimates KL(policy || reference)."""
    gap = (reference_logprobs - policy_logprobs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return torch.expm1(gap) - gap


def mismatch(*, proximal_logprobs: Tensor, behavior_logprobs: Tensor) -> Tensor:
    """k3 for tokens that the behavior policy sampled: estimates KL(behavior || proximal), without gradient."""
    return k3(policy_logprobs=behavior_logprobs.detach(), reference_logprobs=proximal_logprobs.detach())
