"""REINFORCE with the group as baseline."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from learner.algorithms.algorithm import GroupAlgorithm
from learner.algorithms.knobs import SignedRatioCapKnobs, ratio_cap

if TYPE_CHECKING:
    from learner.algorithms.preset import Preset


class ReinforceConfig(GroupAlgorithm, SignedRatioCapKnobs):
    """REINFORCE with the group as baseline, off-policy by a truncated ratio to the behavior policy."""

    unclipped: ClassVar[bool] = True

    type: Literal["reinforce"] = "reinforce"
    ratio_cap: float | None = ratio_cap("2 to 10 is AIPO's")

    def preset(self) -> Preset:
        """Group advantages, weighted by a capped ratio."""
        from learner.algorithms.policy_gradient import of_group, reinforce

        return of_group(self, reinforce(self), to_behavior=True)
