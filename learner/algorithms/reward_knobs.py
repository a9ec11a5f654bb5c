"""The knobs of rewards: what is done to them before they become advantages, and the pull towards the reference.

Loads no torch.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from learner.algorithms.knobs import KlForm, Knobs

Normalisation = Literal["none", "scale", "standardise"]


class KlLossKnobs(Knobs):
    """The pull towards the reference policy, as a part of the loss."""

    kl_coefficient: float = Field(
        0.0,
        ge=0,
        description="Weight of the penalty towards the reference policy. 0 runs no reference pass. Nats to loss.",
    )
    kl_form: KlForm = Field("k3", description="Estimate of the divergence in the loss; in the reward it is k1.")

    def unused_knobs(self) -> dict[str, str]:
        unused = super().unused_knobs()
        return unused if self.kl_coefficient else {**unused, "kl_form": "kl_coefficient is 0"}

    @property
    def uses_reference(self) -> bool:
        return self.kl_coefficient > 0

    @property
    def kl_is_in_reward(self) -> bool:
        """Whether the penalty lowers rewards, and is no part of the loss."""
        return False

    @model_validator(mode="after")
    def _a_form_with_a_gradient(self) -> KlLossKnobs:
        if self.uses_reference and not self.kl_is_in_reward and self.kl_form == "k1":
            raise ValueError(
                "kl_form is k1 and kl_in is loss: the expected gradient of k1 in a loss is 0, so it would hold nothing "
                "back; set kl_form to k3 or k2, or kl_in to reward"
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
        unused["kl_form"] = "kl_in is reward, which takes k1"
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
    reward_clip: float | None = Field(None, gt=0, description="Rewards are clipped to +- this. none: off")
    truncated: Literal["keep", "mask", "penalise"] = Field(
        "keep", description="Completions cut off at the longest length: trained, left out, or penalised."
    )
    truncated_penalty: float = Field(1.0, ge=0, description="What is taken off the reward of cut off completions.")
    overlong_length: int | None = Field(
        None, gt=0, description="Length in tokens at which the soft penalty reaches -1. none: off"
    )
    overlong_buffer: int = Field(128, gt=0, description="Tokens before overlong_length over which it grows from 0.")
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
            unused["overlong_buffer"] = "overlong_length is not set"
        for knob, of in (
            ("length_limit", "length_penalty"),
            ("relative_length_reward", "relative_length"),
            ("repetition_ngram", "repetition_penalty"),
        ):
            if getattr(self, of) == 0:
                unused[knob] = f"{of} is 0"
        return unused
