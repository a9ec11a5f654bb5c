"""On-policy distillation: a teacher's logprobs as advantages, or a divergence from its likeliest tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from learner.algorithms.algorithm import Algorithm
from learner.algorithms.knobs import Divergence, DivergenceKnobs, RatioCapKnobs, UnshapedKnobs

if TYPE_CHECKING:
    from torch import Tensor

    from learner.algorithms.preset import Advantages, Preset, Rewards, ScoredBatch


class OpdConfig(Algorithm, UnshapedKnobs, RatioCapKnobs, DivergenceKnobs):
    """On-policy distillation: each token's advantage is the teacher's logprob less the policy's; or, with a divergence,
    the two distributions are compared at each token, over the teacher's likeliest ones.
    """

    type: Literal["opd"] = "opd"
    divergence: Literal["sampled"] | Divergence = Field(
        "sampled",
        description="sampled: the teacher's logprob of each sampled token is its advantage, an estimate of the reverse "
        "KL; else the divergence from the teacher, over teacher_tokens of its likeliest tokens, that is minimized.",
    )

    @property
    def learns_from_rewards(self) -> bool:
        return False  # its teacher says where

    @property
    def uses_teacher(self) -> bool:
        return True

    @property
    def compared_by(self) -> Divergence | None:
        return None if self.divergence == "sampled" else self.divergence

    @property
    def _why_uncompared(self) -> str:
        return "divergence is sampled"

    def unused_knobs(self) -> dict[str, str]:
        unused = super().unused_knobs()
        if self.compared_by is None:
            return unused
        return {**unused, "ratio_cap": f"divergence is {self.divergence}, which no ratio corrects"}

    def preset(self) -> Preset:
        """The teacher's logprob less the policy's, token by token; or the divergence from it alone."""
        from learner.algorithms.policy_gradient import policy_gradient, reinforce
        from learner.algorithms.preset import Advantages, Passes

        compares = self.compared_by is not None

        def nothing(batch: ScoredBatch, rewards: Rewards, kept: Tensor) -> Advantages:
            return Advantages(advantages=batch.behavior_logprobs.new_zeros(len(batch.behavior_logprobs)))

        return policy_gradient(
            self,
            name=self.type,
            estimator=nothing if compares else _gaps,
            loss=reinforce(self),
            passes=Passes(proximal=not compares, teacher=not compares),
            to_behavior=True,
        )


def _gaps(batch: ScoredBatch, rewards: Rewards, kept: Tensor) -> Advantages:
    from learner.algorithms import advantages
    from learner.algorithms.preset import Advantages

    assert batch.teacher_logprobs is not None, "the preset asked for the teacher's logprobs"
    assert batch.proximal_logprobs is not None, "the preset asked for a pass of the policy"
    gaps = advantages.teacher(teacher_logprobs=batch.teacher_logprobs, policy_logprobs=batch.proximal_logprobs)
    if batch.taught is None:
        return Advantages(advantages=gaps, means={"teacher_kl": _mean(-gaps)})
    means = {"teacher_kl": _mean(-gaps[batch.taught]), "taught_share": _mean(batch.taught.double())}
    return Advantages(advantages=gaps * batch.taught, means=means)


def _mean(values: Tensor) -> float:
    return float(values.mean()) if len(values) else 0.0
