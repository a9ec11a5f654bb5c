"""Generators that serve something else than they were sent are expelled by name, and the run goes on."""

import pytest
import torch

from learner.weights.fleet import JoinRefused
from tests.learner.generators import ScriptedGenerator
from tests.learner.weights.publishing import learner, snapshot


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


async def test_a_generator_with_a_wrong_probe_is_expelled_by_name_and_stays_out() -> None:
    async with ScriptedGenerator("a", gap=0.2).running() as a, ScriptedGenerator("b").running() as b, learner() as ours:
        ours.join(a, b)
        await ours.publish(0, b)
        await ours.until(lambda: len(ours.fleet.members()) == 1)
        assert all("a" not in serving for serving in ours.history)
        with pytest.raises(JoinRefused, match=r"generator a was expelled: .* differ by 0\.2 nats .* at most 0\.001"):
            ours.join(a)
        await ours.publish(1, b)


async def test_a_later_gap_may_be_three_times_the_first_and_no_more() -> None:
    async with ScriptedGenerator("a", gap=9e-4).running() as a, learner() as ours:
        ours.join(a)
        await ours.publish(0, a)
        a.gap = 2.6e-3
        await ours.publish(1, a)
        a.gap = 2.8e-3
        ours.publisher.offer(snapshot(2))
        await ours.until(lambda: not ours.fleet.members())
        with pytest.raises(JoinRefused, match=r"0\.0028 nats .* at version 1\.2; at most 0\.0027"):
            ours.join(a)


async def test_the_generator_whose_checksum_differs_from_the_others_is_expelled() -> None:
    odd = ScriptedGenerator("a")
    good = ScriptedGenerator("b"), ScriptedGenerator("c")
    async with odd.running(), good[0].running(), good[1].running(), learner() as ours:
        ours.join(odd, *good)
        await ours.publish(0, odd, *good)
        odd.loads_wrong = True
        await ours.publish(1, *good)
        with pytest.raises(JoinRefused, match="generator a was expelled: the checksum of its loaded weights at"):
            ours.join(odd)
        await ours.publish(2, *good)


async def test_a_wrong_generator_does_not_take_a_good_one_with_it() -> None:
    async with ScriptedGenerator("a").running() as a, ScriptedGenerator("b").running() as b, learner() as ours:
        ours.join(a, b)
        await ours.publish(0, a, b)
        a.gap, a.loads_wrong = 0.2, True
        await ours.publish(1, b)
        assert [member.generator_id for member in ours.fleet.members()] == ["b"]


async def test_a_joiner_is_compared_with_those_that_serve_the_same_version() -> None:
    wrong = ScriptedGenerator("b", loads_wrong=True)
    async with ScriptedGenerator("a").running() as a, wrong.running() as b, learner() as ours:
        ours.join(a)
        await ours.publish(0, a)
        ours.join(b)
        await ours.until(lambda: len(ours.fleet.members()) == 1)
        assert ours.serving == {"a": "1.0"}
        with pytest.raises(JoinRefused, match="the other generators' is"):
            ours.join(b)


async def test_a_generator_that_did_not_load_what_it_was_sent_is_expelled() -> None:
    stale = ScriptedGenerator("a", stale_checksum="0123")
    async with stale.running() as a, learner() as ours:
        ours.join(a)
        await ours.publish(0, a)
        ours.publisher.offer(snapshot(1))
        await ours.until(lambda: not ours.fleet.members())
        text = r"the checksum of its loaded weights is 0123 at version 1\.1 as it was at 1\.0, .* did not load them"
        with pytest.raises(JoinRefused, match=text):
            ours.join(a)


async def test_equal_weights_have_equal_checksums_and_nobody_is_to_blame() -> None:
    async with ScriptedGenerator("a", stale_checksum="0123").running() as a, learner() as ours:
        ours.join(a)
        await ours.publish(0, a)
        again = snapshot(0)
        ours.publisher.offer(type(again)(1, again.tensors, again.probe_token_ids, again.probe_logprobs))
        await ours.until_served(a=1)
