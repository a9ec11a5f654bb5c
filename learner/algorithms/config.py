"""What a user can set about an algorithm. Loads no torch.

One model per preset, told apart by `type`. A knob that the other choices make useless is refused when it is given,
and is left out when the model is dumped, so that a dumped config can always be read again.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer, model_validator

Aggregation = Literal["token", "sequence_mean", "sequence_sum", "constant"]
AdvantageScale = Literal["std", "none", "mean"]
Correction = Literal["truncate", "none"]


class _Preset(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    def unused_knobs(self) -> dict[str, str]:
        """Fields that have no effect as the others stand, each with the reason."""
        return {}

    @model_validator(mode="after")
    def _refuse_unused_knobs(self) -> _Preset:
        for knob, reason in self.unused_knobs().items():
            if knob in self.model_fields_set:
                raise ValueError(f"{knob} is set but has no effect: {reason}. Remove {knob}, or change that.")
        return self

    @model_serializer(mode="wrap")
    def _dump_used_knobs(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        unused = self.unused_knobs()
        return {name: value for name, value in handler(self).items() if name not in unused}


class GrpoConfig(_Preset):
    """Group-relative policy optimization, with the decoupled clip and a correction for stale tokens.

    Sources: DeepSeekMath (arXiv 2402.03300) for the group baseline and the k3 penalty; AReaL (arXiv 2505.24298) for the
    proximal anchor; Dr. GRPO (arXiv 2503.20783) for `advantage_scale = "none"` and `aggregation = "constant"`.
    """

    type: Literal["grpo"] = "grpo"
    advantage_scale: AdvantageScale = Field(
        "std",
        description="What a group's centred rewards are divided by: their standard deviation, nothing, or their mean.",
    )
    clip_low: float = Field(
        0.2, ge=0, le=1, description="The ratio to the proximal policy is clipped below at 1 - clip_low. Dimensionless."
    )
    clip_high: float = Field(
        0.2, ge=0, description="The ratio to the proximal policy is clipped above at 1 + clip_high. Dimensionless."
    )
    dual_clip: float | None = Field(
        None,
        gt=1,
        description="Bounds the loss of negative advantages at dual_clip x |advantage|. 3 is usual. Absent: off",
    )
    correction: Correction = Field(
        "truncate",
        description="Weight for the gap between proximal and behavior policy: truncated at correction_cap, or none.",
    )
    correction_cap: float = Field(2.0, gt=0, description="Upper bound of the correction weight. Dimensionless.")
    aggregation: Aggregation = Field(
        "token",
        description="How token losses become one number: mean over tokens; mean over trajectories of mean or sum; "
        "or the sum divided by trajectories x constant_length.",
    )
    constant_length: int = Field(
        1024,
        gt=0,
        description="Length in tokens that aggregation = constant divides by, usually the longest completion allowed.",
    )
    kl_coefficient: float = Field(
        0.0,
        ge=0,
        description="Weight of the k3 penalty towards the initial model. 0 runs no reference pass. Nats to loss.",
    )

    def unused_knobs(self) -> dict[str, str]:
        unused: dict[str, str] = {}
        if self.correction == "none":
            unused["correction_cap"] = "correction is none"
        if self.aggregation != "constant":
            unused["constant_length"] = f"aggregation is {self.aggregation}, and only constant uses it"
        return unused


class SftConfig(_Preset):
    """Supervised fine-tuning: negative log-likelihood of the tokens in the loss mask."""

    type: Literal["sft"] = "sft"
    aggregation: Aggregation = Field(
        "token",
        description="How token losses become one number; `token` is the mean over all trained tokens of a step.",
    )
    constant_length: int = Field(1024, gt=0, description="Length in tokens that aggregation = constant divides by.")

    def unused_knobs(self) -> dict[str, str]:
        if self.aggregation == "constant":
            return {}
        return {"constant_length": f"aggregation is {self.aggregation}, and only constant uses it"}


AlgorithmConfig = Annotated[GrpoConfig | SftConfig, Field(discriminator="type")]
