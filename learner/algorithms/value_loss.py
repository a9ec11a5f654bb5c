"""The critic's loss and how well it predicts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ValueLoss:
    """`losses` [N] to be minimized; `clipped` [N] bool, true where the bound leaves no gradient, None without one."""

    losses: Tensor
    clipped: Tensor | None


def value_loss(*, values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None) -> ValueLoss:
    """1/2 max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) per token, all [N].

    `old_values` are the critic's when the step began, `returns` its targets; the gradient flows to `values`. Without
    `clip`, 1/2 (V - R)^2. Source: PPO's reference implementation, as in arXiv 2005.12729.
    """
    plain = (values - returns).square()
    if clip is None:
        return ValueLoss(losses=plain / 2, clipped=None)
    limited = (values.clamp(old_values - clip, old_values + clip) - returns).square()
    return ValueLoss(losses=torch.maximum(plain, limited) / 2, clipped=limited > plain)


def explained_variance(*, values: Tensor, returns: Tensor) -> float | None:
    """1 - Var(returns - values)/Var(returns) over the M tokens of a whole step.

    1 is perfect, 0 no better than a constant. None where the returns do not vary, so that there is nothing to explain.
    """
    # Equal returns can have a mean that differs from them by rounding; they have no spread all the same.
    if returns.numel() < 2 or bool((returns == returns[0]).all()):
        return None
    targets = returns.detach().double()
    unexplained = (targets - values.detach().double()).var(correction=0)
    return float(1 - unexplained / targets.var(correction=0))
