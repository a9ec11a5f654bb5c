"""OTB: REINFORCE with the baseline of least variance at each token position of a group."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from learner.algorithms.algorithm import Algorithm
from learner.algorithms.knobs import RatioCapKnobs, StreamedKnobs

if TYPE_CHECKING:
    from torch import Tensor

    from learner.algorithms.preset import Advantages, Preset, Rewards, ScoredBatch


class OtbConfig(Algorithm, StreamedKnobs, RatioCapKnobs):
    """REINFORCE with a baseline per token position: the group's mean reward to go, each trajectory weighted by its
    squared gradient norm so far, which minimises the gradient's variance.

    Source: the optimal token baseline, arXiv 2602.07078, by its logit-gradient proxy: norms of gradients with respect
    to the logits, which a forward pass gives.
    """

    of_groups: ClassVar[bool] = True
    type: Literal["otb"] = "otb"

    def preset(self) -> Preset:
        """The baseline of least variance at each token position, and a capped ratio."""
        from learner.algorithms import ratios
        from learner.algorithms.policy_gradient import policy_gradient, reinforce
        from learner.algorithms.preset import Advantages, Passes
        from learner.algorithms.token_baseline import optimal_token

        def estimate(batch: ScoredBatch, rewards: Rewards, kept: Tensor) -> Advantages:
            assert batch.proximal_logprobs is not None, "the pass of logit_norms gives the policy's logprobs, too"
            assert batch.logit_norms is not None, "the preset asked for a pass of logit_norms"
            plain = ratios.ratio(numerator=batch.proximal_logprobs, denominator=batch.behavior_logprobs)
            weights = ratios.capped(plain, self.ratio_cap)
            # The loss multiplies a token's gradient by min(ratio, cap), so its squared norm by the square.
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
            loss=reinforce(self),
            passes=Passes(logit_norms=True),
            to_behavior=True,
        )
