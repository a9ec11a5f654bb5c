"""The settings of every algorithm, those that sample and those that learn from files. Loads no torch.

One model per preset, told apart by `type`, made of the knobs of its parts. A knob that the other choices make useless
is refused when it is given, and is left out when the model is dumped, so that a dumped config can always be read again.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from learner.algorithms.knobs import (
    AdvantageScale,
    AggregationKnobs,
    ClipKnobs,
    ClippedKnobs,
    CorrectionKnobs,
    KlKnobs,
    Knobs,
    ScaleKnobs,
    StreamedKnobs,
    UnshapedKnobs,
    aggregation,
    clip_high,
    clip_low,
)
from learner.algorithms.knobs import Aggregation as Aggregation


class SftConfig(AggregationKnobs):
    """Supervised fine-tuning: negative log-likelihood of the tokens in the loss mask."""

    type: Literal["sft"] = "sft"


class RmConfig(Knobs):
    """A reward model from preferences: Bradley-Terry on the scores of both. Source: arXiv 2203.02155."""

    type: Literal["rm"] = "rm"
    center_coefficient: float = Field(
        0.0, ge=0, description="Weight of the squared sum of a pair's scores, which keeps scores around 0."
    )


PreferenceLoss = Literal[
    "sigmoid", "length_normalised", "robust", "hinge", "ipo", "exo", "discopop", "apo_zero", "apo_down", "nca", "bco",
    "sppo", "orpo", "simpo", "kto",
]  # fmt: skip
_OF_DIFFERENCES: tuple[PreferenceLoss, ...] = (
    "sigmoid", "length_normalised", "robust", "hinge", "ipo", "exo", "discopop",
)  # fmt: skip
"""Losses that see only how far the two sides are apart."""
_BETA: dict[str, float] = {"simpo": 2.0, "length_normalised": 5.0, "sppo": 1e-3}
_SMOOTHING: dict[str, float] = {"exo": 1e-3}


class DpoConfig(Knobs):
    """Preferences without a reward model.

    Sources: DPO (arXiv 2305.18290), length-normalised (2411.15124), robust (2403.00409), hinge (2305.10425), IPO
    (2310.12036), EXO (2402.00856), DiscoPOP (2406.08414), APO (2408.06266), NCA (2402.05369), BCO (2404.04656), SPPO
    (2405.00675), ORPO (2403.07691), SimPO (2405.14734), KTO (2402.01306).
    """

    type: Literal["dpo"] = "dpo"
    loss: PreferenceLoss = Field("sigmoid", description="Which of the family.")
    beta: float = Field(
        default_factory=lambda known: _BETA.get(known.get("loss", ""), 0.1),
        gt=0,
        description="How strongly the policy is held to the reference, per nat; of simpo and length_normalised, per "
        "nat per token. If left out 0.1; for simpo 2, for length_normalised 5, for sppo 0.001.",
    )
    reference_free: bool = Field(
        False,
        description="The reference counts as equally likely everywhere, and is not run. Of losses of a difference.",
    )
    label_smoothing: float = Field(
        default_factory=lambda known: _SMOOTHING.get(known.get("loss", ""), 0.0),
        ge=0,
        lt=0.5,
        description="Probability that a preference is wrong. If left out 0; for exo 0.001.",
    )
    discopop_temperature: float = Field(
        0.05, gt=0, description="discopop: the difference of rewards over which its two losses are mixed."
    )
    simpo_margin: float = Field(
        1.0,
        ge=0,
        description="simpo: by how much the mean logprobs, times beta, should be apart; half of beta is usual.",
    )
    good_weight: float = Field(1.0, ge=0, description="kto: weight of good examples.")
    bad_weight: float = Field(1.0, ge=0, description="kto: weight of bad examples.")
    sft_weight: float = Field(0.0, ge=0, description="Weight of the chosen completion's mean negative log-likelihood.")

    def unused_knobs(self) -> dict[str, str]:
        owners: dict[str, tuple[str, ...]] = {
            "reference_free": _OF_DIFFERENCES,
            "label_smoothing": ("sigmoid", "length_normalised", "robust", "exo", "simpo"),
            "discopop_temperature": ("discopop",),
            "simpo_margin": ("simpo",),
            "good_weight": ("kto",),
            "bad_weight": ("kto",),
        }
        return {knob: f"loss is {self.loss}" for knob, losses in owners.items() if self.loss not in losses}

    @model_validator(mode="after")
    def _labels_that_exo_can_take(self) -> DpoConfig:
        if self.loss == "exo" and self.label_smoothing == 0:
            raise ValueError(
                "label_smoothing is 0 and loss is exo, which is infinite for certain labels; 1e-3 is usual"
            )
        return self

    @property
    def uses_reference(self) -> bool:
        return self.loss not in ("orpo", "simpo") and not self.reference_free


class DistillConfig(AggregationKnobs):
    """A teacher's distribution over its most probable tokens, off-line. Source: GKD (arXiv 2306.13649).

    Both are taken at training.temperature, and the divergence is not multiplied by its square.
    """

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
    """GRPO that clips higher above, leaves out groups without spread, and penalises overlong completions where
    overlong_length says which those are.

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
    """Group sequence policy optimization: one clipped ratio for the whole trajectory, the geometric mean.

    Source: arXiv 2507.18071.
    """

    type: Literal["gspo"] = "gspo"
    clip_low: float = clip_low(3e-4)
    clip_high: float = clip_high(4e-4)
    aggregation: Aggregation = aggregation("sequence_mean")


class GmpoConfig(StreamedKnobs, CorrectionKnobs, ScaleKnobs):
    """The geometric mean of a trajectory's ratios, each clipped first. Source: GMPO, arXiv 2507.20673."""

    type: Literal["gmpo"] = "gmpo"
    log_clip_low: float = Field(
        0.4, ge=0, description="The log of a token's ratio to the proximal policy is not below minus this. Nats."
    )
    log_clip_high: float = Field(
        0.4, ge=0, description="The log of a token's ratio to the proximal policy is not above this. Nats."
    )
    aggregation: Aggregation = aggregation("sequence_mean")


class SapoConfig(StreamedKnobs, CorrectionKnobs, ScaleKnobs):
    """A soft gate on each token's ratio in place of the clip. Source: SAPO, arXiv 2511.20347."""

    type: Literal["sapo"] = "sapo"
    temperature_positive: float = Field(
        1.0, gt=0, description="How fast the gate closes where the advantage is positive. Dimensionless."
    )
    temperature_negative: float = Field(
        1.05, gt=0, description="How fast it closes where the advantage is negative. Dimensionless."
    )
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
    """Tapered off-policy REINFORCE: good trajectories count whole, uncorrected, bad ones by a truncated ratio.

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


class RlooConfig(StreamedKnobs, CorrectionKnobs):
    """REINFORCE whose baseline is the mean of the group's other rewards. Source: arXiv 2402.14740."""

    type: Literal["rloo"] = "rloo"
    policy_loss: Literal["reinforce", "sequence_clip"] = Field(
        "reinforce",
        description="Truncated ratio to the behavior policy; or the clipped ratio of the whole trajectory, the product "
        "over its tokens (asynchronous RLHF, arXiv 2410.18252), with a correction.",
    )
    ratio_cap: float | None = Field(1.0, gt=0, description="Upper bound of the ratio to the behavior policy.")
    clip_low: float = clip_low(0.2)
    clip_high: float = clip_high(0.2)
    kl_in: Literal["loss", "reward"] = KlKnobs.place("reward")

    @property
    def corrects(self) -> bool:
        return self.policy_loss == "sequence_clip"

    def unused_knobs(self) -> dict[str, str]:
        unused = super().unused_knobs()
        if self.corrects:
            return {**unused, "ratio_cap": "policy_loss is sequence_clip, and only reinforce has a cap"}
        reason = "policy_loss is reinforce, whose ratio is to the behavior policy already, and only sequence_clip clips"
        return unused | dict.fromkeys(("clip_low", "clip_high", *sorted(CorrectionKnobs.model_fields)), reason)


class ReinforcePpConfig(ClippedKnobs):
    """REINFORCE++: rewards to go, normalised over the tokens of the whole batch. Source: arXiv 2501.03262."""

    type: Literal["reinforce_pp"] = "reinforce_pp"
    group_baseline: bool = Field(False, description="Subtract the mean of the group before normalising.")
    kl_in: Literal["loss", "reward"] = KlKnobs.place("reward")


class PpoConfig(ClippedKnobs):
    """Proximal policy optimization with a critic of its own, whose targets are uncorrected for stale tokens.

    Sources: arXiv 1707.06347, VAPO (2504.05118).
    """

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
    turn_rewards: bool = Field(
        False,
        description="Turns have rewards of their own: those that the environment's steps gave, or the components "
        "turn_0, turn_1, ... of the reward; what they leave of the reward comes with the last turn.",
    )

    def unused_knobs(self) -> dict[str, str]:
        return {**super().unused_knobs(), "turn_discount": "gigpo discounts by step_discount"}


class OnlineDpoConfig(Knobs):
    """DPO on the best and the worst of each group, as they come: uncorrected for stale tokens.

    Sources: arXiv 2402.04792, 2410.18252, which finds it the most robust to them.
    """

    wants_spread: ClassVar[bool] = True
    type: Literal["online_dpo"] = "online_dpo"
    beta: float = Field(0.1, gt=0, description="How strongly the policy is held to the reference. Per nat.")
    label_smoothing: float = Field(0.0, ge=0, lt=0.5, description="Probability that a preference is wrong.")

    @property
    def uses_reference(self) -> bool:
        return True


class BestOfKConfig(AggregationKnobs):
    """Likelihood of the best of each group, if it is better than another: uncorrected for stale tokens.

    Groups of equal rewards, failed ones among them, are left out. Source: RAFT (arXiv 2304.06767).
    """

    wants_spread: ClassVar[bool] = True
    type: Literal["best_of_k"] = "best_of_k"


class OpdConfig(UnshapedKnobs):
    """On-policy distillation: each token's advantage is the teacher's logprob less the policy's."""

    type: Literal["opd"] = "opd"
    ratio_cap: float | None = Field(1.0, gt=0, description="Upper bound of the ratio to the behavior policy.")


class CustomConfig(AggregationKnobs):
    """An algorithm of your own: a function from `options` to a Preset, named by import path."""

    type: Literal["custom"] = "custom"
    path: str = Field(description="Where the function is, as package.module:function.", pattern=r"^[\w.]+:\w+$")
    options: dict[str, float | int | bool | str] = Field(default_factory=dict, description="What it is given.")

    @property
    def uses_reference(self) -> bool:
        return True  # whatever it is, it may


StreamedConfig = (
    GrpoConfig | DrGrpoConfig | DapoConfig | MaxRlConfig | GdpoConfig | GspoConfig | GmpoConfig | SapoConfig
    | CispoConfig | ToprConfig | KimiConfig | DppoConfig | ReinforceConfig | RlooConfig | ReinforcePpConfig | PpoConfig
    | GigpoConfig | OnlineDpoConfig | BestOfKConfig | OpdConfig
)  # fmt: skip
OfflineConfig = SftConfig | RmConfig | DpoConfig | DistillConfig
AlgorithmConfig = Annotated[StreamedConfig | OfflineConfig | CustomConfig, Field(discriminator="type")]
