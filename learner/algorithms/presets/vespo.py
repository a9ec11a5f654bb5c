"""VESPO: a smooth weight of the whole trajectory in place of a clip."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from learner.algorithms.algorithm import GroupAlgorithm

if TYPE_CHECKING:
    from learner.algorithms.policy_loss import PolicyLoss
    from learner.algorithms.preset import LossTokens, Preset


class VespoConfig(GroupAlgorithm):
    """REINFORCE weighted by a smooth function of the trajectory's ratio to the behavior policy, which falls to both
    sides: W^power exp(rate (1 - W)).

    Source: variational sequence-level soft policy optimization, arXiv 2602.10693.
    """

    type: Literal["vespo"] = "vespo"
    power_positive: float = Field(
        2.0, ge=0, description="How fast the weight falls below a ratio of 1, where the advantage is not negative."
    )
    rate_positive: float = Field(
        3.0, gt=0, description="How fast the weight falls above a ratio of 1, where the advantage is not negative."
    )
    power_negative: float = Field(
        3.0, ge=0, description="How fast the weight falls below a ratio of 1, where the advantage is negative."
    )
    rate_negative: float = Field(
        2.0, gt=0, description="How fast the weight falls above a ratio of 1, where the advantage is negative."
    )

    def preset(self) -> Preset:
        """Group advantages, one smooth weight for the trajectory."""
        from learner.algorithms.policy_gradient import of_group
        from learner.algorithms.policy_loss import GammaWeight, vespo

        positive = GammaWeight(power=self.power_positive, rate=self.rate_positive)
        negative = GammaWeight(power=self.power_negative, rate=self.rate_negative)

        def loss(tokens: LossTokens) -> PolicyLoss:
            return vespo(
                policy_logprobs=tokens.policy_logprobs,
                behavior_logprobs=tokens.behavior_logprobs,
                advantages=tokens.advantages,
                sequences=tokens.sequences,
                count=len(tokens.sequence_weights),
                positive=positive,
                negative=negative,
            )

        return of_group(self, loss, to_behavior=True)
