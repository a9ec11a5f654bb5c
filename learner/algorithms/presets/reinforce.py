"""REINFORCE with the group as baseline."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from learner.algorithms.algorithm import GroupAlgorithm

if TYPE_CHECKING:
    from learner.algorithms.preset import Preset


class ReinforceConfig(GroupAlgorithm):
    """REINFORCE with the group as baseline, off-policy by a truncated ratio to the behavior policy."""

    type: Literal["reinforce"] = "reinforce"
    ratio_cap: float | None = Field(
        1.0, gt=0, description="Upper bound of the ratio to the behavior policy; 2 to 10 is AIPO's. none: no bound"
    )

    def preset(self) -> Preset:
        """Group advantages, weighted by a capped ratio."""
        from learner.algorithms.policy_gradient import of_group, reinforce

        return of_group(self, reinforce(self.ratio_cap), to_behavior=True)
