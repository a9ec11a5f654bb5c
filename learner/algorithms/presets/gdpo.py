"""GDPO: GRPO whose reward components are normalised one by one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from learner.algorithms.algorithm import Algorithm
from learner.algorithms.knobs import ClipKnobs, CorrectionKnobs, TeacherKnobs, UnshapedKnobs

if TYPE_CHECKING:
    from torch import Tensor

    from learner.algorithms.preset import Advantages, Preset, Rewards, ScoredBatch


class GdpoConfig(Algorithm, UnshapedKnobs, ClipKnobs, CorrectionKnobs, TeacherKnobs):
    """GRPO whose reward components are each normalised in their group before they are weighted and summed.

    Source: GDPO (arXiv 2601.05242).
    """

    type: Literal["gdpo"] = "gdpo"
    components: dict[str, float] = Field(
        description="Weight of each component of the reward, by the name that its verifier gives it; components "
        "without a weight do not count.",
        min_length=1,
    )

    def preset(self) -> Preset:
        """Each component of the reward in its group, their weighted sum over the step; the clip."""
        import torch

        from learner.algorithms import advantages
        from learner.algorithms.policy_gradient import clip, policy_gradient
        from learner.algorithms.preset import Advantages

        def estimate(batch: ScoredBatch, rewards: Rewards, kept: Tensor) -> Advantages:
            made = advantages.per_component(
                components=batch.components,
                groups=batch.groups,
                weights=tuple(self.components.values()),
                counted=torch.bincount(batch.sequences[kept], minlength=len(batch.rewards)) > 0,
            )
            return Advantages(advantages=made[batch.sequences])

        made = policy_gradient(self, name=self.type, estimator=estimate, loss=clip(self))
        return replace(made, components=tuple(self.components))
