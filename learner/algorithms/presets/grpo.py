"""GRPO: each trajectory against its group, under a clip."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from learner.algorithms.algorithm import ClippedGroupAlgorithm

if TYPE_CHECKING:
    from learner.algorithms.preset import Preset


class GrpoConfig(ClippedGroupAlgorithm):
    """Group-relative policy optimization, with the decoupled clip and a correction for stale tokens.

    Sources: DeepSeekMath (arXiv 2402.03300) for the group baseline and the k3 penalty; AReaL (arXiv 2505.24298) for the
    proximal anchor.
    """

    type: Literal["grpo"] = "grpo"

    def preset(self) -> Preset:
        """Group advantages and the clip."""
        from learner.algorithms.policy_gradient import clip, of_group

        return of_group(self, clip(self))
