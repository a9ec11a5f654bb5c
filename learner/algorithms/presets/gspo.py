"""GSPO: one clipped ratio for the whole trajectory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from learner.algorithms.algorithm import GroupAlgorithm
from learner.algorithms.knobs import (
    Aggregation,
    CorrectionKnobs,
    aggregation,
    clip_high,
    clip_low,
)

if TYPE_CHECKING:
    from learner.algorithms.preset import Preset


class GspoConfig(GroupAlgorithm, CorrectionKnobs):
    """Group sequence policy optimization: one clipped ratio for the whole trajectory, the geometric mean.

    Source: arXiv 2507.18071.
    """

    type: Literal["gspo"] = "gspo"
    clip_low: float = clip_low(3e-4)
    clip_high: float = clip_high(4e-4)
    aggregation: Aggregation = aggregation("sequence_mean")

    def preset(self) -> Preset:
        """Group advantages, one clipped ratio for the trajectory."""
        from learner.algorithms.policy_gradient import of_group, sequence_clip

        return of_group(self, sequence_clip(self))
