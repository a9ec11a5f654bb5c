"""A worker's staging of a plan whose buckets come from two senders."""

import threading
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from generator.weights.plan import WeightSyncError
from learner.weights.process_group import Bucket, lay_out
from protocol.fleet import Prepare
from tests.generator.weights.test_overtaken import until_done

with warnings.catch_warnings():  # those of vLLM
    warnings.simplefilter("ignore")
    from generator.weights.transfer import HeadwayTransferEngine


def share_of(sender: int) -> list[Bucket]:
    tensors = [(f"{sender}{name}", torch.full((8,), 1.0 * sender)) for name in "ab"]
    return [bucket.hashed(sender=sender) for bucket in lay_out(tensors, bucket_bytes=32)]


FIRST, SECOND = share_of(0), share_of(1)
PLANNED = [FIRST[0], SECOND[0], FIRST[1], SECOND[1]]


class TwoSenders:
    """In place of the groups: the first sender has nothing before all of the second's has arrived."""

    device = torch.device("cpu")

    def __init__(self, *, at_once: bool, broken: int = -1) -> None:
        self.at_once = at_once
        self._broken = broken
        self._second_sent = threading.Event()
        self.order: list[int] = []

    def receive(self, *, buffer: torch.Tensor, index: int, sender: int) -> None:
        if self.at_once and sender == 0:
            assert self._second_sent.wait(10)
        if index == self._broken:
            raise WeightSyncError(f"bucket {index} did not arrive")
        self.order.append(index)
        buffer.copy_(PLANNED[index].data)
        if index == 3:
            self._second_sent.set()


def bare_engine() -> HeadwayTransferEngine:
    parallel: Any = SimpleNamespace(rank=0, tensor_parallel_size=1)
    config: Any = SimpleNamespace(parallel_config=parallel, model_config=None)
    given: Any = SimpleNamespace()
    return HeadwayTransferEngine(given, config, torch.device("cpu"), torch.nn.Linear(4, 4, bias=False))


def staged(group: TwoSenders) -> HeadwayTransferEngine:
    engine = bare_engine()
    engine._group = group  # type: ignore[assignment]
    engine.stage(Prepare(version="1.1", epoch=1, buckets=tuple(bucket.spec for bucket in PLANNED)))
    return engine


@pytest.mark.parametrize(("at_once", "order"), [(True, [1, 3, 0, 2]), (False, [0, 1, 2, 3])])
def test_buckets_lie_in_the_order_of_the_plan_however_they_came(*, at_once: bool, order: list[int]) -> None:
    group = TwoSenders(at_once=at_once)
    engine = staged(group)
    until_done(engine)
    assert group.order == order
    assert engine._staged is not None
    assert all(torch.equal(found, bucket.data) for found, bucket in zip(engine._staged, PLANNED, strict=True))


def test_a_bucket_that_does_not_come_from_one_sender_fails_the_whole() -> None:
    group = TwoSenders(at_once=True, broken=2)
    engine = staged(group)
    with pytest.raises(WeightSyncError, match="bucket 2 did not arrive"):
        until_done(engine)
    assert engine._staged is None


class OneAhead:
    """In place of the groups: notes which buckets were asked for."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.asked = [threading.Event() for _ in PLANNED]

    def receive(self, *, buffer: torch.Tensor, index: int, sender: int) -> None:
        del sender
        self.asked[index].set()
        buffer.copy_(PLANNED[index].data)


def test_within_a_pause_the_next_bucket_arrives_beside_the_load_of_the_one_before() -> None:
    group = OneAhead()
    engine = bare_engine()
    engine._group = group  # type: ignore[assignment]
    plan = Prepare(version="1.1", epoch=1, buckets=tuple(bucket.spec for bucket in PLANNED))
    engine.expect(plan)
    engine.first_bucket(ttl_s=60.0)
    assert not group.asked[1].is_set(), "nothing touches the model yet, and nothing more is needed"
    for index, (spec, buffer) in enumerate(engine._buffers(plan)):
        assert spec is plan.buckets[index]
        assert torch.equal(buffer, PLANNED[index].data)
        assert index + 1 == len(PLANNED) or group.asked[index + 1].wait(10)
        assert index + 2 >= len(PLANNED) or not group.asked[index + 2].is_set(), "there is room for one"
    assert engine.wait_s > 0
