"""What a user can set about an algorithm. Loads no torch.

One model per preset, told apart by `type`, made of the knobs of its parts. A knob that the other choices make useless
is refused when it is given, and is left out when the model is dumped, so that a dumped config can always be read again.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from learner.algorithms.knobs import (
    AdvantageScale,
    AggregationKnobs,
    ClipKnobs,
    CorrectionKnobs,
    Knobs,
    ScaleKnobs,
    aggregation,
    clip_high,
    clip_low,
)
from learner.algorithms.knobs import Aggregation as Aggregation
from learner.algorithms.reward_knobs import KlKnobs
from learner.algorithms.sampled_knobs import ClippedKnobs, StreamedKnobs, UnshapedKnobs


class GrpoConfig(ClippedKnobs, ScaleKnobs):
    """Group-relative policy optimization, with the decoupled clip and a correction for stale tokens.

    Sources: DeepSeekMath (arXiv 2402.03300) for the group baseline and the k3 penalty; AReaL (arXiv 2505.24298) for the
    proximal anchor.
    """

    type: Literal["grpo"] = "grpo"


class DrGrpoConfig(ClippedKnobs, ScaleKnobs):
    """GRPO without its two biases: rewards are not divided by their deviation, losses not by lengths.

    Source: Dr. GRPO (arXiv 2503.20783).
    """

    type: Literal["dr_grpo"] = "dr_grpo"
    advantage_scale: AdvantageScale = ScaleKnobs.field("none")
    aggregation: Aggregation = aggregation("constant")


class DapoConfig(ClippedKnobs, ScaleKnobs):
    """GRPO that clips higher above, leaves out groups without spread, and penalises overlong completions.

    Source: DAPO (arXiv 2503.14476).
    """

    wants_spread: ClassVar[bool] = True
    type: Literal["dapo"] = "dapo"
    clip_high: float = clip_high(0.28)


class MaxRlConfig(ClippedKnobs, ScaleKnobs):
    """GRPO whose rewards are divided by their group's mean, which weighs hard tasks as maximum likelihood does.

    Source: MaxRL (arXiv 2602.02710).
    """

    type: Literal["max_rl"] = "max_rl"
    advantage_scale: AdvantageScale = ScaleKnobs.field("mean")


class GdpoConfig(UnshapedKnobs, ClipKnobs, CorrectionKnobs):
    """GRPO whose reward components are each normalised in their group before they are weighted and summed.

    Source: GDPO (arXiv 2601.05242).
    """

    type: Literal["gdpo"] = "gdpo"
    components: dict[str, float] = Field(
        description="Weight of each component of the reward by the name that its verifier gives it; others are left.",
        min_length=1,
    )


class GspoConfig(StreamedKnobs, CorrectionKnobs, ScaleKnobs):
    """Group sequence policy optimization: one clipped ratio for the whole trajectory. Source: arXiv 2507.18071."""

    type: Literal["gspo"] = "gspo"
    clip_low: float = clip_low(3e-4)
    clip_high: float = clip_high(4e-4)
    aggregation: Aggregation = aggregation("sequence_mean")


class CispoConfig(StreamedKnobs, ScaleKnobs):
    """REINFORCE whose weights, the ratios to the behavior policy, are clipped. Source: MiniMax-M1, arXiv 2506.13585."""

    type: Literal["cispo"] = "cispo"
    ratio_low: float = Field(
        1.0, ge=0, le=1, description="The ratio to the behavior policy is not below 1 - ratio_low. 1 is no bound."
    )
    ratio_high: float = Field(
        0.28, ge=0, description="The ratio to the behavior policy is not above 1 + ratio_high. Dimensionless."
    )


class ToprConfig(StreamedKnobs, ScaleKnobs):
    """Tapered off-policy REINFORCE: good trajectories count whole, bad ones by a truncated ratio.

    Source: arXiv 2503.14286.
    """

    type: Literal["topr"] = "topr"
    positive_weight: float = Field(1.0, ge=0, description="Weight of tokens with a positive advantage.")
    negative_weight: float = Field(1.0, ge=0, description="Weight of tokens with a negative advantage.")


class KimiConfig(StreamedKnobs, CorrectionKnobs, ScaleKnobs):
    """Policy mirror descent: a pull towards the proximal policy in place of a clip. Source: Kimi k1.5 (2501.12599)."""

    type: Literal["kimi"] = "kimi"
    tau: float = Field(0.1, ge=0, description="Weight of the squared gap to the proximal policy's logprobs.")


class DppoConfig(StreamedKnobs, ScaleKnobs):
    """Updates stop where a token's probability, not its ratio, has moved too far from the behavior policy.

    Source: arXiv 2602.04879.
    """

    type: Literal["dppo"] = "dppo"
    delta_low: float = Field(0.2, ge=0, le=1, description="Largest fall of a token's probability.")
    delta_high: float = Field(0.2, ge=0, le=1, description="Largest rise of a token's probability.")
    kappa: float = Field(1e-3, ge=0, description="Weight of the squared gap to the behavior policy's logprobs.")


class ReinforceConfig(StreamedKnobs, ScaleKnobs):
    """REINFORCE with the group as baseline, off-policy by a truncated ratio to the behavior policy."""

    type: Literal["reinforce"] = "reinforce"
    ratio_cap: float | None = Field(
        1.0, gt=0, description="Upper bound of the ratio to the behavior policy; 2 to 10 is AIPO's. none: no bound"
    )


class RlooConfig(StreamedKnobs):
    """REINFORCE whose baseline is the mean of the group's other rewards. Source: arXiv 2402.14740."""

    type: Literal["rloo"] = "rloo"
    policy_loss: Literal["reinforce", "sequence_clip"] = Field(
        "reinforce", description="Truncated ratio to the behavior policy, or one clipped ratio for the trajectory."
    )
    ratio_cap: float | None = Field(1.0, gt=0, description="Upper bound of the ratio to the behavior policy.")
    clip_low: float = clip_low(0.2)
    clip_high: float = clip_high(0.2)
    kl_in: Literal["loss", "reward"] = KlKnobs.place("reward")

    def unused_knobs(self) -> dict[str, str]:
        unused = super().unused_knobs()
        if self.policy_loss == "reinforce":
            reason = "policy_loss is reinforce, and only sequence_clip clips"
            return {**unused, "clip_low": reason, "clip_high": reason}
        return {**unused, "ratio_cap": "policy_loss is sequence_clip, and only reinforce has a cap"}


class ReinforcePpConfig(ClippedKnobs):
    """REINFORCE++: rewards to go, normalised over the tokens of the whole batch. Source: arXiv 2501.03262."""

    type: Literal["reinforce_pp"] = "reinforce_pp"
    group_baseline: bool = Field(False, description="Subtract the mean of the group before normalising.")
    kl_in: Literal["loss", "reward"] = KlKnobs.place("reward")


class PpoConfig(ClippedKnobs):
    """Proximal policy optimization with a critic of its own. Sources: arXiv 1707.06347, VAPO (2504.05118)."""

    type: Literal["ppo"] = "ppo"
    discount: float = Field(1.0, gt=0, le=1, description="Discount of later rewards, per trained token.")
    policy_lambda: float = Field(0.95, ge=0, le=1, description="Decay of later errors in the policy's advantages.")
    length_adaptive_alpha: float | None = Field(
        None,
        gt=0,
        description="policy_lambda is 1 - 1 / (this x the trajectory's trained tokens); 0.05 is VAPO's. none: the same "
        "for all",
    )
    value_lambda: float = Field(1.0, ge=0, le=1, description="Decay of later errors in the critic's targets.")
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


class GigpoConfig(ClippedKnobs, ScaleKnobs):
    """Group-in-group: turns that start from an equal state of a task are compared too. Source: arXiv 2505.10978."""

    type: Literal["gigpo"] = "gigpo"
    step_discount: float = Field(0.95, gt=0, le=1, description="Discount of the reward, per turn before the last.")
    step_weight: float = Field(1.0, ge=0, description="Weight of the turn's advantage beside the trajectory's.")


class OnlineDpoConfig(Knobs):
    """DPO on the best and the worst of each group, off-policy as they come. Source: arXiv 2402.04792, 2410.18252."""

    wants_spread: ClassVar[bool] = True
    type: Literal["online_dpo"] = "online_dpo"
    beta: float = Field(0.1, gt=0, description="How strongly the policy is held to the reference. Per nat.")
    label_smoothing: float = Field(0.0, ge=0, lt=0.5, description="Probability that a preference is wrong.")

    @property
    def uses_reference(self) -> bool:
        return True


class BestOfKConfig(AggregationKnobs):
    """Likelihood of the best of each group (RAFT). Source: arXiv 2304.06767."""

    type: Literal["best_of_k"] = "best_of_k"


class OpdConfig(UnshapedKnobs):
    """On-policy distillation: each token's advantage is the teacher's logprob less the policy's."""

    type: Literal["opd"] = "opd"
    ratio_cap: float | None = Field(1.0, gt=0, description="Upper bound of the ratio to the behavior policy.")


class SftConfig(AggregationKnobs):
    """Supervised fine-tuning: negative log-likelihood of the tokens in the loss mask."""

    type: Literal["sft"] = "sft"


class RmConfig(Knobs):
    """A reward model from preferences: Bradley-Terry on the scores of both. Source: arXiv 2203.02155."""

    type: Literal["rm"] = "rm"
    center_coefficient: float = Field(
        0.0, ge=0, description="Weight of the squared sum of a pair's scores, which keeps scores around 0."
    )


class DpoConfig(Knobs):
    """Preferences without a reward model. Sources: DPO (arXiv 2305.18290), IPO (2310.12036), ORPO (2403.07691), SimPO
    (2405.14734), KTO (2402.01306).
    """

    type: Literal["dpo"] = "dpo"
    loss: Literal["sigmoid", "ipo", "orpo", "simpo", "kto"] = Field("sigmoid", description="Which of the family.")
    beta: float = Field(0.1, gt=0, description="How strongly the policy is held to the reference. Per nat.")
    label_smoothing: float = Field(0.0, ge=0, lt=0.5, description="Probability that a preference is wrong.")
    simpo_margin: float = Field(0.5, ge=0, description="By how much a chosen mean logprob should lead, times beta.")
    good_weight: float = Field(1.0, ge=0, description="kto: weight of good examples.")
    bad_weight: float = Field(1.0, ge=0, description="kto: weight of bad examples.")
    sft_weight: float = Field(0.0, ge=0, description="Weight of the chosen completion's mean negative log-likelihood.")

    def unused_knobs(self) -> dict[str, str]:
        owners = {
            "label_smoothing": ("sigmoid", "simpo"),
            "simpo_margin": ("simpo",),
            "good_weight": ("kto",),
            "bad_weight": ("kto",),
        }
        return {knob: f"loss is {self.loss}" for knob, losses in owners.items() if self.loss not in losses}

    @property
    def uses_reference(self) -> bool:
        return self.loss in ("sigmoid", "ipo", "kto")


class DistillConfig(AggregationKnobs):
    """A teacher's distribution over its most probable tokens, off-line. Source: GKD (arXiv 2306.13649)."""

    type: Literal["distill"] = "distill"
    divergence: Literal["forward_kl", "reverse_kl", "jsd"] = Field("forward_kl", description="What is made small.")
    jsd_beta: float = Field(0.5, gt=0, lt=1, description="Share of the teacher in jsd's mixture.")
    teacher_tokens: int = Field(
        64, ge=1, description="How many of a teacher's most probable tokens count, where the data does not say."
    )
    sft_weight: float = Field(0.0, ge=0, description="Weight of the data's negative log-likelihood.")

    def unused_knobs(self) -> dict[str, str]:
        unused = super().unused_knobs()
        return unused if self.divergence == "jsd" else {**unused, "jsd_beta": f"divergence is {self.divergence}"}


class CustomConfig(AggregationKnobs):
    """An algorithm of your own: a function from `options` to a Preset, named by import path."""

    type: Literal["custom"] = "custom"
    path: str = Field(description="Where the function is, as package.module:function.", pattern=r"^[\w.]+:\w+$")
    options: dict[str, float | int | bool | str] = Field(default_factory=dict, description="What it is given.")

    @property
    def uses_reference(self) -> bool:
        return True  # whatever it is, it may


StreamedConfig = (
    GrpoConfig | DrGrpoConfig | DapoConfig | MaxRlConfig | GdpoConfig | GspoConfig | CispoConfig | ToprConfig
    | KimiConfig | DppoConfig | ReinforceConfig | RlooConfig | ReinforcePpConfig | PpoConfig | GigpoConfig
    | OnlineDpoConfig | BestOfKConfig | OpdConfig
)  # fmt: skip
OfflineConfig = SftConfig | RmConfig | DpoConfig | DistillConfig
AlgorithmConfig = Annotated[StreamedConfig | OfflineConfig | CustomConfig, Field(discriminator="type")]
