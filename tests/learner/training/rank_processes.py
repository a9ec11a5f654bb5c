"""Ranks of a script: forked from it once it has imported everything, or two that start it each for itself."""

import gc
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from benchmarks.rank_processes import some_ranks
from learner.command import keep_freed_memory
from learner.training.ranks import CommandChannel, Ranks, close_process_group, die_with_parent, open_process_group
from services.network import LOOPBACK

_TO_MEET_S = 300


@contextmanager
def two_started_ranks() -> Iterator[tuple[Ranks, CommandChannel]]:
    """This process's rank and its commands, of two that a learner would start so, whose sets have orders of their own.

    At the end rank 1 must have ended well.
    """
    with some_ranks(2) as found:
        yield found


@contextmanager
def two_ranks() -> Iterator[tuple[Ranks, CommandChannel]]:
    """As `forked_ranks`."""
    with forked_ranks(2) as found:
        yield found


@contextmanager
def forked_ranks(count: int) -> Iterator[tuple[Ranks, CommandChannel]]:
    """This process's rank, with one thread, and its commands: the body runs in `count` processes.

    To be called before torch has computed anything, which begins threads. At the end the other ranks must have ended
    well. It saves their imports, which take longer than most of what is done in them.
    """
    keep_freed_memory()
    torch.set_num_threads(1)
    gc.freeze()
    os.environ["HEADWAY_PARENT"] = str(os.getpid())
    rank, children = 0, list[int]()
    with socket.create_server((LOOPBACK, 0)) as listener:
        port: int = listener.getsockname()[1]
        while rank == 0 and len(children) < count - 1:
            child = os.fork()
            if child:
                children.append(child)
            else:
                rank, children = len(children) + 1, []
                listener.close()
                die_with_parent()
        ranks = Ranks(rank=rank, count=count, local_rank=rank, port=port, on_host=count)
        yield ranks, open_process_group(ranks, timeout_s=_TO_MEET_S, listener=listener if ranks.leads else None)
        close_process_group()
    for child in children:
        ended, status = os.waitpid(child, 0)
        assert status == 0, f"process {ended}, a rank, failed: {os.waitstatus_to_exitcode(status)}"
