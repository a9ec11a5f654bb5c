"""Online DPO: the best of a group against its worst."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from learner.algorithms.algorithm import Algorithm

if TYPE_CHECKING:
    from learner.algorithms.preset import Loss, LossTokens, Preset


class OnlineDpoConfig(Algorithm):
    """DPO on the best and the worst of each group, as they come: uncorrected for stale tokens.

    Sources: arXiv 2402.04792, 2410.18252, which finds it the most robust to them.
    """

    wants_spread: ClassVar[bool] = True
    unclipped: ClassVar[bool] = True
    type: Literal["online_dpo"] = "online_dpo"
    beta: float = Field(0.1, gt=0, description="How strongly the policy is held to the reference. Per nat.")
    label_smoothing: float = Field(0.0, ge=0, lt=0.5, description="Probability that a preference is wrong.")

    @property
    def uses_reference(self) -> bool:
        return True

    def preset(self) -> Preset:
        """DPO's loss on the best and the worst of each group; a group without spread has none."""
        from learner.algorithms.pairs import best_and_worst, pair_loss, per_pair, reference, sides, sums
        from learner.algorithms.preference_losses import dpo
        from learner.algorithms.preset import Passes, Preset

        def loss(tokens: LossTokens) -> Loss:
            made = dpo(
                **sides(sums(tokens, tokens.policy_logprobs), tokens, "logprobs"),
                **sides(sums(tokens, reference(tokens)), tokens, "reference_logprobs"),
                beta=self.beta,
                label_smoothing=self.label_smoothing,
            )
            return pair_loss(made, tokens)

        return Preset(
            name=self.type,
            loss=loss,
            weights=per_pair,
            select=best_and_worst,
            paired=True,
            passes=Passes(reference=True),
            samples_policy=True,
        )
