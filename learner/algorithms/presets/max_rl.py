"""MaxRL: GRPO that weighs hard tasks as maximum likelihood does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from learner.algorithms.algorithm import ClippedGroupAlgorithm
from learner.algorithms.knobs import AdvantageScale, ScaleKnobs

if TYPE_CHECKING:
    from learner.algorithms.preset import Preset


class MaxRlConfig(ClippedGroupAlgorithm):
    """GRPO whose rewards are divided by their group's mean, which weighs hard tasks as maximum likelihood does.

    Source: MaxRL (arXiv 2602.02710).
    """

    type: Literal["max_rl"] = "max_rl"
    advantage_scale: AdvantageScale = ScaleKnobs.field("mean")

    def preset(self) -> Preset:
        """Group advantages that are divided by their group's mean, and the clip."""
        from learner.algorithms.policy_gradient import clip, of_group

        return of_group(self, clip(self))
