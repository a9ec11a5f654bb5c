"""The knobs that algorithms share, in groups, and the names of their choices: each part of a preset brings its own.
Loads no torch.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer, model_validator

Aggregation = Literal["token", "sequence_mean", "sequence_sum", "constant"]
AdvantageScale = Literal["std", "none", "mean", "batch"]
Correction = Literal["truncate", "sequence", "geometric", "none"]
Proximal = Literal["recompute", "interpolate", "behavior"]
Divergence = Literal["forward_kl", "reverse_kl", "jsd", "skewed_forward_kl", "skewed_reverse_kl", "adaptive_kl"]
_DIVERGENCES_OF: dict[str, tuple[Divergence, ...]] = {
    "jsd_beta": ("jsd",),
    "skew": ("skewed_forward_kl", "skewed_reverse_kl"),
    "head_mass": ("adaptive_kl",),
}
"""The divergences that a knob belongs to."""


class Knobs(BaseModel):
    """A group of knobs. Those without effect, as the others stand, are refused if given."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    wants_spread: ClassVar[bool] = False
    """Groups of equal rewards are of no use to the algorithm."""

    @property
    def uses_reference(self) -> bool:
        """True if a reference policy is compared with."""
        return False

    @property
    def uses_teacher(self) -> bool:
        """True if a teacher is compared with."""
        return False

    def unused_knobs(self) -> dict[str, str]:
        """Fields that have no effect as the others stand, each with the reason."""
        return {}

    @model_validator(mode="after")
    def _refuse_unused_knobs(self) -> Knobs:
        for knob, reason in self.unused_knobs().items():
            if knob in self.model_fields_set:
                raise ValueError(f"{knob} is set but has no effect: {reason}. Remove {knob}, or change that.")
        return self

    @model_serializer(mode="wrap")
    def _dump_used_knobs(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        unused = self.unused_knobs()
        return {name: value for name, value in handler(self).items() if name not in unused}


def aggregation(default: Aggregation) -> Any:
    """The field of that name, with an algorithm's own default."""
    return Field(
        default,
        description="How token losses become one number: mean over tokens; mean over trajectories of mean or sum; "
        "or the sum divided by trajectories x constant_length.",
    )


class AggregationKnobs(Knobs):
    """Reduction of the losses of a step's tokens to one number."""

    aggregation: Aggregation = aggregation("token")
    constant_length: int = Field(
        1024,
        gt=0,
        description="Length in tokens that aggregation = constant divides by, usually the longest completion allowed.",
    )

    def unused_knobs(self) -> dict[str, str]:
        unused = super().unused_knobs()
        if self.aggregation == "constant":
            return unused
        return {**unused, "constant_length": f"aggregation is {self.aggregation}, and only constant uses it"}


class ScaleKnobs(Knobs):
    """Scaling of a group's rewards into advantages."""

    @staticmethod
    def field(default: AdvantageScale) -> Any:
        """The knob, with an algorithm's own default."""
        return Field(
            default,
            description="What a group's centred rewards are divided by: their standard deviation, nothing, their mean, "
            "or the standard deviation of all rewards of the step (batch).",
        )

    advantage_scale: AdvantageScale = field("std")


def clip_low(default: float) -> Any:
    """The field of that name, with an algorithm's own default."""
    text = "The ratio to the proximal policy is clipped below at 1 - clip_low. Dimensionless."
    return Field(default, ge=0, le=1, description=text)


def clip_high(default: float) -> Any:
    """The field of that name, with an algorithm's own default."""
    return Field(
        default, ge=0, description="The ratio to the proximal policy is clipped above at 1 + clip_high. Dimensionless."
    )


class ClipKnobs(Knobs):
    """The clip of the ratio to the proximal policy."""

    clip_low: float = clip_low(0.2)
    clip_high: float = clip_high(0.2)
    dual_clip: float | None = Field(
        None,
        gt=1,
        description="Bounds the loss of negative advantages at dual_clip x |advantage|. 3 is usual. none: off",
    )


def ratio_cap(more: str = "") -> Any:
    """The field of that name, with what an algorithm has to say beside."""
    bound = "Upper bound of the ratio to the behavior policy"
    return Field(1.0, gt=0, description=f"{bound}; {more}. none: no bound" if more else f"{bound}. none: no bound")


class RatioCapKnobs(Knobs):
    """The bound of the ratio to the behavior policy, for losses that weigh tokens by it."""

    ratio_cap: float | None = ratio_cap()


class SignedRatioCapKnobs(RatioCapKnobs):
    """Bounds of that ratio for good tokens and for bad ones."""

    ratio_cap_bad: float | None = Field(
        None,
        gt=0,
        description="The same of tokens of negative advantage, in place of ratio_cap. One that has grown likely since "
        "it was sampled is pushed down by its ratio; a low bound hinders that. none: as ratio_cap",
    )


class CorrectionKnobs(Knobs):
    """Settings that make up for the gap between proximal and behavior policy: lag, and the engine's numerics."""

    correction: Correction = Field(
        "truncate",
        description="Weight exp(proximal - behavior): of each token; the product over the trajectory (sequence) or its "
        "geometric mean (geometric) for each of its tokens, with history = split of each context by itself; or none, "
        "uncorrected.",
    )
    correction_cap: float = Field(2.0, gt=0, description="Upper bound of the correction weight. Dimensionless.")
    correction_cap_bad: float | None = Field(
        None,
        gt=0,
        description="The same of tokens of negative advantage, in place of correction_cap: see ratio_cap_bad. none: as "
        "correction_cap",
    )
    correction_floor: float = Field(
        0.0, ge=0, description="Lower bound of the correction weight; above 0, no token loses all of its gradient."
    )
    self_normalise: bool = Field(
        False, description="The correction weights are divided by their mean over the step's tokens."
    )
    token_window: tuple[float, float] | None = Field(
        None,
        description="Tokens whose correction weight is outside these bounds are left out; 0.5 to 5 is IcePop's. "
        "none: off",
    )
    sequence_window: tuple[float, float] | None = Field(
        None,
        description="Trajectories whose geometric mean of correction weights is outside these bounds are left out, "
        "with history = split each context by itself. none: off",
    )
    token_veto: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="A trajectory is left out whole if one of its tokens has a correction weight below this, with "
        "history = split the token's context alone; 1e-4 is usual. none: off",
    )
    divergence_limit: float | None = Field(
        None,
        gt=0,
        description="Tokens of negative advantage are left out of trajectories whose mean of behavior - proximal is "
        "above this, in nats per token, with history = split of contexts; DeepSeek-V3.2's mask (arXiv 2512.02556); "
        "try 0.5 first. none: off",
    )
    binary_kl_limit: float | None = Field(
        None,
        gt=0,
        description="Tokens are left out at which the KL divergence between proximal and behavior policy, of the token "
        "against all others, is above this in either direction, in nats; KPop's mask (arXiv 2606.15079). none: off",
    )
    second_moment_limit: float | None = Field(
        None,
        gt=0,
        description="The tokens with the largest squared log of the correction weight are left out, as few as bring "
        "the mean of the others' squares over the step to at most this; 0.04 is M2PO's (arXiv 2510.01161). They never "
        "count. none: off",
    )
    count_left_out: bool = Field(
        False,
        description="Tokens that these filters leave out, but for second_moment_limit, still count in the denominators "
        "of means.",
    )
    proximal: Proximal = Field(
        "recompute",
        description="The proximal policy's logprobs: those at the step's start, by interpolation between behavior and "
        "policy according to lag, or the behavior policy's own.",
    )

    @property
    def corrects(self) -> bool:
        """True if the loss takes a correction at all."""
        return True

    @property
    def has_filter(self) -> bool:
        """True if tokens can be left out by what they are themselves, or their sequence, not by the step."""
        filters = (
            self.token_window,
            self.sequence_window,
            self.token_veto,
            self.divergence_limit,
            self.binary_kl_limit,
        )
        return any(given is not None for given in filters)

    def unused_knobs(self) -> dict[str, str]:
        unused = super().unused_knobs()
        if self.proximal == "behavior":
            names = set(CorrectionKnobs.model_fields) - {"proximal"}
            return unused | dict.fromkeys(sorted(names), "proximal is behavior, which leaves no gap to correct")
        if self.correction == "none":
            names = {"correction_cap", "correction_cap_bad", "correction_floor"}
            if self.token_window is None:
                names |= {"self_normalise"}
            unused |= dict.fromkeys(sorted(names), "correction is none")
        if not self.has_filter:
            unused["count_left_out"] = (
                "nothing is left out: no window, token_veto, divergence_limit or binary_kl_limit is set"
            )
        return unused

    @model_validator(mode="after")
    def _bounds_in_order(self) -> CorrectionKnobs:
        for name, window in (("token_window", self.token_window), ("sequence_window", self.sequence_window)):
            if window is not None and not 0 <= window[0] <= window[1]:
                raise ValueError(f"{name} is {list(window)}: expected two numbers, 0 <= low <= high")
        for name, cap in (("correction_cap", self.correction_cap), ("correction_cap_bad", self.correction_cap_bad)):
            if cap is not None and self.correction_floor > cap:
                raise ValueError(
                    f"correction_floor is {self.correction_floor:g}, above {name}, {cap:g}: no weight is within; lower "
                    "the floor or raise the cap"
                )
        return self


class PositiveKnobs(Knobs):
    """The likelihood of good trajectories, beside the policy loss."""

    positive_nll: float = Field(
        0.0,
        ge=0,
        description="Weight of the negative log-likelihood of good trajectories, uncorrected, aggregated over those "
        "alone; 0.1 is VAPO's (arXiv 2504.05118). 0 is off.",
    )
    positive_reward: float = Field(
        1.0, description="Trajectories of at least this reward, before it is shaped, are good ones."
    )

    def unused_knobs(self) -> dict[str, str]:
        unused = super().unused_knobs()
        return unused if self.positive_nll else {**unused, "positive_reward": "positive_nll is 0"}


class EntropyKnobs(Knobs):
    """The bonus for a spread distribution."""

    entropy_coefficient: float = Field(
        0.0,
        description="Weight of the mean entropy in the loss, per nat; uncorrected. 0 is off, and with entropy_target "
        "where the weight begins.",
    )
    entropy_target: float | None = Field(
        None,
        gt=0,
        description="The weight of the entropy grows by entropy_step after a step of less than this, in nats per "
        "token, and falls by as much after one of more, whose own loss it is no part of (Skywork-OR1, arXiv "
        "2505.22312). none: the weight stays as it is",
    )
    entropy_step: float = Field(1e-4, gt=0, description="Change of the weight of the entropy in a step. Per nat.")
    entropy_limit: float = Field(5e-3, gt=0, description="Largest weight of the entropy. Per nat.")

    @property
    def has_entropy(self) -> bool:
        """True if the entropy may be a part of the loss."""
        return self.entropy_coefficient != 0 or self.entropy_target is not None

    def unused_knobs(self) -> dict[str, str]:
        unused = super().unused_knobs()
        if self.entropy_target is not None:
            return unused
        return unused | dict.fromkeys(("entropy_step", "entropy_limit"), "entropy_target is not set")

    @model_validator(mode="after")
    def _a_weight_within_its_limit(self) -> EntropyKnobs:
        if self.entropy_target is not None and not 0 <= self.entropy_coefficient <= self.entropy_limit:
            raise ValueError(
                f"entropy_coefficient is {self.entropy_coefficient:g}: with entropy_target the weight begins there, "
                f"and is between 0 and entropy_limit, {self.entropy_limit:g}; lower it, or raise entropy_limit"
            )
        return self


KlForm = Literal["k1", "k2", "k3"]
TruncationRule = Literal["keep", "mask", "penalise"]


Normalisation = Literal["none", "scale", "standardise"]


class KlLossKnobs(Knobs):
    """The pull towards the reference policy, as a part of the loss."""

    kl_coefficient: float = Field(
        0.0,
        ge=0,
        description="Weight of the penalty towards the reference policy, per nat. 0 runs no reference pass.",
    )
    kl_form: KlForm = Field("k3", description="Estimate of the divergence in the loss; in the reward it is k1.")
    kl_ratio: bool = Field(
        False,
        description="The penalty in the loss is weighted by the ratio to the behavior policy, which makes it unbiased "
        "on stale tokens (DeepSeek-V3.2, arXiv 2512.02556); uncorrected if false.",
    )

    def unused_knobs(self) -> dict[str, str]:
        unused = super().unused_knobs()
        return unused if self.kl_coefficient else unused | dict.fromkeys(("kl_form", "kl_ratio"), "kl_coefficient is 0")

    @property
    def uses_reference(self) -> bool:
        return self.kl_coefficient > 0

    @property
    def kl_is_in_reward(self) -> bool:
        """True if the penalty lowers rewards, and is no part of the loss."""
        return False

    @model_validator(mode="after")
    def _a_form_with_a_gradient(self) -> KlLossKnobs:
        if self.uses_reference and not self.kl_is_in_reward and self.kl_form == "k1" and not self.kl_ratio:
            raise ValueError(
                "kl_form is k1 and kl_in is loss: the expected gradient of k1 in a loss is 0, so it would hold nothing "
                "back; set kl_form to k3 or k2, kl_ratio to true, or kl_in to reward"
            )
        return self


class KlKnobs(KlLossKnobs):
    """The same pull, in the loss or in the reward; in the reward its weight can follow a target."""

    @staticmethod
    def place(default: Literal["loss", "reward"]) -> Any:
        """The knob `kl_in`, with an algorithm's own default."""
        return Field(default, description="Whether the penalty is part of the loss or of each token's reward.")

    kl_in: Literal["loss", "reward"] = place("loss")
    kl_control: Literal["fixed", "adaptive"] = Field(
        "fixed",
        description="The penalty's weight in the reward: fixed, or adaptive: it begins at kl_coefficient and moves "
        "until the divergence is kl_target (arXiv 1909.08593).",
    )
    kl_target: float = Field(6.0, gt=0, description="With adaptive: the divergence to reach. Nats per trajectory.")
    kl_horizon: int = Field(
        10_000,
        gt=0,
        description="With adaptive: in so many trajectories the weight changes by a fifth of itself at most.",
    )

    @property
    def kl_is_in_reward(self) -> bool:
        return self.uses_reference and self.kl_in == "reward"

    def unused_knobs(self) -> dict[str, str]:
        unused = super().unused_knobs()
        if not self.uses_reference:
            names = ("kl_in", "kl_control", "kl_target", "kl_horizon")
            return unused | dict.fromkeys(names, "kl_coefficient is 0")
        if self.kl_in == "loss":
            reason = "kl_in is loss, and only a penalty in the reward adapts"
            return unused | dict.fromkeys(("kl_control", "kl_target", "kl_horizon"), reason)
        unused |= dict.fromkeys(("kl_form", "kl_ratio"), "kl_in is reward, which takes k1 as it is")
        if self.kl_control == "fixed":
            unused |= dict.fromkeys(("kl_target", "kl_horizon"), "kl_control is fixed")
        return unused


class RewardKnobs(Knobs):
    """Settings of what is done to rewards before they become advantages: discounted, normalised, scaled, clipped,
    penalised.
    """

    turn_discount: float = Field(
        1.0,
        gt=0,
        le=1,
        description="A turn's reward is multiplied by this once for each turn before it. The part of the "
        "trajectory's reward that no turn has belongs to the last turn. 1: no discount",
    )
    reward_normalisation: Normalisation = Field(
        "none",
        description="Rewards are divided by the standard deviation of all rewards of the run so far (scale); "
        "standardise subtracts their mean first.",
    )
    reward_scale: float = Field(1.0, gt=0, description="Rewards are multiplied by this.")
    reward_clip: float | None = Field(
        None, gt=0, description="Rewards are clipped to at most this, and to at least its negative. none: off"
    )
    reward_clip_low: float | None = Field(
        None, description="Rewards are clipped to at least this; with reward_clip, in place of its negative. none: off"
    )
    truncated: Literal["keep", "mask", "penalise"] = Field(
        "keep", description="Completions cut off at the longest length: trained, left out, or penalised."
    )
    truncated_penalty: float = Field(
        1.0, ge=0, description="Subtracted from the reward of completions that were cut off."
    )
    overlong_length: int | None = Field(
        None, gt=0, description="Length in tokens at which the soft penalty is whole. none: off"
    )
    overlong_buffer: int = Field(
        128, gt=0, description="Tokens before overlong_length over which the soft penalty grows from 0."
    )
    overlong_factor: float = Field(1.0, gt=0, description="Subtracted from the reward where the soft penalty is whole.")
    length_penalty: float = Field(
        0.0,
        ge=0,
        description="Subtracted from the reward of a trajectory of length_limit tokens; shorter ones lose less, in "
        "proportion.",
    )
    length_limit: int = Field(
        1024, gt=0, description="Trained tokens at which length_penalty is whole; it grows linearly up to there."
    )
    relative_length: float = Field(
        0.0,
        ge=0,
        description="Half of this is added for the shortest of a group and taken off for the longest; nothing is added "
        "below relative_length_reward (Kimi k1.5, arXiv 2501.12599).",
    )
    relative_length_reward: float = Field(
        1.0, description="Rewards of at least this count as right answers for relative_length."
    )
    repetition_penalty: float = Field(
        0.0,
        ge=0,
        description="Subtracted from the reward, times the share of the trajectory's n-grams that it had before.",
    )
    repetition_ngram: int = Field(4, gt=0, description="Length of these n-grams, in tokens.")

    def unused_knobs(self) -> dict[str, str]:
        unused = super().unused_knobs()
        if self.truncated != "penalise":
            unused["truncated_penalty"] = f"truncated is {self.truncated}"
        if self.overlong_length is None:
            unused |= dict.fromkeys(("overlong_buffer", "overlong_factor"), "overlong_length is not set")
        for knob, of in (
            ("length_limit", "length_penalty"),
            ("relative_length_reward", "relative_length"),
            ("repetition_ngram", "repetition_penalty"),
        ):
            if getattr(self, of) == 0:
                unused[knob] = f"{of} is 0"
        return unused

    @property
    def reward_bounds(self) -> tuple[float | None, float | None]:
        """The lowest and the highest reward after clipping; None does not bind."""
        symmetric = None if self.reward_clip is None else -self.reward_clip
        return (symmetric if self.reward_clip_low is None else self.reward_clip_low), self.reward_clip

    @model_validator(mode="after")
    def _bounds_that_fit(self) -> RewardKnobs:
        low, high = self.reward_bounds
        if low is not None and high is not None and low >= high:
            raise ValueError(f"reward_clip_low is {low:g} and reward_clip {high:g}: every reward would be the same")
        if self.overlong_length is not None and self.overlong_buffer > self.overlong_length:
            raise ValueError(
                f"overlong_buffer is {self.overlong_buffer} and overlong_length {self.overlong_length}: the penalty "
                "would begin before the first token; lower overlong_buffer"
            )
        return self


class DivergenceKnobs(Knobs):
    """Settings of how far the policy is from a teacher: a divergence over the teacher's likeliest tokens and one bucket
    for all the others.
    """

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

    @property
    def compared_by(self) -> Divergence | None:
        """The divergence between the two distributions; None if they are not compared."""
        raise NotImplementedError

    @property
    def divergence_weight(self) -> float:
        """Weight of the divergence in the loss."""
        return 1.0

    @property
    def _why_uncompared(self) -> str:
        return "no distributions are compared"

    def unused_knobs(self) -> dict[str, str]:
        unused = super().unused_knobs()
        compared_by = self.compared_by
        if compared_by is None:
            return unused | dict.fromkeys((*_DIVERGENCES_OF, "teacher_tokens"), self._why_uncompared)
        strange = [knob for knob, owners in _DIVERGENCES_OF.items() if compared_by not in owners]
        return unused | dict.fromkeys(strange, f"the divergence is {compared_by}")


class TeacherKnobs(DivergenceKnobs):
    """Settings of a teacher beside the rewards: a divergence from it is added to the policy's loss."""

    teacher_weight: float = Field(
        0.0,
        ge=0,
        description="Weight of the divergence from a teacher of learner.teachers that is added to the loss, per nat. "
        "0 asks no teacher.",
    )
    teacher_divergence: Divergence = Field(
        "reverse_kl", description="With teacher_weight: the divergence from the teacher that is added."
    )

    @property
    def compared_by(self) -> Divergence | None:
        return self.teacher_divergence if self.teacher_weight else None

    @property
    def divergence_weight(self) -> float:
        return self.teacher_weight

    @property
    def uses_teacher(self) -> bool:
        return self.teacher_weight > 0

    @property
    def _why_uncompared(self) -> str:
        return "teacher_weight is 0"

    def unused_knobs(self) -> dict[str, str]:
        unused = super().unused_knobs()
        return unused if self.teacher_weight else unused | {"teacher_divergence": self._why_uncompared}


class SampledKnobs(AggregationKnobs, KlLossKnobs, EntropyKnobs):
    """Settings that every policy gradient has."""

    observation_weight: float = Field(
        0.0,
        ge=0,
        description="Weight of the mean cross-entropy, in nats per token, of what the environment said between the "
        "policy's turns, which is added to the loss. 0: the policy learns nothing from it.",
    )

    @property
    def masks_truncated(self) -> bool:
        """True if completions cut off at the longest length are left out of the loss."""
        return False


class UnshapedKnobs(SampledKnobs):
    """Settings of a policy gradient whose advantages are not made of the trajectory's reward."""

    truncated: Literal["keep", "mask"] = Field(
        "keep", description="Completions cut off at the longest length: trained, or left out."
    )

    @property
    def masks_truncated(self) -> bool:
        return self.truncated == "mask"


class StreamedKnobs(SampledKnobs, KlKnobs, RewardKnobs, TeacherKnobs):
    """Settings of a policy gradient whose advantages are made of the trajectory's reward."""

    @property
    def masks_truncated(self) -> bool:
        return self.truncated == "mask"

    @model_validator(mode="after")
    def _means_to_divide_by(self) -> StreamedKnobs:
        divides_by_means = isinstance(self, ScaleKnobs) and self.advantage_scale == "mean"
        if divides_by_means and self.reward_normalisation == "standardise":
            raise ValueError(
                "reward_normalisation is standardise and advantage_scale is mean: standardised rewards have a mean of "
                "about 0, which nothing can be divided by; set reward_normalisation to scale or none, or "
                "advantage_scale to std"
            )
        return self


class ClippedKnobs(StreamedKnobs, ClipKnobs, CorrectionKnobs, PositiveKnobs):
    """Settings that every algorithm with a clipped ratio to the proximal policy has."""
