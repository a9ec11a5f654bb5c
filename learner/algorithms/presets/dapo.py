"""DAPO: GRPO that clips higher above, on groups with spread."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from learner.algorithms.algorithm import ClippedGroupAlgorithm
from learner.algorithms.knobs import clip_high

if TYPE_CHECKING:
    from learner.algorithms.preset import Preset


class DapoConfig(ClippedGroupAlgorithm):
    """GRPO that clips higher above, leaves out groups without spread, and penalises overlong completions where
    overlong_length says which those are.

    Source: DAPO (arXiv 2503.14476).
    """

    wants_spread: ClassVar[bool] = True
    type: Literal["dapo"] = "dapo"
    clip_high: float = clip_high(0.28)

    def preset(self) -> Preset:
        """Group advantages and the clip, on groups with spread."""
        from learner.algorithms.policy_gradient import clip, of_group

        return of_group(self, clip(self))
