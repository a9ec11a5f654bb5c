"""A reward model from preferences."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from learner.algorithms.algorithm import Algorithm

if TYPE_CHECKING:
    from learner.algorithms.preset import Loss, LossTokens, Preset


class RmConfig(Algorithm):
    """A reward model from preferences: Bradley-Terry on the scores of both. Source: arXiv 2203.02155."""

    learns_from_files: ClassVar[bool] = True
    type: Literal["rm"] = "rm"
    center_coefficient: float = Field(
        0.0, ge=0, description="Weight of the squared sum of a pair's scores, which keeps scores around 0."
    )

    def preset(self) -> Preset:
        """Bradley-Terry on the scores of a pair's two last tokens."""
        from learner.algorithms.pairs import pair_loss, per_pair, sums
        from learner.algorithms.preference_losses import bradley_terry
        from learner.algorithms.preset import Preset

        def loss(tokens: LossTokens) -> Loss:
            chosen, rejected = tokens.pairs.unbind(dim=1)
            scores = sums(tokens, tokens.policy_logprobs)  # one trained token a sequence: its score
            made = bradley_terry(
                chosen_scores=scores[chosen],
                rejected_scores=scores[rejected],
                margins=tokens.margins,
                centre_coefficient=self.center_coefficient,
            )
            return pair_loss(made, tokens)

        return Preset(name=self.type, loss=loss, weights=per_pair, paired=True, trains_scores=True)
