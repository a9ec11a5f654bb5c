"""Dr. GRPO: GRPO without its two biases."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from learner.algorithms.algorithm import ClippedGroupAlgorithm
from learner.algorithms.knobs import AdvantageScale, Aggregation, ScaleKnobs, aggregation

if TYPE_CHECKING:
    from learner.algorithms.preset import Preset


class DrGrpoConfig(ClippedGroupAlgorithm):
    """GRPO without its two biases: rewards are not divided by their deviation, losses not by lengths.

    Source: Dr. GRPO (arXiv 2503.20783).
    """

    type: Literal["dr_grpo"] = "dr_grpo"
    advantage_scale: AdvantageScale = ScaleKnobs.field("none")
    aggregation: Aggregation = aggregation("constant")

    def preset(self) -> Preset:
        """Group advantages that are only centred, and the clip; the losses' sum over a constant length."""
        from learner.algorithms.policy_gradient import clip, of_group

        return of_group(self, clip(self))
