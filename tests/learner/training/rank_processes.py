"""Two ranks of a script: it starts itself once more, and both meet in a process group."""

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


@contextmanager
def two_ranks() -> Iterator[tuple[Ranks, CommandChannel]]:
    """This process's rank and its commands; at the end rank 1 must have ended well."""
    die_with_parent()
    torch.set_num_threads(1)
    ranks, followers = ranks_from_environment(os.environ), None
    if ranks is None:
        followers = start_followers([sys.executable, *sys.argv], count=2)
        ranks = followers.ranks
    yield ranks, open_process_group(ranks, timeout_s=100, listener=followers.listener if followers else None)
    close_process_group()
    if followers is not None:
        followers.close(timeout_s=60)
        assert followers.failed() is None, "rank 1 failed"
