"""GiGPO: turns that start from equal states are compared, too."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from learner.algorithms.algorithm import ClippedGroupAlgorithm

if TYPE_CHECKING:
    from torch import Tensor

    from learner.algorithms.preset import Advantages, Preset, Rewards, ScoredBatch


class GigpoConfig(ClippedGroupAlgorithm):
    """Group-in-group: turns that start from an equal state of a task are compared too. Source: arXiv 2505.10978."""

    type: Literal["gigpo"] = "gigpo"
    step_discount: float = Field(0.95, gt=0, le=1, description="Discount of the reward, per turn before the last.")
    step_weight: float = Field(1.0, ge=0, description="Weight of the turn's advantage beside the trajectory's.")
    turn_rewards: bool = Field(
        False,
        description="Turns have rewards of their own: those that the environment's steps gave, or the components "
        "turn_0, turn_1, ... of the reward; the rest of the reward comes with the last turn.",
    )

    def unused_knobs(self) -> dict[str, str]:
        return {**super().unused_knobs(), "turn_discount": "gigpo discounts by step_discount"}

    def preset(self) -> Preset:
        """The trajectory's advantage in its group, and the turn's among equal states; the clip."""
        from learner.algorithms import advantages
        from learner.algorithms.policy_gradient import clip, policy_gradient
        from learner.algorithms.preset import Advantages

        def estimate(batch: ScoredBatch, rewards: Rewards, kept: Tensor) -> Advantages:
            return Advantages(
                advantages=advantages.step_group(
                    rewards=rewards.with_tokens(batch),
                    groups=batch.groups,
                    sequences=batch.sequences,
                    turns=batch.turns,
                    turn_states=batch.turn_states,
                    gamma_step=self.step_discount,
                    omega=self.step_weight,
                    scale=self.advantage_scale,
                    turn_rewards=batch.turn_rewards if self.turn_rewards else None,
                )
            )

        made = policy_gradient(self, name=self.type, estimator=estimate, loss=clip(self))
        return replace(made, turn_rewards=self.turn_rewards)
