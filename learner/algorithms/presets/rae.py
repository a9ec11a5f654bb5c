"""RAE: REINFORCE with a running baseline of each player of each environment."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from learner.algorithms.algorithm import Algorithm
from learner.algorithms.knobs import SignedRatioCapKnobs, StreamedKnobs

if TYPE_CHECKING:
    from torch import Tensor

    from learner.algorithms.preset import Advantages, Preset, Rewards, ScoredBatch


class RaeConfig(Algorithm, StreamedKnobs, SignedRatioCapKnobs):
    """REINFORCE whose baseline is a running mean of what the policy got as this player of this environment.

    Source: role-conditioned advantage estimation of SPIRAL, arXiv 2506.24119; here a truncated ratio to the behavior
    policy corrects stale tokens.
    """

    unclipped: ClassVar[bool] = True

    type: Literal["rae"] = "rae"
    baseline_decay: float = Field(
        0.95,
        ge=0,
        lt=1,
        description="What a trajectory leaves of its role's baseline; the rest is its reward. 0.95 remembers about 20.",
    )

    @property
    def compares_in_group(self) -> bool:
        return False

    @property
    def once_only(self) -> str:
        return "the running baselines of algo rae would count a group's rewards again"

    def preset(self) -> Preset:
        """The reward less its role's running mean, and a capped ratio."""
        import torch

        from learner.algorithms.policy_gradient import policy_gradient, reinforce
        from learner.algorithms.preset import Advantages
        from learner.algorithms.role_baselines import by_role

        def estimate(batch: ScoredBatch, rewards: Rewards, kept: Tensor) -> Advantages:
            roles = torch.zeros_like(batch.groups) if batch.roles is None else batch.roles
            made = by_role(
                rewards=rewards.with_tokens(batch),
                roles=roles,
                baselines=batch.carried.baselines,
                decay=self.baseline_decay,
            )
            known = made.baselines.values()
            return Advantages(
                advantages=made.advantages[batch.sequences],
                means={"role_baseline_gap": max(known, default=0.0) - min(known, default=0.0)},
                carried=replace(batch.carried, baselines=made.baselines),
            )

        return policy_gradient(self, name=self.type, estimator=estimate, loss=reinforce(self), to_behavior=True)
