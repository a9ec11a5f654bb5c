"""Distillation from a teacher's most probable tokens."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from learner.algorithms.algorithm import Algorithm
from learner.algorithms.knobs import AggregationKnobs

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from learner.algorithms.preset import Loss, LossTokens, Preset

Divergence = Literal["forward_kl", "reverse_kl", "jsd", "skewed_forward_kl", "skewed_reverse_kl", "adaptive_kl"]
_OWNERS: dict[str, tuple[Divergence, ...]] = {
    "jsd_beta": ("jsd",),
    "skew": ("skewed_forward_kl", "skewed_reverse_kl"),
    "head_mass": ("adaptive_kl",),
}
"""The divergences that a knob belongs to."""


class DistillConfig(Algorithm, AggregationKnobs):
    """A teacher's distribution over its most probable tokens, off-line.

    Sources: GKD (arXiv 2306.13649), skewed KL of DistiLLM (2402.03898), adaptive KL, AKL (2404.02657).
    Teacher and student are taken at training.temperature, and the divergence is not multiplied by its square.
    """

    learns_from_files: ClassVar[bool] = True
    type: Literal["distill"] = "distill"
    divergence: Divergence = Field("forward_kl", description="Divergence from the teacher that is minimized.")
    jsd_beta: float = Field(0.5, gt=0, lt=1, description="Share of the teacher in jsd's mixture.")
    skew: float = Field(
        0.1,
        ge=0,
        lt=1,
        description="Of the skewed divergences: the share of the first side in the mixture that it is compared with; "
        "0 is the plain one.",
    )
    head_mass: float = Field(
        0.5,
        gt=0,
        lt=1,
        description="adaptive_kl: the mass of the teacher's likeliest tokens whose share of the gap is forward KL's "
        "weight.",
    )
    teacher_tokens: int = Field(
        64, ge=1, description="How many of a teacher's most probable tokens count, where the data does not say."
    )
    sft_weight: float = Field(0.0, ge=0, description="Weight of the data's negative log-likelihood.")

    def unused_knobs(self) -> dict[str, str]:
        strange = [knob for knob, owners in _OWNERS.items() if self.divergence not in owners]
        return {**super().unused_knobs(), **dict.fromkeys(strange, f"divergence is {self.divergence}")}

    def preset(self) -> Preset:
        """A divergence from the teacher at each token, over the teacher's candidates and what is left of the mass."""
        from learner.algorithms.likelihood import weights
        from learner.algorithms.policy_loss import negative_log_likelihood
        from learner.algorithms.preset import Loss, Preset, mean_of

        divergence = self._divergence()

        def loss(tokens: LossTokens) -> Loss:
            assert tokens.candidate_logprobs is not None, "the batch holds a teacher's candidates"
            assert tokens.teacher_logprobs is not None, "the batch holds a teacher's candidates"
            gaps = divergence(student_logprobs=tokens.candidate_logprobs, teacher_logprobs=tokens.teacher_logprobs)
            losses = gaps + self.sft_weight * negative_log_likelihood(policy_logprobs=tokens.policy_logprobs)
            return Loss(total=(tokens.weights * losses).sum(), means={"teacher_divergence": mean_of(gaps)})

        return Preset(name=self.type, loss=loss, weights=weights(self), candidates=self.teacher_tokens)

    def _divergence(self) -> Callable[..., Tensor]:
        """The divergence that `divergence` names, with its knob, by logprobs [N, C] of student and teacher: [N]."""
        from learner.algorithms import ratios

        of: dict[Divergence, Callable[..., Tensor]] = {
            "forward_kl": ratios.forward_kl,
            "reverse_kl": ratios.reverse_kl,
            "jsd": partial(ratios.jensen_shannon, beta=self.jsd_beta),
            "skewed_forward_kl": partial(ratios.skewed_forward_kl, skew=self.skew),
            "skewed_reverse_kl": partial(ratios.skewed_reverse_kl, skew=self.skew),
            "adaptive_kl": partial(ratios.adaptive_kl, head_mass=self.head_mass),
        }
        return partial(of[self.divergence], tail=True)
