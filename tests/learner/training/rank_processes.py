"""Two ranks of a script that starts itself once more."""

from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.rank_processes import some_ranks
from learner.training.ranks import CommandChannel, Ranks


@contextmanager
def two_ranks() -> Iterator[tuple[Ranks, CommandChannel]]:
    """This process's rank and its commands; at the end rank 1 must have ended well."""
    with some_ranks(2) as found:
        yield found
