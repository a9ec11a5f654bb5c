"""Ranks of a script: it starts itself more than once, and all meet in a process group."""

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from learner.command import keep_freed_memory
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
def some_ranks(count: int) -> Iterator[tuple[Ranks, CommandChannel]]:
    """This process's rank, with one thread, and its commands; at the end the other ranks must have ended well.

    As in a learner, what is imported by now is no garbage: DeepSpeed looks for some several times an engine.
    """
    die_with_parent()
    keep_freed_memory()
    gc.freeze()
    torch.set_num_threads(1)
    ranks, followers = ranks_from_environment(os.environ), None
    if ranks is None:
        followers = start_followers([sys.executable, *sys.orig_argv[1:]], count=count)
        ranks = followers.ranks
    yield ranks, open_process_group(ranks, timeout_s=_TO_MEET_S, listener=followers.listener if followers else None)
    close_process_group()
    if followers is not None:
        followers.close(timeout_s=60)
        assert followers.failed() is None, "a rank failed"
