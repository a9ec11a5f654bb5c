"""Loads that a worker watches, and when it goes back to whole tensors."""

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from learner.weights.process_group import pack_buckets
from protocol.fleet import BucketSpec, LowRank, Prepare, TensorSpec

with warnings.catch_warnings():  # those of vLLM
    warnings.simplefilter("ignore")
    from generator.weights.transfer import BucketMissing, HeadwayTransferEngine

(WHOLE,) = pack_buckets([("w", torch.arange(16.0).view(4, 4))], bucket_bytes=64)
PART = TensorSpec(name="w", dtype="float32", shape=(2, 4), offset=0, start=(0, 0), whole=(4, 4))
SLICE = BucketSpec(nbytes=32, xxh3="0", tensors=(PART,))


def engine_of(workers: int) -> HeadwayTransferEngine:
    parallel: Any = SimpleNamespace(rank=0, tensor_parallel_size=workers)
    config: Any = SimpleNamespace(parallel_config=parallel, model_config=None)
    given: Any = SimpleNamespace()
    return HeadwayTransferEngine(given, config, torch.device("cpu"), torch.nn.Linear(4, 4, bias=False))


def loaded(engine: HeadwayTransferEngine, *, rows: int, sliced: bool = False, fails: Exception | None = None) -> str:
    """The slices that are told after a load that reads so many rows."""
    engine._plan = Prepare(version="1.1", epoch=1, buckets=(WHOLE.spec,), slices=((SLICE,), (SLICE,)) if sliced else ())
    bucket, buffer = (SLICE, torch.zeros(32, dtype=torch.uint8)) if sliced else (WHOLE.spec, WHOLE.data)
    with engine.watched():
        if fails is not None:
            raise fails
        dict(engine._tensors_of(bucket, buffer))["w"][:rows].clone()
    return engine.slices


def test_slices_are_told_after_a_whole_load_and_by_one_of_several_workers_alone() -> None:
    assert loaded(engine_of(2), rows=2) == '{"boxes":{"w":[{"start":[0,0],"shape":[2,4]}]}}'
    assert loaded(engine_of(2), rows=4) == ""
    assert loaded(engine_of(1), rows=2) == ""


def test_nothing_is_told_after_slices_nor_after_an_adapter() -> None:
    engine = engine_of(2)
    assert loaded(engine, rows=2, sliced=True) == ""
    engine._plan = Prepare(version="1.1", epoch=1, buckets=(WHOLE.spec,), adapter=LowRank(base="b", rank=1, alpha=1))
    with engine.watched():
        engine._tensors_of(WHOLE.spec, WHOLE.data)[0][1][:2].clone()
    assert engine.slices == ""


def test_the_first_load_of_the_same_slices_is_watched_and_no_other() -> None:
    engine = engine_of(2)
    loaded(engine, rows=2, sliced=True)
    assert loaded(engine, rows=3, sliced=True) == "", "it would have been found at first"
    assert loaded(engine, rows=2) != ""


@pytest.mark.parametrize(
    ("rows", "fails", "goes_on"),
    [(3, None, False), (2, AttributeError("no loader"), False), (2, BucketMissing("bucket 1 did not arrive"), True)],
)
def test_after_a_fault_of_slices_whole_tensors_are_taken_from_then_on(
    rows: int, fails: Exception | None, *, goes_on: bool, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_of(2)
    with pytest.raises(Exception, match=r"vLLM read more of 1 tensors|no loader|did not arrive"):
        loaded(engine, rows=rows, sliced=True, fails=fails)
    assert bool(loaded(engine, rows=2)) == goes_on
    assert ("takes whole tensors from now on" in caplog.text) != goes_on
