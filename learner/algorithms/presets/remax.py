"""ReMax: REINFORCE with the reward of a greedy answer as baseline."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal

from learner.algorithms.algorithm import Algorithm
from learner.algorithms.knobs import KlKnobs, SignedRatioCapKnobs, TeacherKnobs, UnshapedKnobs

if TYPE_CHECKING:
    from torch import Tensor

    from learner.algorithms.preset import Advantages, Preset, Rewards, ScoredBatch


class RemaxConfig(Algorithm, UnshapedKnobs, KlKnobs, SignedRatioCapKnobs, TeacherKnobs):
    """REINFORCE whose baseline is the reward of the policy's greedy answer to the same task, sampled for that alone.

    Source: ReMax, arXiv 2310.10505, which trains on fresh samples alone; here a truncated ratio to the behavior policy
    corrects stale ones. Rewards are not shaped, or the two would have to be by their lengths and turns alike.
    """

    greedy_baseline: ClassVar[bool] = True
    of_groups: ClassVar[bool] = True
    unclipped: ClassVar[bool] = True

    type: Literal["remax"] = "remax"
    kl_in: Literal["loss", "reward"] = KlKnobs.place("reward")

    @property
    def compares_in_group(self) -> bool:
        return False

    def preset(self) -> Preset:
        """The reward less the greedy answer's, and a capped ratio."""
        from learner.algorithms.policy_gradient import policy_gradient, reinforce
        from learner.algorithms.preset import Advantages

        def estimate(batch: ScoredBatch, rewards: Rewards, kept: Tensor) -> Advantages:
            greedy = batch.greedy_rewards
            assert greedy is not None, "the preset asked for greedy answers"
            made = rewards.with_tokens(batch) - greedy
            mean = float(greedy.mean()) if len(greedy) else 0.0
            return Advantages(advantages=made[batch.sequences], means={"greedy_reward": mean})

        preset = policy_gradient(self, name=self.type, estimator=estimate, loss=reinforce(self), to_behavior=True)
        return replace(preset, greedy_baseline=True)
