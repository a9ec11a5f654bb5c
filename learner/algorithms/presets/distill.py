"""Distillation from a teacher's most probable tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from learner.algorithms.algorithm import Algorithm
from learner.algorithms.knobs import AggregationKnobs

if TYPE_CHECKING:
    from torch import Tensor

    from learner.algorithms.preset import Loss, LossTokens, Preset


class DistillConfig(Algorithm, AggregationKnobs):
    """A teacher's distribution over its most probable tokens, off-line. Source: GKD (arXiv 2306.13649).

    Both are taken at training.temperature, and the divergence is not multiplied by its square.
    """

    learns_from_files: ClassVar[bool] = True
    type: Literal["distill"] = "distill"
    divergence: Literal["forward_kl", "reverse_kl", "jsd"] = Field(
        "forward_kl", description="Divergence from the teacher that is minimized."
    )
    jsd_beta: float = Field(0.5, gt=0, lt=1, description="Share of the teacher in jsd's mixture.")
    teacher_tokens: int = Field(
        64, ge=1, description="How many of a teacher's most probable tokens count, where the data does not say."
    )
    sft_weight: float = Field(0.0, ge=0, description="Weight of the data's negative log-likelihood.")

    def unused_knobs(self) -> dict[str, str]:
        unused = super().unused_knobs()
        return unused if self.divergence == "jsd" else {**unused, "jsd_beta": f"divergence is {self.divergence}"}

    def preset(self) -> Preset:
        """A divergence from the teacher at each token, over the teacher's candidates and what is left of the mass."""
        from learner.algorithms import ratios
        from learner.algorithms.likelihood import weights
        from learner.algorithms.policy_loss import negative_log_likelihood
        from learner.algorithms.preset import Loss, Preset, mean_of

        def divergences(tokens: LossTokens) -> Tensor:
            assert tokens.candidate_logprobs is not None, "the batch holds a teacher's candidates"
            assert tokens.teacher_logprobs is not None, "the batch holds a teacher's candidates"
            student, teacher = tokens.candidate_logprobs, tokens.teacher_logprobs
            if self.divergence == "forward_kl":
                return ratios.forward_kl(student_logprobs=student, teacher_logprobs=teacher, tail=True)
            if self.divergence == "reverse_kl":
                return ratios.reverse_kl(student_logprobs=student, teacher_logprobs=teacher, tail=True)
            return ratios.jensen_shannon(
                student_logprobs=student, teacher_logprobs=teacher, beta=self.jsd_beta, tail=True
            )

        def loss(tokens: LossTokens) -> Loss:
            gaps = divergences(tokens)
            losses = gaps + self.sft_weight * negative_log_likelihood(policy_logprobs=tokens.policy_logprobs)
            return Loss(total=(tokens.weights * losses).sum(), means={"teacher_divergence": mean_of(gaps)})

        return Preset(name=self.type, loss=loss, weights=weights(self), candidates=self.teacher_tokens)
