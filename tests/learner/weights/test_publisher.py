"""Weight sync over real gloo groups and HTTP servers on loopback: who gets which version, and by which way."""

import asyncio
import gc
import weakref
from dataclasses import replace

import pytest
import torch

from learner.weights import published, publisher
from learner.weights.published import PackedWeights
from tests.learner.generators import ScriptedGenerator
from tests.learner.weights.publishing import OPTIONS, adapter, base_weights, learner, snapshot, tensors_of


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


async def test_a_generator_that_joins_downloads_every_tensor_bit_for_bit_and_then_serves_the_version() -> None:
    async with ScriptedGenerator("a").running() as a, learner() as ours:
        ours.join(a)
        ours.publisher.offer(snapshot(0))
        async with asyncio.timeout(60):
            await ours.publisher.wait_until_served(0)
        await ours.until_served(a=0)
        for name, tensor in tensors_of(0):
            assert a.weights[name].dtype == tensor.dtype
            assert torch.equal(a.weights[name], tensor)
        assert (a.pulls, a.joins) == (["1.0"], [])
        (report,) = ours.reports
        assert (report.version, report.members, report.pause_s) == (0, 1, 0.002)
        assert report.total_s == pytest.approx(report.prepare_s + report.commit_s)
        (joined,) = ours.joined
        assert (joined.generator_id, joined.version) == ("a", 0)
        assert joined.probe_gap < 1e-9


async def test_those_that_serve_get_the_next_versions_by_broadcast_over_one_process_group() -> None:
    async with ScriptedGenerator("a").running() as a, ScriptedGenerator("b").running() as b, learner() as ours:
        ours.join(a, b)
        for version in range(3):
            await ours.publish(version, a, b)
        assert a.versions == b.versions == ["1.0", "1.1", "1.2"]
        assert a.pulls == b.pulls == ["1.0"]
        assert [(join.epoch, join.rank_offset, join.world_size) for join in (*a.joins, *b.joins)] == [
            (1, 1, 3),
            (1, 2, 3),
        ]
        assert torch.equal(b.weights["embedding"], tensors_of(2)[0][1])
        await ours.until(lambda: len(ours.reports) == 3)
        assert [(report.version, report.members) for report in ours.reports][1:] == [(1, 2), (2, 2)]


async def test_a_joiner_does_not_disturb_the_broadcasts_of_the_others() -> None:
    gate = asyncio.Event()
    async with ScriptedGenerator("a").running() as a, ScriptedGenerator("b").running() as b, learner() as ours:
        ours.join(a)
        await ours.publish(0, a)
        b.hold["pull"] = gate
        ours.join(b)
        for version in (1, 2):
            await ours.publish(version, a)
        assert [join.epoch for join in a.joins] == [1], "the group was not touched"
        gate.set()
        await ours.until_served(a=2, b=2)
        assert b.versions[-1] == "1.2"
        await ours.publish(3, a, b)
        assert [join.epoch for join in a.joins] == [1, 2]
        assert [join.epoch for join in b.joins] == [2]


async def test_adapters_go_alone_to_those_that_hold_their_base_weights() -> None:
    base, alone = base_weights(), {"base_model.model.layer.lora_A.weight", "base_model.model.layer.lora_B.weight"}
    everything = alone | {"layer.weight"}
    async with ScriptedGenerator("a").running() as a, ScriptedGenerator("b").running() as b, learner() as ours:
        ours.join(a)
        ours.publisher.offer(adapter(0, base=base))
        await ours.until_served(a=0)
        ours.publisher.offer(adapter(1, base=base))
        await ours.until_served(a=1)
        assert a.brought == [("1.0", everything), ("1.1", alone)]
        ours.join(b)
        await ours.until_served(a=1, b=1)
        ours.publisher.offer(adapter(2, base=base))
        await ours.until_served(a=2, b=2)
        assert b.brought == [("1.1", everything), ("1.2", alone)]

        a.base = ""  # its engine was started afresh, say
        ours.publisher.offer(adapter(3, base=base))
        await ours.until_served(a=3, b=3)
        assert a.brought[2:] == [("1.2", alone), ("1.3", alone), ("1.3", everything)]
        assert set(a.weights) == set(b.weights) == everything
        await ours.until(lambda: ours.reports[-1].version == 3)
        sizes = [report.sent_bytes for report in ours.reports]
        assert sizes[1] == sizes[2] == sizes[0] - 4800 == 3232


async def test_adding_a_small_adapter_to_large_base_weights_takes_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(published, "SLOWEST_BYTES_PER_S", 4800 / 20)  # the base weights have 4800 bytes
    base = base_weights()
    async with ScriptedGenerator("a").running() as a, learner() as ours:
        ours.join(a)
        ours.publisher.offer(adapter(0, base=base))
        await ours.until_served(a=0)
        a.hold["merge"] = asyncio.Event()
        asyncio.get_running_loop().call_later(2 * OPTIONS.bucket_timeout_s, a.hold["merge"].set)
        ours.publisher.offer(adapter(1, base=base))
        await ours.until_served(a=1)
        assert [version for version, _ in a.brought] == ["1.0", "1.1"]
        assert a.pulls == ["1.0"]


async def test_a_version_is_kept_for_as_long_as_somebody_downloads_it() -> None:
    gate = asyncio.Event()
    async with ScriptedGenerator("a").running() as a, ScriptedGenerator("b").running() as b, learner() as ours:
        ours.join(a)
        await ours.publish(0, a)
        b.hold["pull"] = gate
        ours.join(b)
        await ours.until(lambda: b.pulls == ["1.0"])
        await ours.publish(1, a)
        gate.set()
        await ours.until_served(a=1, b=1)
        assert b.versions == ["1.0", "1.1"]
        assert b.pulls == ["1.0", "1.1"], "no round was to come, so it downloaded again"


async def test_one_that_serves_and_waits_for_its_next_download_is_one_member_of_the_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(publisher, "_ROUNDS_REST_S", 0.0)
    options = replace(OPTIONS, parallel_pulls=1)
    async with (
        ScriptedGenerator("a").running() as a,
        ScriptedGenerator("b").running() as b,
        ScriptedGenerator("c").running() as c,
        learner(options) as ours,
    ):
        ours.join(a)
        await ours.publish(0, a)
        b.hold["pull"], c.hold["pull"] = asyncio.Event(), asyncio.Event()
        ours.join(b)
        await ours.until(lambda: b.pulls == ["1.0"])
        await ours.publish(1, a)
        ours.join(c)
        b.hold["pull"].set()
        await ours.until(lambda: c.pulls == ["1.1"])
        assert ours.serving == {"a": "1.1", "b": "1.0"}, "b is behind, and its turn comes after c's"
        await ours.publish(2, a, b)
        assert [(join.rank_offset, join.world_size) for join in (a.joins[-1], *b.joins)] == [(1, 3), (2, 3)]
        assert (b.pulls, b.versions) == (["1.0"], ["1.0", "1.2"])
        c.hold["pull"].set()
        await ours.until_served(a=2, b=2, c=2)


async def test_one_that_has_downloaded_the_version_of_a_round_is_not_in_it() -> None:
    async with ScriptedGenerator("a").running() as a, ScriptedGenerator("b").running() as b, learner() as ours:
        ours.join(a)
        await ours.publish(0, a)
        a.hold["prepare"] = asyncio.Event()
        ours.publisher.offer(snapshot(1))
        async with asyncio.timeout(60):
            await a.preparing.wait()
        ours.publisher.offer(snapshot(2))
        await ours.until(lambda: ours.shelf.newest is not None and ours.shelf.newest.version.number == 2)
        ours.join(b)
        await ours.until(lambda: ours.serving == {"a": "1.0", "b": "1.2"})
        assert ours.shelf.newest is not None
        downloaded = weakref.ref(ours.shelf.newest)
        a.hold["prepare"].set()
        await ours.until_served(a=2, b=2)
        assert (b.versions, b.joins) == (["1.2"], [])
        await ours.publish(3, a, b)
        await ours.until(lambda: [report.version for report in ours.reports] == [0, 1, 2, 3])
        gc.collect()
        assert downloaded() is None, "nobody needs it any more"


async def test_offers_made_during_a_publish_coalesce_to_the_newest() -> None:
    gate = asyncio.Event()
    async with ScriptedGenerator("a").running() as a, learner() as ours:
        ours.join(a)
        await ours.publish(0, a)
        a.hold["prepare"] = gate
        ours.publisher.offer(snapshot(1))
        async with asyncio.timeout(60):
            await a.preparing.wait()
        for version in (2, 3, 4):
            ours.publisher.offer(snapshot(version))
        await ours.until(lambda: ours.shelf.newest is not None and ours.shelf.newest.version.number == 4)
        gate.set()
        await ours.until_served(a=4)
        assert a.versions == ["1.0", "1.1", "1.4"]
        await ours.until(lambda: [report.version for report in ours.reports] == [0, 1, 4])


async def test_versions_that_were_published_are_let_go_of_at_once() -> None:
    alive: list[weakref.ref[PackedWeights]] = []
    async with ScriptedGenerator("a").running() as a, learner() as ours:
        ours.join(a)
        for version in range(5):
            await ours.publish(version, a)
            assert ours.shelf.newest is not None
            alive.append(weakref.ref(ours.shelf.newest))
        gc.collect()
        assert [one() is not None for one in alive] == [False, False, False, False, True]


async def test_without_generators_an_offer_waits_for_the_first() -> None:
    async with ScriptedGenerator("a").running() as a, learner() as ours:
        ours.publisher.offer(snapshot(5))
        served = asyncio.create_task(ours.publisher.wait_until_served(5))
        ours.join(a)
        async with asyncio.timeout(60):
            await served
        assert a.versions == ["1.5"]


async def test_a_generator_that_was_started_afresh_under_its_name_joins_at_once() -> None:
    async with ScriptedGenerator("a").running() as a, learner() as ours:
        ours.join(a)
        await ours.publish(0, a)
        a.restart()
        ours.join(a)
        assert ours.serving == {}, "it holds nothing that was sent"
        await ours.until_served(a=0)
        assert a.pulls == ["1.0", "1.0"]


async def test_a_stalled_generator_is_let_be_and_joins_when_it_is_able_again() -> None:
    async with ScriptedGenerator("a").running() as a, ScriptedGenerator("b").running() as b, learner() as ours:
        ours.join(a, b)
        await ours.publish(0, a, b)
        a.condition, a.version = "stalled", None
        ours.join(a)
        assert ours.serving == {"b": "1.0"}
        await ours.publish(1, b)
        a.condition = "able"
        ours.join(a)
        await ours.until_served(a=1, b=1)
        assert a.pulls == ["1.0", "1.1"]
        assert len(a.joins) == 0, "it was in no round"


async def test_a_stop_does_not_wait_for_a_meeting() -> None:
    options = replace(OPTIONS, meet_timeout_s=60.0)
    async with ScriptedGenerator("a").running() as a, learner(options) as ours:
        ours.join(a)
        await ours.publish(0, a)
        a.hold["group"] = asyncio.Event()
        ours.publisher.offer(snapshot(1))
        await ours.until(lambda: ours.shelf.newest is not None and ours.shelf.newest.version.number == 1)


async def test_a_version_that_is_held_is_served_until_it_is_let_go_and_then_the_newest_follows() -> None:
    async with ScriptedGenerator("a").running() as a, ScriptedGenerator("b").running() as b, learner() as ours:
        ours.join(a)
        ours.publisher.offer(snapshot(1), hold=True)
        for version in (2, 3):
            ours.publisher.offer(snapshot(version))
        await ours.until_served(a=1)
        ours.join(b)
        await ours.until_served(a=1, b=1)
        ours.publisher.let_go(0)
        assert ours.publisher.newest is not None
        assert ours.publisher.newest.version.number == 1
        ours.publisher.let_go(1)
        await ours.until_served(a=3, b=3)
        assert a.versions == ["1.1", "1.3"]


async def test_a_version_that_is_to_be_held_during_a_hold_is_held_in_its_turn() -> None:
    async with ScriptedGenerator("a").running() as a, learner() as ours:
        ours.join(a)
        for version in (1, 2, 3, 4, 5, 6):
            ours.publisher.offer(snapshot(version), hold=version in (1, 3, 5))
        await ours.until_served(a=1)
        ours.publisher.let_go(5)  # its evaluation came to nothing before its turn
        ours.publisher.let_go(1)
        await ours.until_served(a=3)
        ours.publisher.let_go(3)
        await ours.until_served(a=6)
        assert a.versions == ["1.1", "1.3", "1.6"]
