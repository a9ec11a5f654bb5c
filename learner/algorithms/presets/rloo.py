"""RLOO: REINFORCE with the others of the group as baseline."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from learner.algorithms.algorithm import Algorithm
from learner.algorithms.knobs import CorrectionKnobs, KlKnobs, SignedRatioCapKnobs, StreamedKnobs, clip_high, clip_low

if TYPE_CHECKING:
    from learner.algorithms.preset import Preset


class RlooConfig(Algorithm, StreamedKnobs, CorrectionKnobs, SignedRatioCapKnobs):
    """REINFORCE whose baseline is the mean of the group's other rewards. Source: arXiv 2402.14740."""

    of_groups: ClassVar[bool] = True
    type: Literal["rloo"] = "rloo"
    policy_loss: Literal["reinforce", "sequence_clip"] = Field(
        "reinforce",
        description="Truncated ratio to the behavior policy; or the clipped ratio of the whole trajectory, the product "
        "over its tokens (asynchronous RLHF, arXiv 2410.18252), with a correction.",
    )
    clip_low: float = clip_low(0.2)
    clip_high: float = clip_high(0.2)
    kl_in: Literal["loss", "reward"] = KlKnobs.place("reward")

    @property
    def corrects(self) -> bool:
        return self.policy_loss == "sequence_clip"

    @property
    def lost_to_age(self) -> str:
        if self.corrects:
            return "algo rloo with sequence_clip has one clip for the product over a trajectory"
        return "algo rloo clips nothing within a step"

    def unused_knobs(self) -> dict[str, str]:
        unused = super().unused_knobs()
        if self.corrects:
            reason = "policy_loss is sequence_clip, and only reinforce has a cap"
            return unused | dict.fromkeys(SignedRatioCapKnobs.model_fields, reason)
        reason = "policy_loss is reinforce, whose ratio is to the behavior policy already, and only sequence_clip clips"
        return unused | dict.fromkeys(("clip_low", "clip_high", *sorted(CorrectionKnobs.model_fields)), reason)

    def preset(self) -> Preset:
        """The mean of the group's others as baseline."""
        from learner.algorithms import advantages
        from learner.algorithms.policy_gradient import policy_gradient, reinforce, sequence_clip, trajectory_level

        weighted = self.policy_loss == "reinforce"
        return policy_gradient(
            self,
            name=self.type,
            estimator=trajectory_level(
                lambda batch, rewards: advantages.leave_one_out(rewards=rewards, groups=batch.groups)
            ),
            loss=reinforce(self) if weighted else sequence_clip(self, product=True),
            to_behavior=weighted,
        )
