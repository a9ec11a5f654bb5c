"""DPPO: a trust region of probabilities in place of ratios."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from learner.algorithms.algorithm import GroupAlgorithm

if TYPE_CHECKING:
    from learner.algorithms.preset import Preset


class DppoConfig(GroupAlgorithm):
    """Updates stop where a token's probability, not its ratio, has moved too far from the behavior policy.

    Source: arXiv 2602.04879.
    """

    type: Literal["dppo"] = "dppo"
    divergence: Literal["total_variation", "kl"] = Field(
        "total_variation",
        description="How far is measured: by the difference of the token's probabilities, or by the KL divergence of "
        "that token against all others.",
    )
    delta_low: float = Field(0.2, ge=0, le=1, description="Largest fall of a token's probability.")
    delta_high: float = Field(0.2, ge=0, le=1, description="Largest rise of a token's probability.")
    kl_limit: float = Field(
        0.05, gt=0, description="Largest divergence of the behavior policy from the policy at a token. Nats."
    )
    kappa: float = Field(1e-3, ge=0, description="Weight of the squared gap to the behavior policy's logprobs.")

    def unused_knobs(self) -> dict[str, str]:
        unused = super().unused_knobs()
        if self.divergence == "kl":
            reason = "divergence is kl, which has one bound, kl_limit"
            return unused | dict.fromkeys(("delta_low", "delta_high"), reason)
        return {**unused, "kl_limit": "divergence is total_variation, which is bounded by delta_low and delta_high"}

    def preset(self) -> Preset:
        """Group advantages; a token's gradient stops where its probability has moved too far."""
        from learner.algorithms.policy_gradient import of_group, to_behavior
        from learner.algorithms.policy_loss import dppo

        loss = partial(
            dppo,
            delta_low=self.delta_low,
            delta_high=self.delta_high,
            kappa=self.kappa,
            kl_limit=self.kl_limit if self.divergence == "kl" else None,
        )
        return of_group(self, to_behavior(loss), to_behavior=True, pulls=True)
