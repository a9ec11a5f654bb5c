"""OTB: REINFORCE with the best baseline of each place in a group's trajectories."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from learner.algorithms.algorithm import Algorithm
from learner.algorithms.knobs import StreamedKnobs

if TYPE_CHECKING:
    from torch import Tensor

    from learner.algorithms.preset import Advantages, Preset, Rewards, ScoredBatch


class OtbConfig(Algorithm, StreamedKnobs):
    """REINFORCE whose baseline at each place weighs the rewards to go of the group by how much gradient their
    trajectories have given up to there, so that the gradient varies least.

    Source: the optimal token baseline, arXiv 2602.07078, by its logit-gradient proxy: norms of gradients with respect
    to the logits, which a forward pass gives.
    """

    type: Literal["otb"] = "otb"
    ratio_cap: float | None = Field(1.0, gt=0, description="Upper bound of the ratio to the behavior policy.")

    def preset(self) -> Preset:
        """The best baseline of each place, and a capped ratio."""
        from learner.algorithms import ratios
        from learner.algorithms.policy_gradient import policy_gradient, reinforce
        from learner.algorithms.preset import Advantages, Passes
        from learner.algorithms.token_baseline import optimal_token

        def estimate(batch: ScoredBatch, rewards: Rewards, kept: Tensor) -> Advantages:
            assert batch.proximal_logprobs is not None, "the norms came with them"
            assert batch.logit_norms is not None, "the preset asked for them"
            weights = ratios.ratio(numerator=batch.proximal_logprobs, denominator=batch.behavior_logprobs)
            if self.ratio_cap is not None:
                weights = weights.clamp(max=self.ratio_cap)
            return Advantages(
                advantages=optimal_token(
                    rewards=rewards.of_trajectories,
                    groups=batch.groups,
                    sequences=batch.sequences,
                    norms=weights.square() * batch.logit_norms,
                    token_rewards=rewards.of_tokens,
                )
            )

        return policy_gradient(
            self,
            name=self.type,
            estimator=estimate,
            loss=reinforce(self.ratio_cap),
            passes=Passes(logit_norms=True),
            to_behavior=True,
        )
