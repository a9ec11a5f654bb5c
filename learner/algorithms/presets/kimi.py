"""Kimi k1.5: policy mirror descent."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from learner.algorithms.algorithm import GroupAlgorithm
from learner.algorithms.knobs import CorrectionKnobs

if TYPE_CHECKING:
    from learner.algorithms.preset import Preset


class KimiConfig(GroupAlgorithm, CorrectionKnobs):
    """Policy mirror descent: a pull towards the proximal policy in place of a clip. Source: Kimi k1.5 (2501.12599)."""

    type: Literal["kimi"] = "kimi"
    tau: float = Field(0.1, ge=0, description="Weight of the squared gap to the proximal policy's logprobs.")

    def preset(self) -> Preset:
        """Group advantages and a squared pull towards the proximal policy."""
        from learner.algorithms.policy_gradient import of_group, to_proximal
        from learner.algorithms.policy_loss import kimi

        return of_group(self, to_proximal(partial(kimi, tau=self.tau)), pulls=True)
