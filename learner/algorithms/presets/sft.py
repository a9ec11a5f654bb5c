"""Supervised fine-tuning."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from learner.algorithms.algorithm import Algorithm
from learner.algorithms.knobs import AggregationKnobs

if TYPE_CHECKING:
    from learner.algorithms.preset import Preset


class SftConfig(Algorithm, AggregationKnobs):
    """Supervised fine-tuning: negative log-likelihood of the tokens in the loss mask."""

    learns_from_files: ClassVar[bool] = True
    type: Literal["sft"] = "sft"

    def preset(self) -> Preset:
        """Negative log-likelihood of the tokens in the loss mask."""
        from learner.algorithms.likelihood import likelihood, weights
        from learner.algorithms.preset import Preset

        return Preset(name=self.type, loss=likelihood, weights=weights(self))
