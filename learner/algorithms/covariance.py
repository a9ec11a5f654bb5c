"""Tokens that lower the entropy: those where a high advantage meets a high logprob, picked out of a whole step.

With a policy gradient the entropy falls by the covariance of advantages and logprobs (arXiv 2505.22617). A few tokens
make up most of it, so it is they that are left out (`drawn`) or held (`largest`).

Shapes. M tokens of a step: `advantages`, `logprobs` [M], the policy's when the step began, `counted` [M] bool, which of
them take part in the loss. Results are bool [M], false where not counted.
"""

from __future__ import annotations

import torch
from torch import Tensor


def covariances(*, advantages: Tensor, logprobs: Tensor, counted: Tensor) -> Tensor:
    """(A - mean A) (log p - mean log p) of each token, the means over the counted ones; 0 where not counted. [M]."""
    if not bool(counted.any()):
        return torch.zeros_like(advantages)
    product = (advantages - advantages[counted].mean()) * (logprobs - logprobs[counted].mean())
    return torch.where(counted, product, 0.0)


def drawn(found: Tensor, *, low: float, high: float, share: float, counted: Tensor, seed: int) -> Tensor:
    """Tokens drawn at random, each as likely, of those with a covariance in `found` between `low` and `high`.

    As many as `share` of the counted ones, at least one, at most all of those between. Equal `seed`s draw alike.
    """
    (between,) = torch.nonzero(counted & (found > low) & (found < high), as_tuple=True)
    order = torch.randperm(len(between), generator=torch.Generator().manual_seed(seed))
    picked = torch.zeros_like(counted)
    picked[between[order[: _number(share, counted)]]] = True
    return picked


def largest(found: Tensor, *, share: float, counted: Tensor) -> Tensor:
    """The tokens with the largest covariances in `found`: `share` of the counted ones, at least one of them."""
    places = torch.argsort(torch.where(counted, found, -torch.inf), descending=True, stable=True)
    picked = torch.zeros_like(counted)
    picked[places[: _number(share, counted)]] = True
    return picked & counted


def _number(share: float, counted: Tensor) -> int:
    return max(int(share * int(counted.sum())), 1)
