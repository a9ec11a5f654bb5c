"""The knobs of policy gradients, put together from those of their parts. Loads no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from learner.algorithms.knobs import AggregationKnobs, ClipKnobs, CorrectionKnobs, EntropyKnobs, PositiveKnobs
from learner.algorithms.reward_knobs import KlKnobs, KlLossKnobs, RewardKnobs


class SampledKnobs(AggregationKnobs, KlLossKnobs, EntropyKnobs):
    """What every policy gradient has."""

    @property
    def masks_truncated(self) -> bool:
        """Whether completions cut off at the longest length are left out of the loss."""
        return False


class UnshapedKnobs(SampledKnobs):
    """What a policy gradient has whose advantages are not made of the trajectory's reward."""

    truncated: Literal["keep", "mask"] = Field(
        "keep", description="Completions cut off at the longest length: trained, or left out."
    )

    @property
    def masks_truncated(self) -> bool:
        return self.truncated == "mask"


class StreamedKnobs(SampledKnobs, KlKnobs, RewardKnobs):
    """What a policy gradient has whose advantages are made of the trajectory's reward."""

    @property
    def masks_truncated(self) -> bool:
        return self.truncated == "mask"


class ClippedKnobs(StreamedKnobs, ClipKnobs, CorrectionKnobs, PositiveKnobs):
    """What every algorithm with a clipped ratio to the proximal policy has."""
