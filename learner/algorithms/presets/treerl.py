"""TreeRL: groups that branch, each part of a way against its siblings."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from learner.algorithms.algorithm import ClippedGroupAlgorithm
from learner.algorithms.knobs import AdvantageScale, ScaleKnobs

if TYPE_CHECKING:
    from torch import Tensor

    from learner.algorithms.preset import Advantages, Preset, Rewards, ScoredBatch


class TreerlConfig(ClippedGroupAlgorithm):
    """Tree rollouts: what lies between two forks is compared with what else was tried there, and with the whole tree.

    Groups branch by the rules of their environment, branch_after. Sources: TreeRL (arXiv 2506.11902) for the
    advantages, here under grpo's clip; TreeRPO (arXiv 2506.05183) for values that are means over the ways of a fork.
    """

    type: Literal["treerl"] = "treerl"
    advantage_scale: AdvantageScale = ScaleKnobs.field("none")
    whole_tree: float = Field(
        1.0,
        ge=0,
        description="Weight of the difference to the whole tree's value, beside that to the parent's, which counts 1. "
        "0: siblings alone are compared.",
    )
    leaf_power: float = Field(
        0.5,
        ge=0,
        le=1,
        description="What several trajectories share is trained in each of them, with advantages divided by this power "
        "of their number. 0: it weighs as much as all of them; 1: as much as one.",
    )

    @property
    def whole_only(self) -> str:
        """A part of the tree without tokens would not be compared with its siblings."""
        return "algo treerl compares the parts of a tree, and those whose tokens are too old would not be in it"

    def preset(self) -> Preset:
        """The advantage of each part of a way; the clip."""
        import torch

        from learner.algorithms.branches import by_branch
        from learner.algorithms.policy_gradient import clip, policy_gradient
        from learner.algorithms.preset import Advantages

        def estimate(batch: ScoredBatch, rewards: Rewards, kept: Tensor) -> Advantages:
            branches = batch.turn_branches
            if branches is None:  # each trajectory is a way of its own
                branches = torch.zeros_like(batch.turn_states).scatter_(0, batch.turns, batch.sequences)
            return Advantages(
                advantages=by_branch(
                    rewards=rewards.with_tokens(batch),
                    groups=batch.groups,
                    sequences=batch.sequences,
                    turns=batch.turns,
                    turn_branches=branches,
                    scale=self.advantage_scale,
                    whole_tree=self.whole_tree,
                    leaf_power=self.leaf_power,
                )
            )

        made = policy_gradient(self, name=self.type, estimator=estimate, loss=clip(self))
        return replace(made, whole_trajectories=True)
