"""A lost rank is noticed and named. The ranks here are processes that do nothing; training is not needed for it."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import TCPStore

from learner.rank_group import Pulse, RankLost, RankWatch
from learner.training.ranks import CommandChannel, Followers, RankCommand, Ranks, start_followers
from services.process import START_AGAIN
from tests.process_ends import all_end

SLEEPS = "import time; time.sleep(60)"


@contextlib.contextmanager
def ranks(code: str = SLEEPS, *, count: int = 3) -> Iterator[Followers]:
    followers = start_followers([sys.executable, "-c", code], count=count)
    try:
        yield followers
    finally:
        followers.close(timeout_s=0)


def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))


async def forever() -> None:
    await asyncio.Event().wait()


async def test_a_rank_that_is_killed_is_named_and_the_others_end() -> None:
    with ranks() as followers, RankWatch(followers, silence_s=60) as watch:
        os.kill(followers.processes[1].pid, signal.SIGKILL)
        with pytest.raises(RankLost, match="rank 2 was killed by SIGKILL"):
            await watch.during(forever())
        assert all_end([child.pid for child in followers.processes])


async def test_the_rank_that_began_it_is_named_and_not_those_that_lost_it() -> None:
    with ranks(f"import os; os._exit({START_AGAIN} if os.environ['RANK'] == '1' else 3)") as followers:
        for child in followers.processes:
            child.wait()
        with RankWatch(followers, silence_s=60) as watch, pytest.raises(RankLost) as lost:
            await watch.during(forever())
    assert str(lost.value) == "rank 2 has ended with code 3; its own log says why"


async def test_a_rank_that_falls_silent_is_named_with_the_place_at_which_it_was_last() -> None:
    with ranks(count=2) as followers, RankWatch(followers, silence_s=0.5) as watch:
        commands = CommandChannel(store(), ranks=followers.ranks)
        watch.listen(commands)
        place = {"beat": 1, "place": "train_step 7, update 3, microbatch 1 of 2"}
        commands.another_store().set("pulse/1", json.dumps(place))
        silent = r"rank 1 is silent for \d s \(training.rank_silence_s is 0.5\); it was at: train_step 7, update 3, "
        with pytest.raises(RankLost, match=silent):
            await watch.during(forever())


async def test_a_rank_that_loads_its_model_has_the_time_of_a_collective_to_be_heard_again() -> None:
    with ranks(count=2) as followers, RankWatch(followers, silence_s=0.2, opening_s=1.0) as watch:
        commands = CommandChannel(store(), ranks=followers.ranks)
        watch.listen(commands)
        commands.another_store().set("pulse/1", json.dumps({"beat": 1, "place": commands.place}))
        silent = r"rank 1 is silent for \d s \(training.collective_timeout_s is 1\); it was at: opening"
        with pytest.raises(RankLost, match=silent):
            await watch.during(forever())


async def test_a_collective_that_fails_names_the_ranks_that_are_elsewhere() -> None:
    async def fail() -> None:
        raise RuntimeError("[gloo/transport/tcp] Timed out waiting 600000ms for recv operation to complete")

    with ranks(count=2) as followers, RankWatch(followers, silence_s=60) as watch:
        shared = store()
        commands, other = (CommandChannel(shared, ranks=Ranks(rank=rank, count=2)) for rank in (0, 1))
        watch.listen(commands)
        commands.send(RankCommand(action="train_step"))
        Pulse(other, rank=1)
        late = r"rank 0 is at: train_step 0; rank 1 is at: opening; .*Timed out waiting 600000ms"
        with pytest.raises(RankLost, match=late):
            await watch.during(fail())


async def test_other_errors_and_results_pass_as_they_are() -> None:
    async def answer(value: int) -> int:
        return value

    async def fail() -> None:
        raise RuntimeError("something else")

    with ranks(count=2) as followers, RankWatch(followers, silence_s=60) as watch:
        assert await watch.during(answer(5)) == 5
        with pytest.raises(RuntimeError, match="something else"):
            await watch.during(fail())
