"""Distillation from a teacher's most probable tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from learner.algorithms.algorithm import Algorithm
from learner.algorithms.knobs import AggregationKnobs, Divergence, DivergenceKnobs

if TYPE_CHECKING:
    from learner.algorithms.preset import Loss, LossTokens, Preset


class DistillConfig(Algorithm, AggregationKnobs, DivergenceKnobs):
    """A teacher's distribution over its most probable tokens, off-line.

    Sources: GKD (arXiv 2306.13649), skewed KL of DistiLLM (2402.03898), adaptive KL, AKL (2404.02657).
    Teacher and student are taken at training.temperature, and the divergence is not multiplied by its square.
    """

    learns_from_files: ClassVar[bool] = True
    type: Literal["distill"] = "distill"
    divergence: Divergence = Field("forward_kl", description="Divergence from the teacher that is minimized.")
    sft_weight: float = Field(0.0, ge=0, description="Weight of the data's negative log-likelihood.")

    @property
    def compared_by(self) -> Divergence:
        return self.divergence

    @property
    def uses_teacher(self) -> bool:
        return True

    def preset(self) -> Preset:
        """A divergence from the teacher at each token, over the teacher's candidates and what is left of the mass."""
        from learner.algorithms.divergences import gaps_of
        from learner.algorithms.likelihood import weights
        from learner.algorithms.policy_loss import negative_log_likelihood
        from learner.algorithms.preset import Loss, Preset, mean_of

        def loss(tokens: LossTokens) -> Loss:
            gaps = gaps_of(self, tokens)
            losses = gaps + self.sft_weight * negative_log_likelihood(policy_logprobs=tokens.policy_logprobs)
            return Loss(total=(tokens.weights * losses).sum(), means={"teacher_divergence": mean_of(gaps)})

        return Preset(name=self.type, loss=loss, weights=weights(self), candidates=self.teacher_tokens)
