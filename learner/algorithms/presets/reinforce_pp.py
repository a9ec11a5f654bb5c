"""REINFORCE++: rewards to go, normalised over the batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from learner.algorithms.algorithm import Algorithm
from learner.algorithms.knobs import ClippedKnobs, KlKnobs

if TYPE_CHECKING:
    from torch import Tensor

    from learner.algorithms.preset import Advantages, Preset, Rewards, ScoredBatch


class ReinforcePpConfig(Algorithm, ClippedKnobs):
    """REINFORCE++: rewards to go, normalised over the tokens of the whole batch. Source: arXiv 2501.03262."""

    type: Literal["reinforce_pp"] = "reinforce_pp"
    group_baseline: bool = Field(False, description="Subtract the mean of the group before normalising.")
    kl_in: Literal["loss", "reward"] = KlKnobs.place("reward")

    @property
    def compares_in_group(self) -> bool:
        return self.group_baseline

    def preset(self) -> Preset:
        """Rewards to go, standardised over the step's tokens, and the clip."""
        from learner.algorithms import advantages
        from learner.algorithms.policy_gradient import clip, policy_gradient
        from learner.algorithms.preset import Advantages

        def estimate(batch: ScoredBatch, rewards: Rewards, kept: Tensor) -> Advantages:
            return Advantages(
                advantages=advantages.batch(
                    rewards=rewards.of_trajectories,
                    groups=batch.groups,
                    sequences=batch.sequences,
                    subtract_group_mean=self.group_baseline,
                    token_rewards=rewards.of_tokens,
                    counted=kept,
                )
            )

        return policy_gradient(self, name=self.type, estimator=estimate, loss=clip(self))
