"""Advantages in trees, by numbers worked by hand."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from learner.algorithms.advantages import group
from learner.algorithms.branches import by_branch
from learner.algorithms.knobs import AdvantageScale


@dataclass(frozen=True)
class Leaf:
    """A trajectory: its reward, and the branch of each of its turns, of one token."""

    reward: float
    branches: tuple[int, ...]
    group: int = 0


def advantages(
    leaves: Sequence[Leaf], *, scale: AdvantageScale = "none", whole_tree: float = 0.0, leaf_power: float = 0.0
) -> list[list[float]]:
    """Of each trajectory, those of its turns."""
    lengths = [len(leaf.branches) for leaf in leaves]
    found = by_branch(
        rewards=torch.tensor([leaf.reward for leaf in leaves], dtype=torch.float64),
        groups=torch.tensor([leaf.group for leaf in leaves]),
        sequences=torch.arange(len(leaves)).repeat_interleave(torch.tensor(lengths)),
        turns=torch.arange(sum(lengths)),
        turn_branches=torch.tensor([branch for leaf in leaves for branch in leaf.branches]),
        scale=scale,
        whole_tree=whole_tree,
        leaf_power=leaf_power,
    )
    return [part.tolist() for part in torch.split(found, lengths)]


# Two beginnings, 1 and 2, that branch once: V(1) = 1/2, V(2) = 1, and of the tree 3/4.
TWICE_TWO = (Leaf(1.0, (1, 11)), Leaf(0.0, (1, 12)), Leaf(1.0, (2, 21)), Leaf(1.0, (2, 22, 22)))


def test_each_part_of_a_way_is_compared_with_its_siblings() -> None:
    assert advantages(TWICE_TWO) == [[-0.25, 0.5], [-0.25, -0.5], [0.25, 0.0], [0.25, 0.0, 0.0]]


def test_the_parts_of_a_way_add_up_to_what_it_is_above_the_mean() -> None:
    for leaf, found in zip(TWICE_TWO, advantages(TWICE_TWO), strict=True):
        assert sum(found) == leaf.reward - 0.75


def test_the_whole_tree_counts_beside_the_siblings() -> None:
    # V - V(tree) is -1/4, 1/4, -3/4 for beginning 1 and its leaves; 1/4 for all of beginning 2.
    found = advantages(TWICE_TWO, whole_tree=1.0)
    assert found == [[-0.5, 0.75], [-0.5, -1.25], [0.5, 0.25], [0.5, 0.25, 0.25]]
    assert advantages(TWICE_TWO, whole_tree=2.0)[0] == [-0.75, 1.0]


def test_what_is_shared_weighs_less_by_a_power_of_its_leaves() -> None:
    # Both beginnings have two leaves; a leaf has itself.
    assert advantages(TWICE_TWO, leaf_power=1.0)[0] == [-0.125, 0.5]
    assert advantages(TWICE_TWO, leaf_power=0.5)[0] == pytest.approx([-0.25 / 2**0.5, 0.5])


def test_the_deviation_is_that_of_the_leaves_of_the_task() -> None:
    # Of 1, 0, 1, 1: mean 3/4, squares 3 x 1/16 + 9/16 = 3/4, over 3: 1/4, so 1/2.
    expected = torch.tensor([-0.25, 0.5]) / (0.5 + 1e-6)
    assert advantages(TWICE_TWO, scale="std")[0] == pytest.approx(expected.tolist())
    assert advantages(TWICE_TWO, scale="mean")[0] == pytest.approx([-0.25 / 0.750001, 0.5 / 0.750001])


def test_a_trajectory_that_was_over_before_the_fork_counts_as_much_as_the_branches_of_another() -> None:
    # Beginning 1 ended with 1, beginning 2 branched into 0 and 1: V(2) = 1/2, of the tree 3/4. Of three leaves the
    # first has half of the tree, 3/2 of what a leaf has on average, the others a quarter each, 3/4.
    found = advantages((Leaf(1.0, (1,)), Leaf(0.0, (2, 21)), Leaf(1.0, (2, 22))))
    assert found == [[0.25 * 1.5], [-0.25 * 0.75, -0.5 * 0.75], [-0.25 * 0.75, 0.5 * 0.75]]


def test_a_branch_that_was_cut_off_before_its_own_turn_is_a_way_of_the_fork() -> None:
    # Its reward, 0, is that of one of two ways: V(1) = 1/2. Nothing of its own is trained.
    found = advantages((Leaf(0.0, (1,)), Leaf(1.0, (1, 12)), Leaf(1.0, (2, 21)), Leaf(1.0, (2, 22))))
    assert found == [[-0.25], [-0.25, 0.5], [0.25, 0.0], [0.25, 0.0]]


def test_a_way_that_forked_more_often_counts_once_among_its_siblings() -> None:
    # Beginning 1: 0 and (1, 1, 1); its value is 1/2, not 3/4.
    leaves = (Leaf(0.0, (1, 11)), *(Leaf(1.0, (1, 12, 120 + number)) for number in range(3)), Leaf(0.5, (2,)))
    found = advantages(leaves)
    # Shares of the tree: 1/4, three times 1/12, 1/2; times 5 leaves.
    assert found[0] == pytest.approx([0.0, -0.5 * 5 / 4])
    assert found[1] == pytest.approx([0.0, 0.5 * 5 / 12, 0.0])
    assert found[4] == [0.0]


def test_equal_rewards_give_exactly_nothing() -> None:
    leaves = [replace(leaf, reward=0.1) for leaf in TWICE_TWO] + [Leaf(0.1, (2, 23))]
    assert all(value == 0.0 for part in advantages(leaves, whole_tree=1.0) for value in part)


def test_groups_are_trees_of_their_own() -> None:
    both = (*TWICE_TWO, *(replace(leaf, group=1, reward=leaf.reward * 2) for leaf in TWICE_TWO))
    found = advantages(both)
    assert found[:4] == advantages(TWICE_TWO)
    assert found[4:] == [[2 * value for value in part] for part in advantages(TWICE_TWO)]


@pytest.mark.parametrize("scale", ["none", "std", "mean", "batch"])
def test_without_forks_it_is_the_advantage_of_the_group(scale: AdvantageScale) -> None:
    chance = random.Random(3)
    leaves = [Leaf(chance.random(), (number, number), group=number % 3) for number in range(12)]
    rewards = torch.tensor([leaf.reward for leaf in leaves], dtype=torch.float64)
    of_group = group(rewards=rewards, groups=torch.tensor([leaf.group for leaf in leaves]), scale=scale)
    assert [part[0] for part in advantages(leaves, scale=scale)] == pytest.approx(of_group.tolist(), rel=1e-12)
    assert [part[1] for part in advantages(leaves, scale=scale)] == pytest.approx(of_group.tolist(), rel=1e-12)


def test_no_order_of_the_trajectories_changes_a_bit() -> None:
    chance = random.Random(5)
    leaves = [Leaf(chance.random(), (number // 3, 10 + number), group=number // 6) for number in range(18)]
    before = dict(zip(leaves, advantages(leaves, scale="std", whole_tree=0.3, leaf_power=0.5), strict=True))
    chance.shuffle(leaves)
    after = dict(zip(leaves, advantages(leaves, scale="std", whole_tree=0.3, leaf_power=0.5), strict=True))
    assert before == after


def test_copies_of_what_is_shared_add_up_to_an_unbiased_gradient() -> None:
    # A policy of one bit at each of two turns: the tree's mean gradient of log p times the advantages, over many trees,
    # is the gradient of the mean reward, however unevenly the ways fork.
    chance = random.Random(1)
    first, second, trees = 0.3, 0.6, 1500
    worth = {(0,): 0.5, (1, 0): 0.0, (1, 1): 1.0}
    leaves: list[Leaf] = []
    ways: list[tuple[int, ...]] = []
    for tree in range(trees):
        for stem in range(2):
            one = int(chance.random() < first)
            for branch in range(2 if one else 1):  # after a 0 it is over
                way: tuple[int, ...] = (one, int(chance.random() < second)) if one else (one,)
                leaves.append(Leaf(worth[way], (stem, 10 + 2 * stem + branch)[: len(way)], group=tree))
                ways.append(way)
    sizes = Counter(leaf.group for leaf in leaves)
    sums = [0.0, 0.0]
    for leaf, way, found in zip(leaves, ways, advantages(leaves), strict=True):
        for turn, (bit, advantage) in enumerate(zip(way, found, strict=True)):
            # d log p / d logit is bit - p.
            sums[turn] += advantage * (bit - (first, second)[turn]) / sizes[leaf.group]
    # J = 0.5 (1 - a) + a b; centring with siblings of a fork of two leaves a half of each: 1 - 1/2.
    expected = [first * (1 - first) * (second - 0.5) / 2, first * second * (1 - second) / 2]
    assert [total / trees for total in sums] == pytest.approx(expected, abs=0.012)
