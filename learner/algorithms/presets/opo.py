"""OPO: REINFORCE with a baseline weighted by lengths."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from learner.algorithms.algorithm import Algorithm
from learner.algorithms.knobs import SignedRatioCapKnobs, StreamedKnobs

if TYPE_CHECKING:
    from torch import Tensor

    from learner.algorithms.preset import Preset, ScoredBatch


class OpoConfig(Algorithm, StreamedKnobs, SignedRatioCapKnobs):
    """REINFORCE whose baseline weighs the rewards of the group by the lengths of their trajectories.

    Source: on-policy RL with optimal reward baseline, arXiv 2505.23585, which trains on fresh samples alone; here a
    truncated ratio to the behavior policy corrects stale ones.
    """

    of_groups: ClassVar[bool] = True
    unclipped: ClassVar[bool] = True

    type: Literal["opo"] = "opo"

    def preset(self) -> Preset:
        """The group's mean by tokens as baseline, and a capped ratio."""
        import torch

        from learner.algorithms import advantages
        from learner.algorithms.policy_gradient import policy_gradient, reinforce, trajectory_level

        def estimate(batch: ScoredBatch, rewards: Tensor) -> Tensor:
            lengths = torch.bincount(batch.sequences, minlength=len(rewards))
            return advantages.length_weighted(rewards=rewards, groups=batch.groups, lengths=lengths)

        return policy_gradient(
            self,
            name=self.type,
            estimator=trajectory_level(estimate),
            loss=reinforce(self),
            to_behavior=True,
        )
