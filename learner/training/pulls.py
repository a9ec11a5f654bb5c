"""The pull of each token of a step on the policy: the derivative of the loss by the token's logprob.

    gradient of the weights = sum over tokens of pull * d logprob / d weights

Advantage, clip, correction, filters and weights of the loss are all in that one number. Parts of a loss that do not go
through the logprobs of sampled tokens are not: entropy, the routers' even load, a teacher's candidates, a critic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from learner.training.ranks import summed_over_ranks
from learner.training.sequence_groups import ALONE, SequenceGroup


@dataclass(frozen=True, kw_only=True)
class TokenPulls:
    """Values of each token of a step's batch, float32 [N]; 0 at tokens that are not trained.

    `pulls`: the derivative of the loss by the token's logprob, added up over the step's updates. `clipped`: the number
    of updates in which the clip held the token back; None for a loss that has no clip. `advantages`: as the loss took
    them.
    """

    pulls: NDArray[np.float32]
    clipped: NDArray[np.float32] | None
    advantages: NDArray[np.float32]


class PullSums:
    """Collects the pulls of a step on this rank, while its updates are computed. It changes no number of theirs."""

    def __init__(self, tokens: int, *, ranks: int, group: SequenceGroup = ALONE) -> None:
        """Of a batch of so many tokens, N, which so many ranks share; those of `group` have the same ones."""
        self._pulls = torch.zeros(tokens)
        self._ranks, self._group = ranks, group

    def watch(self, logprobs: Tensor, places: Tensor) -> None:
        """Notes the gradient that will reach `logprobs` [n], which are those of the tokens at `places` [n]."""
        if logprobs.requires_grad:
            logprobs.register_hook(partial(self._add, places))  # type: ignore[no-untyped-call]

    def _add(self, places: Tensor, gradient: Tensor) -> None:
        # The engine multiplies a loss by the number of ranks, and averages their gradients.
        self._pulls[places] += gradient.detach().float().cpu() / self._ranks

    def over_ranks(self, *, advantages: Tensor, clipped: Sequence[tuple[Tensor, Tensor | None]]) -> TokenPulls:
        """The pulls of all ranks' tokens. `clipped` are this rank's places and marks of all updates. Every rank must
        call it.
        """
        marks = [(places, held) for places, held in clipped if held is not None]
        counts = torch.zeros(len(self._pulls))
        for places, held in marks:
            counts[places] += held.float().cpu()
        found = torch.stack([self._pulls, counts, torch.full_like(counts, float(bool(marks)))])
        pulls, counts, has_clip = summed_over_ranks(self._group.once(found))
        return TokenPulls(
            pulls=pulls.numpy(),
            clipped=counts.numpy() if bool(has_clip.any()) else None,
            advantages=advantages.float().numpy(),
        )
