"""Weights for the gap between the proximal and the behavior policy (lag and engine numerics). Tensors are [N]."""

from __future__ import annotations

import torch
from torch import Tensor

# exp(20) is far above every cap in use, and keeps a wild logprob from becoming infinity times zero.
LOG_RATIO_BOUND = 20.0


def importance_ratio(*, proximal_logprobs: Tensor, behavior_logprobs: Tensor) -> Tensor:
    """exp(proximal - behavior), without gradient, the exponent bounded by 20 either way."""
    gap = (proximal_logprobs - behavior_logprobs).detach()
    return torch.exp(gap.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND))


def truncate(*, proximal_logprobs: Tensor, behavior_logprobs: Tensor, cap: float) -> Tensor:
    """min(exp(proximal - behavior), cap), without gradient.

    Truncated importance sampling: Ionides 2008, "Truncated Importance Sampling", doi 10.1198/106186008X320456.
    """
    ratio = importance_ratio(proximal_logprobs=proximal_logprobs, behavior_logprobs=behavior_logprobs)
    return ratio.clamp(max=cap)
