"""SAPO: a soft gate in place of the clip."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from learner.algorithms.algorithm import GroupAlgorithm
from learner.algorithms.knobs import Aggregation, CorrectionKnobs, aggregation

if TYPE_CHECKING:
    from learner.algorithms.preset import Preset


class SapoConfig(GroupAlgorithm, CorrectionKnobs):
    """A soft gate on each token's ratio in place of the clip. Source: SAPO, arXiv 2511.20347."""

    type: Literal["sapo"] = "sapo"
    temperature_positive: float = Field(
        1.0, gt=0, description="How fast the gate closes where the advantage is positive. Dimensionless."
    )
    temperature_negative: float = Field(
        1.05, gt=0, description="How fast the gate closes where the advantage is negative. Dimensionless."
    )
    aggregation: Aggregation = aggregation("sequence_mean")

    @property
    def lost_to_age(self) -> str:
        return "algo sapo never cuts a token off"

    def preset(self) -> Preset:
        """Group advantages, a soft gate on each token's ratio."""
        from learner.algorithms.policy_gradient import of_group, to_proximal
        from learner.algorithms.policy_loss import sapo

        loss = partial(
            sapo, temperature_positive=self.temperature_positive, temperature_negative=self.temperature_negative
        )
        return of_group(self, to_proximal(loss))
