import errno
import logging
import os
from types import SimpleNamespace
from typing import cast

import pytest

from learner.training.ranks import RankCommand, Ranks
from learner.training.shared_copies import CopyOrder, spread
from learner.training.trainer import Trainer


def test_weights_are_spread_evenly_and_alike_on_every_rank() -> None:
    sizes = {"embedding": 900, **{f"layer{number}": 100 + number for number in range(40)}}
    owners = spread(sizes, 4)
    assert owners == spread(dict(reversed(sizes.items())), 4)
    loads = [sum(size for name, size in sizes.items() if owners[name] == rank) for rank in range(4)]
    assert max(loads) - min(loads) <= min(sizes.values())
    assert set(spread(sizes, 1).values()) == {0}


def test_an_order_is_told_to_the_other_ranks_as_it_is() -> None:
    order = CopyOrder(part="base", bucket_bytes=8, shared=True, number=3, wanted=[1, 2])
    assert CopyOrder.from_text(order.to_text()) == order


def test_an_error_of_a_copy_ends_the_rank_that_has_it_and_a_full_disk_that_all_have_does_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(_: RankCommand) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    told = iter([RankCommand(action="save", path="there"), RankCommand(action="host_copy", path="{}")])
    rank = SimpleNamespace(
        _commands=SimpleNamespace(receive=told.__next__), _obey=refuse, _ranks=Ranks(rank=1, count=2)
    )
    with pytest.raises(OSError, match="Too many open files"):
        Trainer.follow(cast("Trainer", rank))
    assert [(line.levelno, line.message) for line in caplog.records] == [
        (logging.WARNING, "rank 1: save of there: [Errno 24] Too many open files"),
        (logging.ERROR, "rank 1 ends, since host_copy failed on it alone: [Errno 24] Too many open files"),
    ]
