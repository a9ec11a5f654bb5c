"""Generators that catch up: who tries again, and who is sent away."""

import asyncio

import pytest
import torch

from learner.weights.fleet import JoinRefused
from tests.learner.generators import ScriptedGenerator
from tests.learner.weights.publishing import learner, snapshot


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


async def test_a_hung_download_holds_up_nobody() -> None:
    async with ScriptedGenerator("a").running() as a, ScriptedGenerator("b").running() as b, learner() as ours:
        a.hold["pull"] = asyncio.Event()
        ours.join(a, b)
        for version in range(3):
            await ours.publish(version, b)
        a.hold.pop("pull").set()
        await ours.until_served(a=2, b=2)
