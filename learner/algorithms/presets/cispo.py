"""CISPO: REINFORCE with clipped weights."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from learner.algorithms.algorithm import GroupAlgorithm

if TYPE_CHECKING:
    from learner.algorithms.preset import Preset


class CispoConfig(GroupAlgorithm):
    """REINFORCE whose weights, the ratios to the behavior policy, are clipped. Source: MiniMax-M1, arXiv 2506.13585."""

    unclipped: ClassVar[bool] = True

    type: Literal["cispo"] = "cispo"
    ratio_low: float = Field(
        1.0, ge=0, le=1, description="The ratio to the behavior policy is not below 1 - ratio_low. 1 is no bound."
    )
    ratio_high: float = Field(
        0.28, ge=0, description="The ratio to the behavior policy is not above 1 + ratio_high. Dimensionless."
    )

    def preset(self) -> Preset:
        """Group advantages, every token's weight bounded, none without gradient."""
        from learner.algorithms.policy_gradient import of_group, to_behavior
        from learner.algorithms.policy_loss import cispo

        loss = partial(cispo, clip_low=self.ratio_low, clip_high=self.ratio_high)
        return of_group(self, to_behavior(loss), to_behavior=True)
