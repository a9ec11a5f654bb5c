"""The knobs of policy gradients, put together from those of their parts. Loads no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from learner.algorithms.knobs import (
    AggregationKnobs,
    ClipKnobs,
    CorrectionKnobs,
    EntropyKnobs,
    PositiveKnobs,
    ScaleKnobs,
)
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

    @model_validator(mode="after")
    def _means_to_divide_by(self) -> StreamedKnobs:
        divides_by_means = isinstance(self, ScaleKnobs) and self.advantage_scale == "mean"
        if divides_by_means and self.reward_normalisation == "standardise":
            raise ValueError(
                "reward_normalisation is standardise and advantage_scale is mean: standardised rewards have a mean of "
                "about 0, which nothing can be divided by; set reward_normalisation to scale or none, or "
                "advantage_scale to std"
            )
        return self


class ClippedKnobs(StreamedKnobs, ClipKnobs, CorrectionKnobs, PositiveKnobs):
    """What every algorithm with a clipped ratio to the proximal policy has."""
