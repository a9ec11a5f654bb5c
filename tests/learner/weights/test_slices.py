"""Slices for the workers of tensor-parallel generators: cut by both ranks of a learner, each worker's own, and whole
tensors wherever slices would not do.
"""

import dataclasses
import logging

import pytest
import torch

from learner.weights.process_group import lay_out
from learner.weights.slices import Slicer, SlicesUnfit
from protocol.fleet import SliceLayout, TensorBox, WorkerSlices
from tests.learner.generators import ScriptedGenerator
from tests.learner.weights.publishing import adapter, base_weights, learner, snapshot, tensors_of
from tests.learner.weights.test_senders import PATIENT, generators, other_rank, shared

NORM_BYTES = 16
"""With its padding. Each worker has it whole."""


def layout(rows: int = 1000) -> SliceLayout:
    """Halves of the embedding by rows, of the large tensor the odd and even quarters; all of the norm."""

    def boxes(worker: int) -> dict[str, tuple[TensorBox, ...]]:
        quarters = tuple(TensorBox(start=(1000 * quarter,), shape=(1000,)) for quarter in (worker, worker + 2))
        half = TensorBox(start=(worker * rows // 2, 0), shape=(rows // 2, 3))
        return {"embedding": (half,), "large": quarters}

    return SliceLayout(workers=tuple(WorkerSlices(boxes=boxes(worker)) for worker in range(2)))


def holds(generator: ScriptedGenerator, version: int) -> bool:
    """All of its weights are those of the version, bit by bit."""
    wanted = dict(tensors_of(version)) | {"large": torch.full((4000,), version, dtype=torch.int64)}
    return all(torch.equal(value, wanted[name]) for name, value in generator.weights.items())


async def test_both_ranks_send_each_worker_its_slices_and_every_bit_arrives() -> None:
    with other_rank() as (copies, sender):
        async with learner(PATIENT) as ours, generators(ours, "a", "b") as made:
            for generator in made:
                generator.slices = layout()
            for version in range(4):
                ours.publisher.offer(shared(version, copies, sender))
                await ours.until_served(a=version, b=version)
                assert all(holds(generator, version) for generator in made)
        for generator in made:
            assert (len(generator.pulls), [join.sliced for join in generator.joins]) == (1, [2])
            assert (generator.joins[-1].senders, generator.joins[-1].world_size) == (2, 3)
            assert generator.received == {0: 3 * 12_000, 1: 3 * (32_000 + 2 * NORM_BYTES)}, "each half once, not twice"
        assert [report.sent_bytes for report in ours.reports[1:]] == 3 * [44_000 + 2 * NORM_BYTES]


@pytest.mark.parametrize("why", ["one has not told", "other slices", "switched off", "an adapter", "one worker"])
async def test_whole_tensors_are_sent_where_slices_would_not_do(why: str) -> None:
    options = dataclasses.replace(PATIENT, slices=why != "switched off")
    base = base_weights()
    async with learner(options) as ours, generators(ours, "a", "b") as made:
        for generator in made:
            generator.slices = layout()
        if why == "one has not told":
            made[1].slices = None
        elif why == "other slices":
            made[1].slices = layout(998)
        elif why == "one worker":
            made[1].slices = SliceLayout(workers=layout().workers * 2)
        for version in range(3):
            ours.publisher.offer(adapter(version, base=base) if why == "an adapter" else snapshot(version))
            await ours.until_served(a=version, b=version)
        for generator in made:
            assert [join.sliced for join in generator.joins] == [0]


async def test_slices_that_are_not_of_these_weights_are_told_and_whole_tensors_are_sent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with other_rank() as (copies, sender):
        async with learner(PATIENT) as ours, generators(ours, "a") as (generator,):
            generator.slices = layout()
            generator.slices.workers[1].boxes["large"] = (TensorBox(start=(3001,), shape=(1000,)),)
            with caplog.at_level(logging.WARNING):
                for version in range(3):
                    ours.publisher.offer(shared(version, copies, sender))
                    await ours.until_served(a=version)
            assert [join.sliced for join in generator.joins] == [0]
            assert holds(generator, 2)
    told = [record.message for record in caplog.records if "in slices" in record.message]
    assert told == [
        "version 1.1 and later ones go out whole, and not in slices: large has shape [4000], and a generator reads "
        "[1000] from [3001] on"
    ]


async def test_a_generator_that_dies_in_the_middle_of_slices_costs_the_other_a_second_broadcast() -> None:
    hasty = dataclasses.replace(PATIENT, bucket_timeout_s=2.0)
    async with learner(hasty) as ours, generators(ours, "a", "b") as made:
        for generator in made:
            generator.slices = layout()
        made[1].dies_in_prepare = lambda prepare: prepare.version == "1.2"
        for version in range(4):
            ours.publisher.offer(snapshot(version))
            await (ours.until_served(a=version, b=version) if version < 2 else ours.until_served(a=version))
            assert holds(made[0], version)
        assert [join.sliced for join in made[0].joins] == [2, 2]
        assert ours.fleet.members()[0].sent_bytes == 12_000 + 2 * NORM_BYTES


async def test_a_whole_version_is_read_anew_before_slices_are_sent_again() -> None:
    base = base_weights()
    async with learner(PATIENT) as ours, generators(ours, "a") as (generator,):
        generator.slices = layout()
        for version, one in enumerate([snapshot(0), snapshot(1), adapter(2, base=base), snapshot(3)]):
            ours.publisher.offer(one)
            await ours.until_served(a=version)
        assert [join.sliced for join in generator.joins] == [2, 0, 2]
        assert holds(generator, 3)


@pytest.mark.parametrize("box", [((0, 1), (1000, 3)), ((0,), (1000,)), ((-1, 0), (10, 3)), ((0, 0), (0, 3))])
def test_boxes_beyond_a_tensor_are_refused(box: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    wrong = WorkerSlices(boxes={"embedding": (TensorBox(start=box[0], shape=box[1]),)})
    with pytest.raises(SlicesUnfit, match=r"embedding has shape \[1000, 3\], and a generator reads"):
        Slicer().cut(lay_out(tensors_of(1), bucket_bytes=4096), SliceLayout(workers=(wrong, wrong)))


def test_memory_of_slices_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    slicer, seen = Slicer(), []
    for version in range(3):
        cut = slicer.cut(lay_out(tensors_of(version), bucket_bytes=4096), layout())
        seen.append({laid_out.data.data_ptr() for share in cut for laid_out in share})
        del cut
    assert seen[1] == seen[2]
