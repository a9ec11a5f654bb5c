"""Pass@k training: sets of k answers are rewarded, not each answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from learner.algorithms.algorithm import Algorithm
from learner.algorithms.knobs import ClipKnobs, CorrectionKnobs, TeacherKnobs, UnshapedKnobs

if TYPE_CHECKING:
    from torch import Tensor

    from learner.algorithms.preset import Advantages, Preset, Rewards, ScoredBatch


class PassAtKConfig(Algorithm, UnshapedKnobs, ClipKnobs, CorrectionKnobs, TeacherKnobs):
    """GRPO in which not an answer but each set of k answers of the group is rewarded, if one of the k is right.

    Source: pass@k training with analytic advantages, arXiv 2508.10751.
    """

    of_groups: ClassVar[bool] = True
    type: Literal["pass_at_k"] = "pass_at_k"
    k: int = Field(
        2, ge=1, description="Answers in a set; a group should have several times as many. 1 rewards each by itself."
    )
    right_reward: float = Field(1.0, description="An answer of at least this reward is right, any other is wrong.")

    def preset(self) -> Preset:
        """The mean advantage of the sets of k that a trajectory is in, and the clip."""
        from learner.algorithms import advantages
        from learner.algorithms.policy_gradient import clip, policy_gradient
        from learner.algorithms.preset import Advantages

        def estimate(batch: ScoredBatch, rewards: Rewards, kept: Tensor) -> Advantages:
            made = advantages.pass_at_k(right=batch.rewards >= self.right_reward, groups=batch.groups, k=self.k)
            return Advantages(advantages=made[batch.sequences])

        return policy_gradient(self, name=self.type, estimator=estimate, loss=clip(self))
