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


class Knobs(BaseModel):
    """A group of knobs. Those without effect, as the others stand, are refused if given."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    wants_spread: ClassVar[bool] = False
    """Groups of equal rewards are of no use to the algorithm."""

    @property
    def uses_reference(self) -> bool:
        """True if a reference policy is compared with."""
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
    """How the losses of a step's tokens become one number."""

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
    """How a group's rewards become advantages."""

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
        description="Bounds the loss of negative advantages at dual_clip x |advantage|. 3 is usual. Absent: off",
    )


class CorrectionKnobs(Knobs):
    """What makes up for the gap between proximal and behavior policy: lag, and the engine's numerics."""

    correction: Correction = Field(
        "truncate",
        description="Weight exp(proximal - behavior): of each token; the product over the trajectory (sequence) or its "
        "geometric mean (geometric) for each of its tokens; or none, uncorrected.",
    )
    correction_cap: float = Field(2.0, gt=0, description="Upper bound of the correction weight. Dimensionless.")
    correction_floor: float = Field(
        0.0, ge=0, description="Lower bound of the correction weight; above 0, no token loses all of its gradient."
    )
    self_normalise: bool = Field(
        False, description="The correction weights are divided by their mean over the step's tokens."
    )
    token_window: tuple[float, float] | None = Field(
        None, description="Tokens whose weight is outside are left out; 0.5 to 5 is IcePop's. none: off"
    )
    sequence_window: tuple[float, float] | None = Field(
        None, description="Trajectories whose geometric mean of weights is outside are left out. none: off"
    )
    token_veto: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="A trajectory is left out whole if one of its tokens has a weight below; 1e-4 is usual. none: off",
    )
    divergence_limit: float | None = Field(
        None,
        gt=0,
        description="Tokens of negative advantage are left out where the trajectory's mean of behavior - proximal is "
        "above, in nats per token; DeepSeek-V3.2's mask (arXiv 2512.02556), 0.5 to begin with. none: off",
    )
    count_left_out: bool = Field(False, description="What is left out by these still counts in means.")
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
        """True if tokens can be left out."""
        filters = (self.token_window, self.sequence_window, self.token_veto, self.divergence_limit)
        return any(given is not None for given in filters)

    def unused_knobs(self) -> dict[str, str]:
        unused = super().unused_knobs()
        if self.proximal == "behavior":
            names = set(CorrectionKnobs.model_fields) - {"proximal"}
            return unused | dict.fromkeys(sorted(names), "proximal is behavior, which leaves no gap to correct")
        if self.correction == "none":
            names = {"correction_cap", "correction_floor"}
            if self.token_window is None:
                names |= {"self_normalise"}
            unused |= dict.fromkeys(sorted(names), "correction is none")
        if not self.has_filter:
            unused["count_left_out"] = "nothing is left out: no window, token_veto or divergence_limit is set"
        return unused

    @model_validator(mode="after")
    def _bounds_in_order(self) -> CorrectionKnobs:
        for name, window in (("token_window", self.token_window), ("sequence_window", self.sequence_window)):
            if window is not None and not 0 <= window[0] <= window[1]:
                raise ValueError(f"{name} is {list(window)}: expected two numbers, 0 <= low <= high")
        if self.correction_floor > self.correction_cap:
            raise ValueError(
                f"correction_floor is {self.correction_floor:g}, above correction_cap, {self.correction_cap:g}: no "
                "weight is within; lower the floor or raise the cap"
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
    positive_reward: float = Field(1.0, description="Trajectories of at least this reward are good ones, as it came.")

    def unused_knobs(self) -> dict[str, str]:
        unused = super().unused_knobs()
        return unused if self.positive_nll else {**unused, "positive_reward": "positive_nll is 0"}


class EntropyKnobs(Knobs):
    """The bonus for a spread distribution."""

    entropy_coefficient: float = Field(
        0.0, description="Weight of the mean entropy in the loss, per nat; uncorrected. 0 is off."
    )


KlForm = Literal["k1", "k2", "k3"]
TruncationRule = Literal["keep", "mask", "penalise"]
