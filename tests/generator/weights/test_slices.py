"""Reads of tensors by loaders, as boxes; and slices in their places, as loaders read them."""

import random
from collections.abc import Callable, Iterable

import pytest
import torch

from generator.weights.plan import WeightSyncError, check_plan, check_slices
from generator.weights.slices import ReadTrace, check_reads, whole_tensors, worker_slices, worth_sending
from learner.weights.process_group import lay_out, pack_buckets
from learner.weights.slices import Slicer
from protocol.fleet import BucketSpec, Prepare, SliceLayout, TensorBox, TensorSpec, WorkerSlices

Loader = Callable[[torch.Tensor], object]
CPU = torch.device("cpu")
TENSORS = {
    "embed": (64, 16), "norm": (16,), "q": (32, 16), "k": (8, 16), "o": (16, 32), "gate_up": (2, 48, 16), "bias": (32,),
    "experts": (6, 20, 16), "head": (64, 16), "scale": (),
}  # fmt: skip


def weights() -> dict[str, torch.Tensor]:
    drawn = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=drawn) for name, shape in TENSORS.items()}


class ShardedModel:
    """The parameters of one of two workers, and how vLLM's loaders fill them: narrowed, and copied."""

    def __init__(self, rank: int, *, greedy: bool = False) -> None:
        self._rank = rank
        self.greedy = greedy
        self.own: dict[str, torch.Tensor] = {}

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, value in tensors:
            getattr(self, f"_{name}", self._whole)(name, value)

    def _copied(self, name: str, part: torch.Tensor) -> None:
        self.own.setdefault(name, torch.zeros(part.shape)).copy_(part)

    def _whole(self, name: str, value: torch.Tensor) -> None:
        self._copied(name, value)

    def _half(self, name: str, value: torch.Tensor, dim: int) -> None:
        size = value.shape[dim] // 2
        self._copied(name, value if self.greedy else value.narrow(dim, self._rank * size, size))

    def _embed(self, name: str, value: torch.Tensor) -> None:
        self._half(name, value, 0)

    _q = _bias = _head = _embed

    def _o(self, name: str, value: torch.Tensor) -> None:
        self._half(name, value, 1)

    def _gate_up(self, name: str, value: torch.Tensor) -> None:
        for at, expert in enumerate(value.unbind(0)):
            gate, up = expert.chunk(2, dim=0)
            for kind, part in (("gate", gate), ("up", up)):
                self._half(f"{name}.{at}.{kind}", part, 0)

    def _experts(self, name: str, value: torch.Tensor) -> None:
        for at in range(value.shape[0]):
            self._half(f"{name}.{at}", value[at].t(), 1)


def plan_of(tensors: dict[str, torch.Tensor]) -> tuple[list[BucketSpec], list[torch.Tensor]]:
    buckets = pack_buckets(list(tensors.items()), bucket_bytes=4096)
    return [bucket.spec for bucket in buckets], [bucket.data for bucket in buckets]


def traced(model: ShardedModel, specs: list[BucketSpec], buffers: list[torch.Tensor]) -> ReadTrace:
    """A load of whole tensors."""
    trace = ReadTrace()
    with trace:
        for bucket, buffer in zip(specs, buffers, strict=True):
            trace.watch(buffer, bucket.tensors)
            model.load(whole_tensors(bucket, buffer, device=CPU))
    return trace


def layout_of(specs: list[BucketSpec], buffers: list[torch.Tensor]) -> SliceLayout:
    workers = [worth_sending(traced(ShardedModel(rank), specs, buffers), specs) for rank in range(2)]
    return SliceLayout(workers=tuple(map(WorkerSlices.model_validate_json, workers)))


def test_each_worker_is_to_be_sent_what_its_loaders_read() -> None:
    specs, buffers = plan_of(weights())
    boxes, nbytes = worker_slices(traced(ShardedModel(1), specs, buffers), specs)
    assert boxes == {
        "embed": (TensorBox(start=(32, 0), shape=(32, 16)),),
        "q": (TensorBox(start=(16, 0), shape=(16, 16)),),
        "o": (TensorBox(start=(0, 16), shape=(16, 16)),),
        "gate_up": (TensorBox(start=(0, 12, 0), shape=(2, 12, 16)), TensorBox(start=(0, 36, 0), shape=(2, 12, 16))),
        "bias": (TensorBox(start=(16,), shape=(16,)),),
        "experts": (TensorBox(start=(0, 10, 0), shape=(6, 10, 16)),),
        "head": (TensorBox(start=(32, 0), shape=(32, 16)),),
    }
    whole = sum(value.nbytes for value in weights().values())
    assert nbytes == (whole + 4 * (16 + 8 * 16 + 1)) // 2, "norm, k and scale are read whole by each"


def test_slices_in_their_places_load_to_what_whole_tensors_do_bit_by_bit() -> None:
    specs, buffers = plan_of(weights())
    layout = layout_of(specs, buffers)
    newer = {name: value * 1.5 + 1 for name, value in weights().items()}
    cut = Slicer().cut(lay_out(list(newer.items()), bucket_bytes=4096), layout)
    sent = 0
    for rank in range(2):
        expected, model, trace = ShardedModel(rank), ShardedModel(rank), ReadTrace()
        expected.load(newer.items())
        buckets = [laid_out.hashed() for laid_out in cut[rank]]
        assert len(buckets) > 1
        check_plan([bucket.spec for bucket in buckets])
        with trace:
            for bucket in buckets:
                tensors = list(whole_tensors(bucket.spec, bucket.data, device=CPU))
                trace.watch_whole(tensors)
                model.load(tensors)
        check_reads(trace, [bucket.spec for bucket in buckets])
        assert model.own.keys() == expected.own.keys()
        assert all(torch.equal(model.own[name], value) for name, value in expected.own.items())
        sent += sum(bucket.spec.nbytes for bucket in buckets)
    whole = sum(value.nbytes for value in newer.values())
    assert whole < sent < 1.1 * whole


def test_a_load_that_reads_more_than_the_slices_is_found() -> None:
    specs, buffers = plan_of(weights())
    (share, _) = Slicer().cut(lay_out(list(weights().items()), bucket_bytes=1 << 20), layout_of(specs, buffers))
    bucket = share[0].hashed()
    trace = ReadTrace()
    with trace:
        tensors = list(whole_tensors(bucket.spec, bucket.data, device=CPU))
        trace.watch_whole(tensors)
        ShardedModel(0, greedy=True).load(tensors)
    with pytest.raises(WeightSyncError, match="vLLM read more of 7 tensors than the slices that came: bias, embed"):
        check_reads(trace, [bucket.spec])


def test_a_load_that_reads_slices_in_a_way_that_is_not_understood_is_found() -> None:
    specs, buffers = plan_of(weights())
    (share, _) = Slicer().cut(lay_out(list(weights().items()), bucket_bytes=1 << 20), layout_of(specs, buffers))
    bucket = share[0].hashed()
    trace = ReadTrace()
    with trace:
        tensors = dict(whole_tensors(bucket.spec, bucket.data, device=CPU))
        trace.watch_whole(tensors.items())
        tensors["q"].view(-1)[3:20].clone()
    with pytest.raises(WeightSyncError, match="vLLM read more of 1 tensors than the slices that came: q;"):
        check_reads(trace, [bucket.spec])


def test_workers_that_read_nearly_all_are_sent_whole_tensors() -> None:
    specs, buffers = plan_of(weights())
    assert worth_sending(traced(ShardedModel(0, greedy=True), specs, buffers), specs) == ""


READ: dict[str, tuple[Loader, list[tuple[tuple[int, ...], tuple[int, ...]]] | None]] = {
    "a part and more": (lambda w: (w[2:4].clone(), w[1:3, :2].sum()), [((1, 0), (2, 2)), ((2, 0), (2, 6))]),
    "a permuted part": (lambda w: w[2:5, 1:3].t().contiguous(), [((2, 1), (3, 2))]),
    "a single element": (lambda w: w[3, 4].item(), [((3, 4), (1, 1))]),
    "parts that touch": (lambda w: [row.clone() for row in w[1:4].unbind(0)], [((1, 0), (3, 6))]),
    "a part of a stack": (lambda w: torch.cat([w[:1], torch.zeros(1, 6), w[1:2]]), [((0, 0), (2, 6))]),
    "every second row": (lambda w: w[::2].clone(), None),
    "flattened": (lambda w: w.view(-1)[3:20].clone(), None),
    "as other numbers": (lambda w: w.view(torch.int64)[0].clone(), None),
    "all": (lambda w: w + 1, None),
    "nothing": (lambda w: w[:2].t(), None),
    "a part, and all in a way that is no box": (lambda w: (w[:2].clone(), w.view(-1)[1:].clone()), None),
}  # fmt: skip


@pytest.mark.parametrize("how", READ)
def test_what_is_read_is_a_box_or_the_whole(how: str) -> None:
    read, expected = READ[how]
    specs, buffers = plan_of({"before": torch.zeros(5), "w": torch.arange(36.0).view(6, 6), "behind": torch.ones(3)})
    trace = ReadTrace()
    with trace:
        trace.watch(buffers[0], specs[0].tensors)
        read(dict(whole_tensors(specs[0], buffers[0], device=CPU))["w"])
    found, _ = worker_slices(trace, specs)
    if expected is None:
        assert "w" not in found
    else:
        assert [(box.start, box.shape) for box in found["w"]] == sorted(expected)


def test_boxes_of_random_views_hold_what_these_show() -> None:
    chance = random.Random(5)
    for _ in range(200):
        shape = tuple(chance.randint(1, 5) for _ in range(chance.randint(1, 4)))
        value = torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)
        specs, buffers = plan_of({"w": value})
        shown = torch.zeros_like(value)
        trace = ReadTrace()
        with trace:
            trace.watch(buffers[0], specs[0].tensors)
            ((_, part),) = whole_tensors(specs[0], buffers[0], device=CPU)
            for dim in range(len(shape)):
                start = chance.randrange(shape[dim])
                part = part.narrow(dim, start, chance.randint(1, shape[dim] - start))
            part = part.permute(chance.sample(range(len(shape)), len(shape))).clone()
        shown.view(-1)[part.reshape(-1).long() - 1] = 1
        boxes = worker_slices(trace, specs)[0].get("w", (TensorBox(start=(0,) * len(shape), shape=shape),))
        marked = torch.zeros_like(value)
        for box in boxes:
            marked[tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))] = 1
        assert torch.equal(marked, shown)


def spec(name: str, start: tuple[int, ...], offset: int) -> TensorSpec:
    return TensorSpec(name=name, dtype="float32", shape=(2, 2), offset=offset, start=start, whole=(4, 4))


@pytest.mark.parametrize(
    ("specs", "told"),
    [
        ((spec("w", (0, 0), 0), spec("w", (2, 2), 16)), ""),
        ((spec("w", (0, 3), 0),), r"the part of shape \[2, 2\] at \[0, 3\] is not within \[4, 4\]"),
        ((spec("w", (-1, 0), 0),), "is not within"),
        ((spec("w", (0,), 0),), "is not within"),
        ((spec("w", (0, 0), 0), spec("v", (0, 0), 16), spec("w", (2, 2), 32)), "tensor w is in the plan twice"),
    ],
)
def test_parts_of_a_plan_are_within_their_tensors_and_together(specs: tuple[TensorSpec, ...], told: str) -> None:
    bucket = BucketSpec(nbytes=64, xxh3="0", tensors=specs)
    plan = Prepare(version="1.1", epoch=1, buckets=(bucket,), slices=((bucket,), (bucket,)))
    if told:
        with pytest.raises(WeightSyncError, match=told):
            check_slices(plan, workers=2)
    else:
        check_slices(plan, workers=2)
        with pytest.raises(WeightSyncError, match="slices for 2 workers came, this generator has 4"):
            check_slices(plan, workers=4)
