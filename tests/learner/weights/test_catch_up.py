"""Generators that catch up: who tries again, and who is sent away."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest
import torch

from learner.weights.fleet import JoinRefused
from tests.learner.generators import DownloadLink, ScriptedGenerator
from tests.learner.weights.publishing import OPTIONS, learner, snapshot


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


async def test_a_download_that_fails_is_tried_again() -> None:
    left = ["pull", "pull", "commit"]
    async with ScriptedGenerator("a").running() as a, learner() as ours:
        a.refuses = lambda at: at in left and not left.remove(at)  # type: ignore[func-returns-value]
        ours.join(a)
        await ours.publish(0, a)
        assert len(a.pulls) == 4


async def test_failures_in_a_row_expel_the_generator_by_name_and_the_others_go_on() -> None:
    async with ScriptedGenerator("a").running() as a, ScriptedGenerator("b").running() as b, learner() as ours:
        a.refuses = lambda at: at == "pull"
        ours.join(a, b)
        await ours.publish(0, b)
        await ours.until(lambda: [member.generator_id for member in ours.fleet.members()] == ["b"])
        text = "generator a was expelled: it failed 5 times in a row to catch up, .*it does not want to"
        with pytest.raises(JoinRefused, match=text) as refusal:
            ours.join(a)
        assert refusal.value.kind == "expelled"
        a.refuses = lambda _: False
        a.restart()
        ours.join(a)
        await ours.until_served(a=0, b=0)


async def test_a_generator_that_is_gone_while_it_downloads_may_announce_itself_again() -> None:
    async with ScriptedGenerator("a").running() as a, learner() as ours:
        ours.join(a)
        await ours.publish(0, a)
    async with learner() as ours:
        ours.join(a)
        ours.publisher.offer(snapshot(0))
        await ours.until(lambda: not ours.fleet.members())
        async with a.running():
            ours.join(a)
            await ours.until_served(a=0)


async def test_generators_that_all_join_at_once_over_a_slow_link_all_serve_and_none_is_expelled() -> None:
    """As at every restart of the learner."""
    link = DownloadLink(most=1)
    names = [ScriptedGenerator(f"g{number}", link=link) for number in range(8)]
    async with AsyncExitStack() as stack:
        for generator in names:
            await stack.enter_async_context(generator.running())
        ours = await stack.enter_async_context(learner())
        ours.join(*names)
        await ours.publish(0, *names)
        assert link.largest <= 4
        assert sorted(report.generator_id for report in ours.joined) == sorted(generator.name for generator in names)


async def test_who_was_too_slow_beside_others_has_not_failed_by_itself() -> None:
    """With one failure that is borne, none may be counted."""
    well, link = ScriptedGenerator("a"), DownloadLink(most=1)
    names = [ScriptedGenerator(name, link=link) for name in "bcd"]
    async with AsyncExitStack() as stack:
        for generator in (well, *names):
            await stack.enter_async_context(generator.running())
        ours = await stack.enter_async_context(learner(replace(OPTIONS, pull_attempts=1)))
        ours.join(well)
        await ours.publish(0, well)
        ours.join(*names)
        await ours.until(lambda: len(ours.serving) == 4 or ours.fleet.expulsions > 0)
        assert ours.fleet.expulsions == 0
        assert link.largest > 1, "they were slow together"


async def test_after_downloads_that_were_too_slow_together_fewer_go_on_at_once() -> None:
    """Else a link that is too slow for four of them would serve nobody, and more time would be no help either."""
    link = DownloadLink(most=2)
    names = [ScriptedGenerator(f"g{number}", link=link) for number in range(4)]
    async with AsyncExitStack() as stack:
        for generator in names:
            await stack.enter_async_context(generator.running())
        ours = await stack.enter_async_context(learner(replace(OPTIONS, parallel_pulls=4)))
        ours.publisher.offer(snapshot(0))
        ours.join(*names)
        await ours.until(lambda: len(ours.serving) == 4)
        assert link.largest == 4
        assert link.downloads <= 4 + 4 + 2, "four at once, then two by two, of which one may meet a third"


async def test_who_says_that_it_takes_nothing_now_has_not_failed() -> None:
    """As one whose engine does not answer for a while: it is asked again for as long as that takes."""
    async with ScriptedGenerator("a").running() as a, ScriptedGenerator("b").running() as b, learner() as ours:
        ours.join(b)
        await ours.publish(0, b)
        a.stalls = lambda step: step == "pull" and len(a.pulls) < 3 * OPTIONS.pull_attempts
        ours.join(a)
        await ours.until(lambda: len(ours.serving) == 2 or ours.fleet.expulsions > 0)
        assert ours.fleet.expulsions == 0
        assert len(a.pulls) == 3 * OPTIONS.pull_attempts


async def test_those_that_wait_for_their_download_are_taken_by_the_next_broadcast() -> None:
    names = [ScriptedGenerator(f"g{number}") for number in range(6)]
    async with AsyncExitStack() as stack:
        for generator in names:
            await stack.enter_async_context(generator.running())
        ours = await stack.enter_async_context(learner(replace(OPTIONS, parallel_pulls=1)))
        ours.join(names[0])
        await ours.publish(0, names[0])
        names[1].hold["pull"] = asyncio.Event()
        ours.join(*names[1:])
        ours.publisher.offer(snapshot(1))
        await ours.until(lambda: len(ours.serving) == 5)
        assert all(generator.pulls == [] for generator in names[2:])
        names[1].hold.pop("pull").set()
        await ours.until_served(**{generator.name: 1 for generator in names})


async def test_a_generator_that_fails_when_it_is_broadcast_to_while_it_joins_downloads_in_its_turn() -> None:
    names = [ScriptedGenerator(f"g{number}") for number in range(3)]
    async with AsyncExitStack() as stack:
        for generator in names:
            await stack.enter_async_context(generator.running())
        ours = await stack.enter_async_context(learner(replace(OPTIONS, parallel_pulls=1)))
        names[2].refuses = lambda step: step == "group"
        ours.join(*names)
        await ours.publish(0, *names)
        assert names[2].pulls == ["1.0"]


async def test_a_failure_to_catch_up_that_all_share_expels_nobody() -> None:
    """A full disk on all of them, for example: it is tried again until it is mended."""
    names = [ScriptedGenerator(name, refuses=lambda step: step != "commit") for name in "ab"]
    async with names[0].running() as a, names[1].running() as b, learner() as ours:
        ours.join(a, b)
        ours.publisher.offer(snapshot(0))
        await ours.until(lambda: len(a.pulls) > 6 and len(b.pulls) > 6)
        assert len(ours.fleet.members()) == 2
        for generator in names:
            generator.refuses = lambda _: False
        await ours.until_served(a=0, b=0)


async def test_one_that_is_too_slow_by_itself_gets_more_time_and_leaves_in_the_end() -> None:
    slow, well = ScriptedGenerator("a", link=DownloadLink(most=0)), ScriptedGenerator("b")
    async with slow.running() as a, well.running() as b, learner(replace(OPTIONS, parallel_pulls=1)) as ours:
        ours.join(b)
        await ours.publish(0, b)
        ours.join(a)
        await ours.until(lambda: len(ours.fleet.members()) == 1)
        assert [limit / a.limits[0] for limit in a.limits] == [1, 2, 4, 8, 8]


async def test_a_download_by_one_that_has_left_gives_its_place_to_the_next() -> None:
    hung = ScriptedGenerator("a", hold={"pull": asyncio.Event()})
    next_one = ScriptedGenerator("b", refuses=lambda step: step == "group")
    async with hung.running() as a, next_one.running() as b, learner(replace(OPTIONS, parallel_pulls=1)) as ours:
        ours.join(a)
        ours.publisher.offer(snapshot(0))
        await ours.until(lambda: bool(a.pulls))
        ours.join(b)
        ours.fleet.lost("a")
        await ours.until_served(b=0)


async def test_a_hung_download_holds_up_nobody() -> None:
    async with ScriptedGenerator("a").running() as a, ScriptedGenerator("b").running() as b, learner() as ours:
        a.hold["pull"] = asyncio.Event()
        ours.join(a, b)
        for version in range(3):
            await ours.publish(version, b)
        a.hold.pop("pull").set()
        await ours.until_served(a=2, b=2)
