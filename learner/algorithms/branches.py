"""Advantages in trees: groups whose trajectories share their beginnings, each part of a way against its siblings."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from learner.algorithms.advantages import divisors
from learner.algorithms.knobs import AdvantageScale


@dataclass
class _Node:
    """A part of the ways through a tree, between two forks; of a tree the first one is what all have been given.

    `ends` are the rewards of trajectories that end in it.
    """

    parent: _Node | None = None
    children: dict[Hashable, _Node] = field(default_factory=dict)
    ends: list[float] = field(default_factory=list)
    value: float = 0.0
    leaves: int = 0

    @property
    def ways(self) -> int:
        """Number of ways in which it goes on; a trajectory that ends in it is one."""
        return len(self.children) + len(self.ends)

    def weigh(self) -> None:
        """Set value and leaves, of all nodes below, too."""
        for child in self.children.values():
            child.weigh()
        self.value = _mean([*(child.value for child in self.children.values()), *self.ends])
        self.leaves = sum(child.leaves for child in self.children.values()) + len(self.ends)

    @property
    def probability(self) -> float:
        """The part of the tree that goes this way, each fork's ways alike."""
        return 1.0 if self.parent is None else self.parent.probability / self.parent.ways


def by_branch(
    *,
    rewards: Tensor,
    groups: Tensor,
    sequences: Tensor,
    turns: Tensor,
    turn_branches: Tensor,
    scale: AdvantageScale,
    whole_tree: float,
    leaf_power: float,
) -> Tensor:
    """((V - V of its parent) + whole_tree (V - V of its tree)) / d / L^leaf_power of each token's part of the way, [M].

    The trajectories of a group are the leaves of a tree. A part of a way lies between two forks: tokens of equal
    `turn_branches` [T int64, by turn], which several trajectories share where they were sampled once. Its value V is
    the reward of a leaf, and else the mean over the ways in which it goes on, each of them counted once, however many
    leaves it has: an estimate of what the policy gets from there on. L is the number of its leaves, and d as in
    `advantages.group`. Without forks, and without `whole_tree`, this is `advantages.group`.

    A trajectory's tokens are multiplied by its share of the tree, the product of 1 / ways over the forks on its way,
    times the number of leaves: 1 where all ways fork alike. So a trajectory that was over before a fork counts as much
    as the branches together that it would have had. Arguments as in `advantages.step_group`. Sources: TreeRL (arXiv
    2506.11902), whose V is the mean over leaves; means over the ways: TreeRPO (arXiv 2506.05183).
    """
    acted, of_token = torch.unique(turns, return_inverse=True)
    owners = torch.zeros_like(acted).scatter_(0, of_token, sequences).tolist()
    trees: dict[int, _Node] = {number: _Node() for number in set(groups.tolist())}
    ends = [trees[number] for number in groups.tolist()]
    nodes: list[_Node] = []
    names: list[int | None] = [None] * len(ends)
    for owner, branch in zip(owners, turn_branches[acted].tolist(), strict=True):
        if names[owner] != branch:
            at = ends[owner]
            ends[owner], names[owner] = at.children.setdefault(branch, _Node(at)), branch
        nodes.append(ends[owner])
    for end, reward in zip(ends, rewards.tolist(), strict=True):
        end.ends.append(reward)
    for tree in trees.values():
        tree.weigh()
    gains = rewards.new_tensor([_gain(node, whole_tree=whole_tree, leaf_power=leaf_power) for node in nodes])
    of_group = [trees[number] for number in groups.tolist()]
    weights = rewards.new_tensor(_weights(ends, of_group)) / divisors(rewards=rewards, groups=groups, scale=scale)
    return gains[of_token] * weights[sequences]


def _gain(node: _Node, *, whole_tree: float, leaf_power: float) -> float:
    tree = node
    while tree.parent is not None:
        tree = tree.parent
    assert node.parent is not None, "a token is sampled behind what all have been given"
    gain = node.value - node.parent.value + whole_tree * (node.value - tree.value)
    return gain / math.pow(node.leaves, leaf_power)


def _weights(ends: Sequence[_Node], trees: Iterable[_Node]) -> list[float]:
    """The share of each trajectory in its tree, times the tree's leaves."""
    return [tree.leaves * end.probability / end.ways for end, tree in zip(ends, trees, strict=True)]


def _mean(values: Sequence[float]) -> float:
    """The same for every order of the values, and exactly the value where all are equal."""
    if min(values) == max(values):
        return values[0]
    return math.fsum(values) / len(values)
