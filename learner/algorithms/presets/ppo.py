"""PPO with a critic."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from learner.algorithms.algorithm import Algorithm
from learner.algorithms.knobs import ClippedKnobs, KlKnobs

if TYPE_CHECKING:
    from torch import Tensor

    from learner.algorithms.preset import Advantages, Preset, Rewards, ScoredBatch


class PpoConfig(Algorithm, ClippedKnobs):
    """Proximal policy optimization with a critic of its own, whose targets are uncorrected for stale tokens.

    Sources: arXiv 1707.06347, VAPO (2504.05118).
    """

    type: Literal["ppo"] = "ppo"
    discount: float = Field(1.0, gt=0, le=1, description="Discount of later rewards, per trained token.")
    policy_lambda: float = Field(0.95, ge=0, le=1, description="Lambda of GAE for the policy's advantages.")
    length_adaptive_alpha: float | None = Field(
        None,
        gt=0,
        description="policy_lambda is 1 - 1 / (this x the trajectory's trained tokens); 0.05 is VAPO's. none: the same "
        "for all",
    )
    value_lambda: float = Field(1.0, ge=0, le=1, description="Lambda of GAE for the critic's targets.")
    whiten: bool = Field(True, description="Advantages are shifted and scaled to mean 0 and deviation 1.")
    value_clip: float | None = Field(
        0.2, gt=0, description="The critic's new values are kept this close to its old ones. none: off"
    )
    kl_in: Literal["loss", "reward"] = KlKnobs.place("reward")

    def unused_knobs(self) -> dict[str, str]:
        unused = super().unused_knobs()
        if self.length_adaptive_alpha is None:
            return unused
        return {**unused, "policy_lambda": "length_adaptive_alpha is set, which makes it out of each length"}

    @property
    def compares_in_group(self) -> bool:
        return False

    @property
    def once_only(self) -> str:
        return "the targets of algo ppo's critic are uncorrected for stale tokens, and it would learn them again"

    def preset(self) -> Preset:
        """Generalised advantages from a critic, and the clip."""
        from learner.algorithms import advantages
        from learner.algorithms.policy_gradient import clip, policy_gradient
        from learner.algorithms.preset import Advantages, Passes

        def estimate(batch: ScoredBatch, rewards: Rewards, kept: Tensor) -> Advantages:
            assert batch.values is not None, "the preset asked for the critic's values"
            alpha = self.length_adaptive_alpha
            made = advantages.gae(
                rewards=rewards.at_tokens(batch),
                values=batch.values,
                sequences=batch.sequences,
                gamma=self.discount,
                policy_lambda=self.policy_lambda
                if alpha is None
                else advantages.length_adaptive_lambda(sequences=batch.sequences, alpha=alpha),
                value_lambda=self.value_lambda,
                whiten=self.whiten,
                counted=kept,
            )
            return Advantages(advantages=made.advantages, returns=made.returns)

        made = policy_gradient(self, name=self.type, estimator=estimate, loss=clip(self), passes=Passes(values=True))
        return replace(made, value_clip=self.value_clip)
