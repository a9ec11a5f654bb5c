"""Clip-Cov: GRPO without some of the tokens that lower the entropy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from learner.algorithms.algorithm import ClippedGroupAlgorithm

if TYPE_CHECKING:
    from torch import Tensor

    from learner.algorithms.preset import Advantages, Preset, Rewards, ScoredBatch


class ClipCovConfig(ClippedGroupAlgorithm):
    """GRPO in which a few of the tokens that lower the entropy, drawn by their covariance of advantage and logprob,
    have no gradient.

    Source: Clip-Cov of the entropy mechanism, arXiv 2505.22617.
    """

    type: Literal["clip_cov"] = "clip_cov"
    covariance_share: float = Field(
        2e-4, gt=0, le=1, description="Tokens without a gradient, as a share of those of the step; at least one."
    )
    covariance_low: float = Field(1.0, description="They are drawn from those with a covariance above this.")
    covariance_high: float = Field(5.0, description="They are drawn from those with a covariance below this.")

    def preset(self) -> Preset:
        """Group advantages, 0 at the tokens that are drawn, and the clip."""
        import torch

        from learner.algorithms import covariance
        from learner.algorithms.policy_gradient import clip, group_level, policy_gradient
        from learner.algorithms.preset import Advantages, Passes

        of_group = group_level(self)

        def estimate(batch: ScoredBatch, rewards: Rewards, kept: Tensor) -> Advantages:
            made = of_group(batch, rewards, kept).advantages
            assert batch.proximal_logprobs is not None, "the preset asked for a pass of the policy"
            found = covariance.covariances(advantages=made, logprobs=batch.proximal_logprobs, counted=kept)
            drawn = covariance.drawn(
                found,
                low=self.covariance_low,
                high=self.covariance_high,
                share=self.covariance_share,
                counted=kept,
                seed=int(batch.token_ids.sum()),
            )
            share = float(drawn.sum()) / max(len(drawn), 1)
            return Advantages(advantages=torch.where(drawn, 0.0, made), means={"covariance_share": share})

        return policy_gradient(self, name=self.type, estimator=estimate, loss=clip(self), passes=Passes(proximal=True))
