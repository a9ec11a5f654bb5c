"""The baseline with which the gradient of a group varies least, for each place of its trajectories by itself."""

from __future__ import annotations

import torch
from torch import Tensor

from learner.algorithms.advantages import Grouping, discounted_sums


def optimal_token(
    *, rewards: Tensor, groups: Tensor, sequences: Tensor, norms: Tensor, token_rewards: Tensor | None = None
) -> Tensor:
    """G_t - B_t of each token, [M]; shapes as in `advantages`. G_t is the reward to go, B_t the baseline of place t.

    `norms` [M] are the squared norms of the gradients of the tokens' logprobs, as they enter the loss; the energy W_t
    is the sum of those of a trajectory up to its token t. B_t = sum W_t G_t / sum W_t, over the trajectories of the
    group that have a token t, so that the sum of W_t (G_t - B_t)^2 is least. A token whose place no other of the group
    has, as in the tail of the longest, has 0, and so has one where all G_t are equal, or nothing has energy.
    `token_rewards` [M], a KL penalty say, count from their token on. Adding a number to all rewards changes nothing.
    Source: the optimal token baseline (arXiv 2602.07078); its authors' code leaves the tail of the longest without a
    baseline.
    """
    to_go = rewards[sequences]
    if token_rewards is not None:
        to_go = to_go + discounted_sums(token_rewards, owners=sequences, discount=1.0)
    places = _up_to(torch.ones_like(to_go), sequences, trajectories=len(rewards)).round().long()
    energy = _up_to(norms, sequences, trajectories=len(rewards))
    of_group = Grouping.of(groups).index[sequences]
    longest = int(places.amax()) if len(places) else 0
    compared = Grouping.of(of_group * (1 + longest) + places)
    weighed = compared.sums(energy)
    baselines = compared.sums(energy * to_go) / torch.where(weighed > 0, weighed, 1.0)
    return torch.where(compared.varies(to_go) & (weighed > 0), to_go - baselines, 0.0)


def _up_to(values: Tensor, sequences: Tensor, *, trajectories: int) -> Tensor:
    """The sum of a trajectory's values up to each token, that one's with them, [M]."""
    whole = values.new_zeros(trajectories).index_add_(0, sequences, values)
    return whole[sequences] - discounted_sums(values, owners=sequences, discount=1.0) + values
