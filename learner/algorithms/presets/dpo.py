"""DPO and its family: preferences without a reward model."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, model_validator

from learner.algorithms.algorithm import Algorithm

if TYPE_CHECKING:
    from learner.algorithms.preset import Preset

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


class DpoConfig(Algorithm):
    """Preferences without a reward model.

    Sources: DPO (arXiv 2305.18290), length-normalised (2411.15124), robust (2403.00409), hinge (2305.10425), IPO
    (2310.12036), EXO (2402.00856), DiscoPOP (2406.08414), APO (2408.06266), NCA (2402.05369), BCO (2404.04656), SPPO
    (2405.00675), ORPO (2403.07691), SimPO (2405.14734), KTO (2402.01306).
    """

    learns_from_files: ClassVar[bool] = True
    type: Literal["dpo"] = "dpo"
    loss: PreferenceLoss = Field("sigmoid", description="Loss of the family; docs/algorithms.md has the equations.")
    beta: float = Field(
        default_factory=lambda known: _BETA.get(known.get("loss", ""), 0.1),
        gt=0,
        description="How strongly the policy is held to the reference, per nat; of simpo and length_normalised, per "
        "nat per token. If left out 0.1; for simpo 2, for length_normalised 5, for sppo 0.001.",
    )
    reference_free: bool = Field(
        False,
        description="No reference is run, and its logprobs count as 0. For losses of the difference of both sides.",
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

    def preset(self) -> Preset:
        """The loss of the family that `loss` names."""
        from learner.algorithms.presets.dpo_family import kto, paired

        return kto(self) if self.loss == "kto" else paired(self)
