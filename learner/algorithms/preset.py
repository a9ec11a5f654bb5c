"""What a preset is to the trainer: a token loss, weights for the tokens, and which passes it needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class LossTokens:
    """The N trained tokens of one microbatch, each tensor [N]; only `policy_logprobs` carries a gradient.

    Logprobs are in nats at the sampling temperature. `lags` counts policy versions. `reference_logprobs` is absent when
    the preset asks for no reference pass.
    """

    policy_logprobs: Tensor
    proximal_logprobs: Tensor
    behavior_logprobs: Tensor
    advantages: Tensor
    lags: Tensor
    reference_logprobs: Tensor | None = None


@dataclass(frozen=True)
class TokenLosses:
    """`losses` [N]; `clipped` and `corrected` [N] bool where the preset has a clip or a bounded correction weight."""

    losses: Tensor
    clipped: Tensor | None = None
    corrected: Tensor | None = None


@dataclass(frozen=True)
class Preset:
    """An algorithm as the trainer sees it.

    `token_losses` is pure. `token_weights` maps the trained lengths of a step's trajectories [S] to the weight that
    each token of a trajectory has in the step's loss [S]. `advantages` maps the rewards of a group [G] to advantages
    [G]; it is absent for an algorithm that learns from files.
    """

    name: str
    token_losses: Callable[[LossTokens], TokenLosses]
    token_weights: Callable[[NDArray[np.int64]], NDArray[np.float64]]
    advantages: Callable[[Tensor], Tensor] | None
    samples_policy: bool
    needs_reference: bool
