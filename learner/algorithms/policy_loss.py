"""Policy losses per token. Every tensor is [N], N the trained tokens of a microbatch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PolicyLoss:
    """`losses` [N] to be minimized; `clipped` [N], true where a bound replaced the ratio, so that no gradient flows."""

    losses: Tensor
    clipped: Tensor


def clip(
    *,
    policy_logprobs: Tensor,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = exp(policy - proximal).

    With `dual_clip` c, the loss of a token with A < 0 is not above c |A|. Sources: PPO (arXiv 1707.06347), dual clip
    (arXiv 1912.09729), the proximal anchor in place of the behavior policy (arXiv 2110.00641).
    """
    ratio = torch.exp(policy_logprobs - proximal_logprobs)
    plain = ratio * advantages
    bounded = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    gain = torch.minimum(plain, bounded)
    clipped = bounded < plain
    if dual_clip is not None:
        floor = torch.where(advantages < 0, dual_clip * advantages, -torch.inf)
        clipped = clipped | (gain < floor)
        gain = torch.maximum(gain, floor)
    return PolicyLoss(losses=-gain, clipped=clipped)


def negative_log_likelihood(*, policy_logprobs: Tensor) -> Tensor:
    """-log p of each token, in nats."""
    return -policy_logprobs
