"""Generators that map the learner's memory: what they load, and when that is used again; who is told of a failure."""

import asyncio
from dataclasses import replace

import pytest
import torch

from learner.weights import same_host
from learner.weights.probe import Probe
from learner.weights.process_group import BucketWriter, Rooms
from learner.weights.published import Snapshot
from tests.learner.generators import ScriptedGenerator, probe_logprobs
from tests.learner.weights.publishing import OPTIONS, PROBE, PublishingLearner, learner, tensors_of


@pytest.fixture
def rooms() -> Rooms:
    torch.set_num_threads(1)
    return Rooms(shared=True)


async def publish(ours: PublishingLearner, version: int, rooms: Rooms, *generators: ScriptedGenerator) -> None:
    """Offers a version of two buckets, and returns when these serve it, and nobody else serves."""
    writer = BucketWriter(bucket_bytes=4096, rooms=rooms)
    for name, tensor in tensors_of(version):
        writer.add(name, tensor, dtype=tensor.dtype)
    probe = Probe(texts=PROBE, logprobs=probe_logprobs(PROBE))
    ours.publisher.offer(Snapshot(version=version, buckets=writer.buckets(), probe=probe))
    del writer
    await ours.until_served(**{generator.name: version for generator in generators})


async def test_who_tells_the_secret_maps_each_version_and_others_are_broadcast_to(rooms: Rooms) -> None:
    near, far = ScriptedGenerator("a", maps=True), ScriptedGenerator("b")
    async with near.running() as a, far.running() as b, learner() as ours:
        ours.join(a, b)
        for version in range(5):
            await publish(ours, version, rooms, a, b)
            assert a.weights["embedding"].eq(version).all()
        assert (a.joins, len(b.joins)) == ([], 1)
        assert len(a.files) == 8, "two buckets of each version but the first, which was downloaded"
        assert b.files == []
        assert len(set(a.files)) <= 6, "files are used again"


@pytest.mark.parametrize(("step", "meets"), [("prepare", True), ("commit", False)])
async def test_one_that_fails_catches_up_and_is_broadcast_to_if_it_could_not_map(
    rooms: Rooms, step: str, meets: bool
) -> None:
    async with ScriptedGenerator("a", maps=True).running() as a, learner() as ours:
        ours.join(a)
        for version in (0, 1):
            await publish(ours, version, rooms, a)
        left = [step]
        a.refuses = lambda at: at in left and not left.remove(at)  # type: ignore[func-returns-value]
        for version in (2, 3):
            await publish(ours, version, rooms, a)
        assert a.pulls == ["1.0", "1.2"]
        assert (bool(a.joins), len(a.files)) == ((True, 2) if meets else (False, 6))


async def test_one_that_dies_while_it_maps_leaves_the_others_to_serve(rooms: Rooms) -> None:
    dying = ScriptedGenerator("a", maps=True, dies_in_prepare=lambda prepare: prepare.version == "1.1")
    async with dying.running() as a, ScriptedGenerator("b", maps=True).running() as b, learner() as ours:
        ours.join(a, b)
        await publish(ours, 0, rooms, a, b)
        await publish(ours, 1, rooms, b)
        assert [member.generator_id for member in ours.fleet.members()] == ["b"]
        assert b.files


async def test_one_that_hangs_in_its_commit_is_out_of_service_while_one_that_is_broadcast_to_goes_on(
    rooms: Rooms,
) -> None:
    options = replace(OPTIONS, commit_timeout_s=60.0)
    near, far = ScriptedGenerator("a", maps=True), ScriptedGenerator("b")
    async with near.running() as a, far.running() as b, learner(options) as ours:
        ours.join(a, b)
        await publish(ours, 0, rooms, a, b)
        a.hold["commit"] = asyncio.Event()
        await publish(ours, 1, rooms, b)
        held = [mapped.clone() for mapped in a.mapped]
        for version in (2, 3, 4):
            await publish(ours, version, rooms, b)
        assert all(map(torch.equal, held, a.mapped)), "it may be reading them"
        a.hold.pop("commit").set()
        await ours.until_served(a=4, b=4)


async def test_one_that_does_not_say_where_it_is_is_broadcast_to(rooms: Rooms, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(same_host, "_ASK_S", 0.05)
    async with ScriptedGenerator("a", maps=True).running() as a, learner() as ours:
        ours.join(a)
        a.hold["host"] = asyncio.Event()
        for version in (0, 1):
            await publish(ours, version, rooms, a)
        a.hold.pop("host").set()
        assert (len(a.joins), a.files) == (1, [])
        await publish(ours, 2, rooms, a)
        assert a.files, "it is asked again"
        await ours.until(lambda: ours.reports[-1].version == 2)
        assert [report.sent_bytes > 0 for report in ours.reports] == [True, True, False], "what is mapped is not sent"
