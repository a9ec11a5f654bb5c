"""HGPO: turns are compared with those that began alike, the more alike the more."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from learner.algorithms.algorithm import ClippedGroupAlgorithm

if TYPE_CHECKING:
    from torch import Tensor

    from learner.algorithms.preset import Advantages, Preset, Rewards, ScoredBatch


class HgpoConfig(ClippedGroupAlgorithm):
    """Hierarchy of groups: a turn is compared with those of equal states, and with those of them that had equal states
    before, which count more.

    Source: arXiv 2602.22817.
    """

    type: Literal["hgpo"] = "hgpo"
    step_discount: float = Field(0.95, gt=0, le=1, description="Discount of the reward, per turn before the last.")
    history: int = Field(2, ge=0, description="States before its own that a turn's groups have in common, at most.")
    history_power: float = Field(
        1.0, ge=0, description="A group of k equal states counts (k + 1) to this power; 0: all the same."
    )
    turn_rewards: bool = Field(
        False,
        description="Turns have rewards of their own: those that the environment's steps gave, or the components "
        "turn_0, turn_1, ... of the reward; the rest of the reward comes with the last turn.",
    )

    def unused_knobs(self) -> dict[str, str]:
        unused = {**super().unused_knobs(), "turn_discount": "hgpo discounts by step_discount"}
        return unused if self.history else {**unused, "history_power": "history is 0, and there is one group alone"}

    def preset(self) -> Preset:
        """The turn's advantages among those of equal histories, and the clip."""
        from learner.algorithms.histories import by_history
        from learner.algorithms.policy_gradient import clip, policy_gradient
        from learner.algorithms.preset import Advantages

        def estimate(batch: ScoredBatch, rewards: Rewards, kept: Tensor) -> Advantages:
            return Advantages(
                advantages=by_history(
                    rewards=rewards.with_tokens(batch),
                    groups=batch.groups,
                    sequences=batch.sequences,
                    turns=batch.turns,
                    turn_states=batch.turn_states,
                    gamma_step=self.step_discount,
                    history=self.history,
                    power=self.history_power,
                    scale=self.advantage_scale,
                    turn_rewards=batch.turn_rewards if self.turn_rewards else None,
                )
            )

        made = policy_gradient(self, name=self.type, estimator=estimate, loss=clip(self))
        return replace(made, turn_rewards=self.turn_rewards)
