"""Groups that branch: conversations that share their beginning.

    branch_after = (1,), branch_width = 2, and a group of 4

    opening ─┬─ turn 1 ─┬─ turn 2 ─ …        a leaf: a trajectory with all that is before it
             │          └─ turn 2 ─ …
             └─ turn 1 ─┬─ turn 2 ─ …
                        └─ turn 2 ─ …

The environment is forked where a conversation branches, and each branch is a conversation like others from there on.
Its record has the tokens of its beginning as they were sampled, with their logprobs and versions, and says at which
place it went which way.

A conversation that is over before it branches stays one leaf, and its group is that much smaller. Fresh ones in its
place would be there the more often the shorter a conversation is; who learns from the tree weighs its leaves instead.
"""

from collections.abc import Awaitable, Callable, Sequence

from env_service.environments.interface import Environment
from env_service.environments.rules import Rules
from protocol.trajectories import Purpose

ForkEnvironment = Callable[[Environment], Awaitable[Environment]]
"""Makes a second environment that stands where the given one does, and sees to it that it is closed."""


def shares(leaves: int, ways: int) -> list[int]:
    """`leaves` dealt out over at most so many ways, each at least one, as evenly as can be."""
    ways = min(ways, leaves)
    each, more = divmod(leaves, ways)
    return [each + (way < more) for way in range(ways)]


def beginnings(rules: Rules, *, group_size: int, purpose: Purpose) -> list[int]:
    """The leaves of each conversation that a group begins with. An evaluation branches nowhere: its answers are to be
    independent of each other.
    """
    if purpose != "train" or not rules.branch_after:
        return [1] * group_size
    of_one = rules.branch_width ** len(rules.branch_after)
    return shares(group_size, -(-group_size // of_one))


def firsts(leaves: Sequence[int]) -> list[int]:
    """The number of the first leaf of each."""
    return [sum(leaves[:number]) for number in range(len(leaves))]
