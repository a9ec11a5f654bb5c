"""The knobs of rewards, of the pull towards the reference, and of whole policy gradients. Loads no torch."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from learner.algorithms.knobs import (
    AggregationKnobs,
    ClipKnobs,
    CorrectionKnobs,
    EntropyKnobs,
    KlForm,
    Knobs,
    PositiveKnobs,
    ScaleKnobs,
)

Normalisation = Literal["none", "scale", "standardise"]


class KlLossKnobs(Knobs):
    """The pull towards the reference policy, as a part of the loss."""

    kl_coefficient: float = Field(
        0.0,
        ge=0,
        description="Weight of the penalty towards the reference policy. 0 runs no reference pass. Nats to loss.",
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
        description="Whether the penalty's weight in the reward stays, or moves from kl_coefficient on so that the "
        "divergence comes to kl_target (arXiv 1909.08593).",
    )
    kl_target: float = Field(6.0, gt=0, description="Of adaptive: the divergence aimed at. Nats per trajectory.")
    kl_horizon: int = Field(
        10_000,
        gt=0,
        description="Of adaptive: the weight follows over about so many trajectories, by a fifth of itself at most.",
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
    """What is done to rewards before they become advantages: normalised, scaled, clipped, then penalised."""

    reward_normalisation: Normalisation = Field(
        "none",
        description="Rewards are divided by the standard deviation of all rewards of the run so far (scale), less "
        "their mean (standardise).",
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
    truncated_penalty: float = Field(1.0, ge=0, description="What is taken off the reward of cut off completions.")
    overlong_length: int | None = Field(
        None, gt=0, description="Length in tokens at which the soft penalty is whole. none: off"
    )
    overlong_buffer: int = Field(128, gt=0, description="Tokens before overlong_length over which it grows from 0.")
    overlong_factor: float = Field(1.0, gt=0, description="What the whole soft penalty takes off the reward.")
    length_penalty: float = Field(
        0.0, ge=0, description="What is taken off the reward of a trajectory of length_limit tokens; less off shorter."
    )
    length_limit: int = Field(
        1024, gt=0, description="Trained tokens at which length_penalty, which grows linearly, is whole."
    )
    relative_length: float = Field(
        0.0,
        ge=0,
        description="Half of this is added for the shortest of a group and taken off for the longest; nothing is added "
        "below relative_length_reward (Kimi k1.5, arXiv 2501.12599).",
    )
    relative_length_reward: float = Field(1.0, description="Rewards of at least this count as right answers there.")
    repetition_penalty: float = Field(
        0.0, ge=0, description="What is taken off per share of a trajectory's n-grams that it had before."
    )
    repetition_ngram: int = Field(4, gt=0, description="Tokens in a row that make such an n-gram.")

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


class SampledKnobs(AggregationKnobs, KlLossKnobs, EntropyKnobs):
    """What every policy gradient has."""

    @property
    def masks_truncated(self) -> bool:
        """True if completions cut off at the longest length are left out of the loss."""
        return False


class UnshapedKnobs(SampledKnobs):
    """What a policy gradient has whose advantages are not made of the trajectory's reward."""

    truncated: Literal["keep", "mask"] = Field(
        "keep", description="Completions cut off at the longest length: trained, or left out."
    )

    @property
    def masks_truncated(self) -> bool:
        return self.truncated == "mask"


class StreamedKnobs(SampledKnobs, KlKnobs, RewardKnobs):
    """What a policy gradient has whose advantages are made of the trajectory's reward."""

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
    """What every algorithm with a clipped ratio to the proximal policy has."""
