"""VCPO: REINFORCE with two controls of the variance that stale trajectories bring."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from learner.algorithms.algorithm import Algorithm
from learner.algorithms.knobs import StreamedKnobs

if TYPE_CHECKING:
    from torch import Tensor

    from learner.algorithms.policy_loss import PolicyLoss
    from learner.algorithms.preset import Advantages, LossTokens, Preset, Rewards, ScoredBatch

StepScale = Literal["sqrt", "linear", "none"]


class VcpoConfig(Algorithm, StreamedKnobs):
    """REINFORCE by the ratio of whole trajectories, with the group's baseline of least variance, and with smaller
    steps where few trajectories outweigh the others.

    Source: variance controlled policy optimization, arXiv 2602.17616. Its authors take norms of the gradients of all
    weights, from a backward pass for each trajectory alone; here they are those with respect to the logits, summed over
    the trajectory, which a forward pass gives.
    """

    type: Literal["vcpo"] = "vcpo"
    ratio_cap: float | None = Field(
        8.0, gt=0, description="Upper bound of the trajectory's ratio to the behavior policy. none: no bound"
    )
    advantage_scale: Literal["std", "none"] = Field(
        "std",
        description="What a reward less its baseline is divided by: the standard deviation of the group, or nothing.",
    )
    step_scale: StepScale = Field(
        "sqrt",
        description="How the learning rate of a step falls with the effective share of its trajectories, (sum W)^2 / "
        "(n sum W^2): with its square root, with itself, or not.",
    )

    def preset(self) -> Preset:
        """The baseline of least variance, one capped ratio for the trajectory, and the step's scale."""
        import torch

        from learner.algorithms import advantages, ratios
        from learner.algorithms.policy_gradient import policy_gradient
        from learner.algorithms.policy_loss import sequence_reinforce
        from learner.algorithms.preset import Advantages, Passes

        def estimate(batch: ScoredBatch, rewards: Rewards, kept: Tensor) -> Advantages:
            assert batch.proximal_logprobs is not None, "the pass of logit_norms gives the policy's logprobs, too"
            assert batch.logit_norms is not None, "the preset asked for a pass of logit_norms"
            whole, count = rewards.with_tokens(batch), len(rewards.of_trajectories)
            gaps = ratios.log_gap(numerator=batch.proximal_logprobs, denominator=batch.behavior_logprobs)
            log_ratios = ratios.sequence_sums(values=gaps, sequences=batch.sequences, count=count)
            made = advantages.least_variance(
                rewards=whole,
                groups=batch.groups,
                log_ratios=log_ratios,
                norms=ratios.sequence_sums(values=batch.logit_norms, sequences=batch.sequences, count=count),
                scale=self.advantage_scale,
            )
            counted = torch.ones_like(batch.truncated) if batch.mismatched is None else ~batch.mismatched
            share = ratios.effective_share(log_ratios[counted])
            scale = {"sqrt": share**0.5, "linear": share, "none": 1.0}[self.step_scale]
            return Advantages(
                advantages=made[batch.sequences], step_scale=scale, means={"effective_trajectory_share": share}
            )

        def loss(tokens: LossTokens) -> PolicyLoss:
            return sequence_reinforce(
                policy_logprobs=tokens.policy_logprobs,
                behavior_logprobs=tokens.behavior_logprobs,
                advantages=tokens.advantages,
                sequences=tokens.sequences,
                count=len(tokens.sequence_weights),
                cap=self.ratio_cap,
            )

        return policy_gradient(
            self, name=self.type, estimator=estimate, loss=loss, passes=Passes(logit_norms=True), to_behavior=True
        )
