"""TOPR: good trajectories whole, bad ones by a truncated ratio."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from learner.algorithms.algorithm import GroupAlgorithm

if TYPE_CHECKING:
    from learner.algorithms.preset import Preset


class ToprConfig(GroupAlgorithm):
    """Tapered off-policy REINFORCE: good trajectories count whole, uncorrected, bad ones by a truncated ratio.

    Source: arXiv 2503.14286.
    """

    type: Literal["topr"] = "topr"
    positive_weight: float = Field(1.0, ge=0, description="Weight of tokens with a positive advantage.")
    negative_weight: float = Field(1.0, ge=0, description="Weight of tokens with a negative advantage.")

    def preset(self) -> Preset:
        """Group advantages; good trajectories as examples, bad ones by a truncated ratio."""
        from learner.algorithms.policy_gradient import of_group, to_behavior
        from learner.algorithms.policy_loss import topr

        loss = partial(topr, positive_weight=self.positive_weight, negative_weight=self.negative_weight)
        return of_group(self, to_behavior(loss), to_behavior=True)
