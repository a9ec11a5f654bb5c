"""Ranks of a script: it starts itself more than once, and all meet in a process group."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from learner.training.ranks import (
    CommandChannel,
    Ranks,
    close_process_group,
    die_with_parent,
    open_process_group,
    ranks_from_environment,
    start_followers,
)

_TO_MEET_S = 300
"""Of four ranks on a machine that does twenty other things, the last one comes minutes after the first."""


@contextmanager
def two_ranks() -> Iterator[tuple[Ranks, CommandChannel]]:
    """This process's rank and its commands; at the end rank 1 must have ended well."""
    with some_ranks(2) as found:
        yield found


@contextmanager
def some_ranks(count: int) -> Iterator[tuple[Ranks, CommandChannel]]:
    """As `two_ranks`, of so many."""
    die_with_parent()
    torch.set_num_threads(1)
    ranks, followers = ranks_from_environment(os.environ), None
    if ranks is None:
        followers = start_followers([sys.executable, *sys.argv], count=count)
        ranks = followers.ranks
    yield ranks, open_process_group(ranks, timeout_s=_TO_MEET_S, listener=followers.listener if followers else None)
    close_process_group()
    if followers is not None:
        followers.close(timeout_s=60)
        assert followers.failed() is None, "a rank failed"
