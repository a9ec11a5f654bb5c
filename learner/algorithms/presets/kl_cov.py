"""KL-Cov: a pull back on the tokens that lower the entropy."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from learner.algorithms.algorithm import GroupAlgorithm
from learner.algorithms.knobs import CorrectionKnobs

if TYPE_CHECKING:
    from torch import Tensor

    from learner.algorithms.policy_loss import PolicyLoss
    from learner.algorithms.preset import Advantages, LossTokens, Preset, Rewards, ScoredBatch


class KlCovConfig(GroupAlgorithm, CorrectionKnobs):
    """GRPO without a clip, in which the tokens that lower the entropy most, by their covariance of advantage and
    logprob, are pulled back to the proximal policy.

    Source: KL-Cov of the entropy mechanism, arXiv 2505.22617.
    """

    of_groups: ClassVar[bool] = False
    unclipped: ClassVar[bool] = True
    type: Literal["kl_cov"] = "kl_cov"
    covariance_share: float = Field(
        2e-3, gt=0, le=1, description="Tokens that are pulled, as a share of those of the step; at least one."
    )
    pull: float = Field(
        1.0,
        ge=0,
        description="Weight of the pull, the distance to the proximal policy's logprob in nats; without effect in a "
        "step's first update, before the policy has moved.",
    )

    def preset(self) -> Preset:
        """Group advantages, the ratio as it is, and a pull on the tokens with the largest covariances."""
        from dataclasses import replace

        from learner.algorithms import covariance
        from learner.algorithms.policy_gradient import group_level, policy_gradient
        from learner.algorithms.policy_loss import kl_cov
        from learner.algorithms.preset import Passes

        of_group = group_level(self)

        def estimate(batch: ScoredBatch, rewards: Rewards, kept: Tensor) -> Advantages:
            made = of_group(batch, rewards, kept)
            assert batch.proximal_logprobs is not None, "the preset asked for a pass of the policy"
            found = covariance.covariances(advantages=made.advantages, logprobs=batch.proximal_logprobs, counted=kept)
            pulled = covariance.largest(found, share=self.covariance_share, counted=kept)
            return replace(made, pulled=pulled)

        def loss(tokens: LossTokens) -> PolicyLoss:
            assert tokens.pulled is not None, "said with the advantages"
            return kl_cov(
                policy_logprobs=tokens.policy_logprobs,
                proximal_logprobs=tokens.proximal_logprobs,
                advantages=tokens.advantages,
                pulled=tokens.pulled,
                pull=self.pull,
            )

        return policy_gradient(
            self, name=self.type, estimator=estimate, loss=loss, passes=Passes(proximal=True), pulls=True
        )
