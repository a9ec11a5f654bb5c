"""On-policy distillation: a teacher's logprobs as advantages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from learner.algorithms.algorithm import Algorithm
from learner.algorithms.knobs import RatioCapKnobs, UnshapedKnobs

if TYPE_CHECKING:
    from torch import Tensor

    from learner.algorithms.preset import Advantages, Preset, Rewards, ScoredBatch


class OpdConfig(Algorithm, UnshapedKnobs, RatioCapKnobs):
    """On-policy distillation: each token's advantage is the teacher's logprob less the policy's."""

    type: Literal["opd"] = "opd"

    @property
    def learns_from_rewards(self) -> bool:
        return False  # its teacher says where

    def preset(self) -> Preset:
        """The teacher's logprob less the policy's, token by token."""
        from learner.algorithms import advantages
        from learner.algorithms.policy_gradient import policy_gradient, reinforce
        from learner.algorithms.preset import Advantages, Passes

        def estimate(batch: ScoredBatch, rewards: Rewards, kept: Tensor) -> Advantages:
            assert batch.teacher_logprobs is not None, "the preset asked for the teacher's logprobs"
            assert batch.proximal_logprobs is not None, "the preset asked for a pass of the policy"
            gaps = advantages.teacher(teacher_logprobs=batch.teacher_logprobs, policy_logprobs=batch.proximal_logprobs)
            kl = float(-gaps.mean()) if len(gaps) else 0.0
            return Advantages(advantages=gaps, means={"teacher_kl": kl})

        return policy_gradient(
            self,
            name=self.type,
            estimator=estimate,
            loss=reinforce(self.ratio_cap),
            passes=Passes(proximal=True, teacher=True),
            to_behavior=True,
        )
