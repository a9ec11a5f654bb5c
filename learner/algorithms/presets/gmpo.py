"""GMPO: the geometric mean of a trajectory's clipped ratios."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from learner.algorithms.algorithm import GroupAlgorithm
from learner.algorithms.knobs import (
    Aggregation,
    CorrectionKnobs,
    aggregation,
)

if TYPE_CHECKING:
    from learner.algorithms.policy_loss import PolicyLoss
    from learner.algorithms.preset import LossTokens, Preset


class GmpoConfig(GroupAlgorithm, CorrectionKnobs):
    """The geometric mean of a trajectory's ratios, each clipped first. Source: GMPO, arXiv 2507.20673."""

    type: Literal["gmpo"] = "gmpo"
    log_clip_low: float = Field(
        0.4, ge=0, description="The log of a token's ratio to the proximal policy is not below minus this. Nats."
    )
    log_clip_high: float = Field(
        0.4, ge=0, description="The log of a token's ratio to the proximal policy is not above this. Nats."
    )
    aggregation: Aggregation = aggregation("sequence_mean")

    def preset(self) -> Preset:
        """Group advantages, the geometric mean over the trajectory of ratios that are clipped token by token."""
        from learner.algorithms.policy_gradient import of_group
        from learner.algorithms.policy_loss import gmpo

        def loss(tokens: LossTokens) -> PolicyLoss:
            return gmpo(
                policy_logprobs=tokens.policy_logprobs,
                proximal_logprobs=tokens.proximal_logprobs,
                advantages=tokens.advantages,
                sequences=tokens.sequences,
                count=len(tokens.sequence_weights),
                clip_low=self.log_clip_low,
                clip_high=self.log_clip_high,
            )

        return of_group(self, loss)
