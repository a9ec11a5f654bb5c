"""Clip-Cov: GRPO in which some of the tokens that lower the entropy have no advantage."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, model_validator

from learner.algorithms.algorithm import ClippedGroupAlgorithm

if TYPE_CHECKING:
    from torch import Tensor

    from learner.algorithms.preset import Advantages, Preset, Rewards, ScoredBatch


class ClipCovConfig(ClippedGroupAlgorithm):
    """GRPO in which a few of the tokens that lower the entropy, drawn uniformly among those whose covariance of
    advantage and logprob is within a window, get advantage 0, so no policy gradient; they still count in the
    denominator.

    Source: Clip-Cov of the entropy mechanism, arXiv 2505.22617.
    """

    of_groups: ClassVar[bool] = False
    type: Literal["clip_cov"] = "clip_cov"
    covariance_share: float = Field(
        2e-4,
        gt=0,
        le=1,
        description="Share of the step's tokens that are drawn, rounded down but at least one, and no more than lie "
        "between covariance_low and covariance_high.",
    )
    covariance_low: float = Field(
        1.0, description="Lower bound (exclusive) of the covariance of a token that may be drawn."
    )
    covariance_high: float = Field(
        5.0, description="Upper bound (exclusive) of the covariance of a token that may be drawn."
    )

    @model_validator(mode="after")
    def _room_between_the_bounds(self) -> ClipCovConfig:
        if not self.covariance_low < self.covariance_high:
            raise ValueError(
                f"covariance_low is {self.covariance_low:g} and covariance_high {self.covariance_high:g}: no token "
                "lies between, so none would be drawn; lower covariance_low or raise covariance_high"
            )
        return self

    def preset(self) -> Preset:
        """Group advantages, 0 at the tokens that are drawn, and the clip."""
        from dataclasses import replace

        import torch

        from learner.algorithms import covariance
        from learner.algorithms.policy_gradient import clip, group_level, policy_gradient
        from learner.algorithms.preset import Passes

        of_group = group_level(self)

        def estimate(batch: ScoredBatch, rewards: Rewards, kept: Tensor) -> Advantages:
            made = of_group(batch, rewards, kept)
            assert batch.proximal_logprobs is not None, "the preset asked for a pass of the policy"
            found = covariance.covariances(advantages=made.advantages, logprobs=batch.proximal_logprobs, counted=kept)
            drawn = covariance.drawn(
                found,
                low=self.covariance_low,
                high=self.covariance_high,
                share=self.covariance_share,
                counted=kept,
                seed=int(batch.token_ids.sum()),  # all ranks draw alike, other tokens at each step
            )
            drawn_share = float(drawn.sum()) / max(int(kept.sum()), 1)
            return replace(
                made,
                advantages=torch.where(drawn, 0.0, made.advantages),
                means={**made.means, "covariance_share": drawn_share},
            )

        return policy_gradient(self, name=self.type, estimator=estimate, loss=clip(self), passes=Passes(proximal=True))
