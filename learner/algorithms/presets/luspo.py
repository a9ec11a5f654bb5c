"""LUSPO: GSPO whose long trajectories do not count for less."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from learner.algorithms.algorithm import GroupAlgorithm
from learner.algorithms.knobs import Aggregation, CorrectionKnobs, aggregation, clip_high, clip_low

if TYPE_CHECKING:
    from learner.algorithms.preset import Preset


class LuspoConfig(GroupAlgorithm, CorrectionKnobs):
    """GSPO whose loss of a trajectory is multiplied by its length, so that a token counts the same in each of them.

    Source: length-unbiased sequence policy optimization, arXiv 2602.05261.
    """

    type: Literal["luspo"] = "luspo"
    clip_low: float = clip_low(3e-4)
    clip_high: float = clip_high(4e-4)
    aggregation: Aggregation = aggregation("sequence_sum")

    def preset(self) -> Preset:
        """Group advantages, one clipped ratio for the trajectory, summed over its tokens."""
        from learner.algorithms.policy_gradient import of_group, sequence_clip

        return of_group(self, sequence_clip(self))
