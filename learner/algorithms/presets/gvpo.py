"""GVPO: implied rewards brought to the real ones, within a group."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from learner.algorithms.algorithm import Algorithm
from learner.algorithms.knobs import Aggregation, StreamedKnobs, aggregation

if TYPE_CHECKING:
    from torch import Tensor

    from learner.algorithms.policy_loss import PolicyLoss
    from learner.algorithms.preset import LossTokens, Preset, ScoredBatch


class GvpoConfig(Algorithm, StreamedKnobs):
    """The log ratios of a group's trajectories to the behavior policy, times beta, are brought as far apart as their
    rewards are; without importance weights, whatever policies sampled them.

    Source: group variance policy optimization, arXiv 2504.19599.
    """

    of_groups: ClassVar[bool] = True
    unclipped: ClassVar[bool] = True
    type: Literal["gvpo"] = "gvpo"
    beta: float = Field(
        0.1,
        gt=0,
        description="Reward that a nat of a trajectory's log ratio stands for; smaller moves the policy further.",
    )
    aggregation: Aggregation = aggregation("sequence_sum")

    def preset(self) -> Preset:
        """Log p, weighted by what a reward is beyond the one that the policy implies at the step's start."""
        from learner.algorithms import advantages, ratios
        from learner.algorithms.policy_gradient import policy_gradient, trajectory_level
        from learner.algorithms.policy_loss import likelihood_gain
        from learner.algorithms.preset import Passes

        def estimate(batch: ScoredBatch, rewards: Tensor) -> Tensor:
            assert batch.proximal_logprobs is not None, "the preset asked for a pass of the policy"
            gaps = ratios.log_gap(numerator=batch.proximal_logprobs, denominator=batch.behavior_logprobs)
            log_ratios = ratios.sequence_sums(values=gaps, sequences=batch.sequences, count=len(rewards))
            return advantages.group_variance(
                rewards=rewards, groups=batch.groups, log_ratios=log_ratios, beta=self.beta
            )

        def loss(tokens: LossTokens) -> PolicyLoss:
            return likelihood_gain(policy_logprobs=tokens.policy_logprobs, advantages=tokens.advantages)

        return policy_gradient(
            self, name=self.type, estimator=trajectory_level(estimate), loss=loss, passes=Passes(proximal=True)
        )
