"""Plans that come to nothing: overtaken by another one while they are merged, or given up, or not whole."""

import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from learner.weights.process_group import Bucket, pack_buckets
from protocol.fleet import LowRank, Prepare

with warnings.catch_warnings():  # those of vLLM
    warnings.simplefilter("ignore")
    from generator.weights.held_base import HeldBase
    from generator.weights.plan import WeightSyncError
    from generator.weights.transfer import HeadwayTransferEngine

RANK = 2
SHAPE = LowRank(base="d", rank=RANK, alpha=2.0)


def weights(value: float) -> list[tuple[str, torch.Tensor]]:
    return [("layer.weight", torch.full((4, 4), value))]


def factors(value: float) -> list[tuple[str, torch.Tensor]]:
    return [
        ("base_model.model.layer.lora_A.weight", torch.full((RANK, 4), value)),
        ("base_model.model.layer.lora_B.weight", torch.full((4, RANK), value)),
    ]


def sent(version: str, buckets: list[Bucket], folder: Path) -> tuple[Prepare, list[str]]:
    paths = [str(folder / f"{version}-{number}") for number in range(len(buckets))]
    for bucket, path in zip(buckets, paths, strict=True):
        Path(path).write_bytes(bucket.data.view(torch.uint8).numpy().tobytes())
    plan = Prepare(version=version, epoch=0, buckets=tuple(bucket.spec for bucket in buckets), adapter=SHAPE)
    return plan, paths


def until_done(engine: HeadwayTransferEngine) -> None:
    waiting = threading.Event()
    for _ in range(2000):
        if engine.progress():
            return
        waiting.wait(0.01)
    raise AssertionError("not done")


@pytest.fixture
def engine() -> HeadwayTransferEngine:
    parallel: Any = SimpleNamespace(rank=0, tensor_parallel_size=1)
    config: Any = SimpleNamespace(parallel_config=parallel, model_config=None)
    given: Any = SimpleNamespace()
    return HeadwayTransferEngine(given, config, torch.device("cpu"), torch.nn.Linear(4, 4, bias=False))


def test_a_merge_that_was_overtaken_is_thrown_away(
    engine: HeadwayTransferEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    merged: Callable[..., Any] = HeldBase.merged
    begun, go_on = threading.Event(), threading.Event()

    def slow_at_first(self: HeldBase, *given: Any, **more: Any) -> Any:
        if begun.is_set():
            yield from merged(self, *given, **more)
            return
        begun.set()
        go_on.wait(30)
        yield from merged(self, *given, **more)

    monkeypatch.setattr(HeldBase, "merged", slow_at_first)
    base, old = pack_buckets(weights(1.0), bucket_bytes=4096), pack_buckets(factors(100.0), bucket_bytes=4096)
    engine.stage_files(*sent("1.1", base + old, tmp_path))
    overtaken = engine._operation
    assert begun.wait(30)
    assert overtaken is not None
    plan, paths = sent("1.2", pack_buckets(factors(1.0), bucket_bytes=4096), tmp_path)
    engine.stage_files(plan, paths)
    until_done(engine)
    go_on.set()
    overtaken.result(timeout=30)
    ((_, buffer),) = engine._whole(plan)
    # 1 and, from each of two ranks, 1 times 1 times alpha over rank, which is 1.
    assert buffer.view(torch.float32).tolist() == [3.0] * 16


def test_what_was_given_up_is_not_staged(engine: HeadwayTransferEngine, tmp_path: Path) -> None:
    plan, paths = sent("1.1", pack_buckets(weights(1.0) + factors(1.0), bucket_bytes=64), tmp_path)
    engine.stage_files(plan, paths)
    until_done(engine)
    engine.abandon()
    engine._all_are_here(plan, [], from_files=True)
    assert engine._staged is None


def test_an_adapter_of_which_a_factor_is_missing_is_refused_before_any_of_it_comes(
    engine: HeadwayTransferEngine, tmp_path: Path
) -> None:
    halves = [*pack_buckets(weights(1.0), bucket_bytes=1 << 20), *pack_buckets(factors(1.0)[:1], bucket_bytes=1 << 20)]
    with pytest.raises(WeightSyncError, match=r"one factor of 1 weights, and lacks the other: .*lora_B.weight"):
        engine.stage_files(*sent("1.1", halves, tmp_path))


def test_whatever_ends_an_operation_is_told_at_once(
    engine: HeadwayTransferEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: HeldBase, *given: Any, **more: Any) -> Any:
        raise KeyError("layer.weight")

    monkeypatch.setattr(HeldBase, "merged", fails)
    buckets = [*pack_buckets(weights(1.0), bucket_bytes=1 << 20), *pack_buckets(factors(1.0), bucket_bytes=1 << 20)]
    engine.stage_files(*sent("1.1", buckets, tmp_path))
    with pytest.raises(WeightSyncError, match=r"KeyError: 'layer\.weight'"):
        until_done(engine)
