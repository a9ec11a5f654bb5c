"""A training model that is all weights of the base model: it has the base model to itself while it is there.

It looks like an adapter without factors, so that rows, gradients and steps are those of adapters: `flat` holds the
numbers of all weights in float32, which the optimizer moves, and `settle` gives them to the model in its own type.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from learner.training.adapter_layers import ClientAdapter


@dataclass(frozen=True, eq=False)
class WholeWeights(ClientAdapter):
    """All weights by name; those that are tied are there once."""

    parameters: Mapping[str, nn.Parameter]

    @property
    def leaves(self) -> list[Tensor]:
        """The model's own parameters, in the order in which they lie in `flat`."""
        return list(self.parameters.values())

    def by_name(self, flat: Tensor) -> dict[str, Tensor]:
        """Parts of a tensor that is as long as `flat`, shaped as the weights, by name."""
        parts = torch.split(flat, [leaf.numel() for leaf in self.leaves])
        return {name: part.view_as(self.parameters[name]) for name, part in zip(self.parameters, parts, strict=True)}

    def settle(self) -> None:
        """Has the model compute with the numbers in `flat`."""
        with torch.no_grad():
            for name, part in self.by_name(self.flat).items():
                self.parameters[name].copy_(part)
