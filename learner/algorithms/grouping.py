"""Statistics of values within groups, given back to every member. S values, in any order, in groups of any sizes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Grouping:
    """Which values belong together. `index` [S] int64 numbers the groups from 0; `sizes` [S] int64, the size of the
    group that each value is in. Every method takes values [S] and returns [S], one entry for each value.
    """

    index: Tensor
    sizes: Tensor

    @classmethod
    def of(cls, labels: Tensor) -> Grouping:
        """Values with equal labels are one group. `labels` [S] int64, or [S, k] where all k numbers must be equal."""
        _, index, counts = torch.unique(
            labels, dim=0 if labels.dim() > 1 else None, return_inverse=True, return_counts=True
        )
        return cls(index=index, sizes=counts[index])

    def sums(self, values: Tensor) -> Tensor:
        """The sum over the group, to the last bit the same for every order of the values."""
        order = torch.argsort(values)
        totals = values.new_zeros(len(values)).index_add_(0, self.index[order], values[order])
        return totals[self.index]

    def means(self, values: Tensor) -> Tensor:
        """The mean over the group."""
        return self.sums(values) / self.sizes

    def deviations(self, values: Tensor) -> Tensor:
        """The unbiased standard deviation of the group, 0 for a group of one."""
        squares = self.sums((values - self.means(values)).square())
        return (squares / (self.sizes - 1).clamp(min=1)).sqrt()

    def minima(self, values: Tensor) -> Tensor:
        """The smallest value of the group."""
        return self._extreme(values, "amin")

    def maxima(self, values: Tensor) -> Tensor:
        """The largest value of the group."""
        return self._extreme(values, "amax")

    def varies(self, values: Tensor) -> Tensor:
        """Bool [S]: whether two values of the group differ. Exact: no mean is involved, so nothing is rounded."""
        return self.minima(values) != self.maxima(values)

    def _extreme(self, values: Tensor, reduce: str) -> Tensor:
        start = values.new_zeros(len(values))
        return start.scatter_reduce(0, self.index, values, reduce=reduce, include_self=False)[self.index]
