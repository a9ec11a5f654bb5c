"""The slices of a large mixture of experts, which are told of in answers and requests of bounded size."""

import warnings

from protocol.fleet import BucketSpec, CommitResult, Prepare, TensorBox, TensorSpec, WorkerSlices
from services.config.models import HttpConfig

with warnings.catch_warnings():  # those of vLLM
    warnings.simplefilter("ignore")
    from generator.engine.engine import MAX_LAYOUT_CHARS, layout_of

WORKERS = 8
NAMES = [f"model.layers.60.mlp.experts.{number}.gate_proj.weight" for number in range(256)]
WHOLE = (2048, 7168)
BOX = TensorBox(start=(1792, 0), shape=(256, 7168))


def test_the_largest_layout_that_is_told_and_a_plan_of_it_fit_into_a_body() -> None:
    """By 1 of the 61 layers of DeepSeek-V3, and 1 of 3 matrices of each expert."""
    told = [WorkerSlices(boxes=dict.fromkeys(NAMES, (BOX,))).model_dump_json()] * WORKERS
    layout = layout_of(told)
    assert layout is not None
    whole = tuple(TensorSpec(name=name, dtype="bfloat16", shape=WHOLE, offset=1 << 27) for name in NAMES)
    part = {"shape": BOX.shape, "start": BOX.start, "whole": WHOLE}
    slices = tuple(spec.model_copy(update=part) for spec in whole)
    bucket = BucketSpec(nbytes=1 << 28, xxh3="0" * 16, tensors=whole)
    plan = Prepare(
        version="1.5", epoch=1, buckets=(bucket,), slices=((bucket.model_copy(update={"tensors": slices}),),) * WORKERS
    )
    answer = CommitResult(version="1.5", fingerprint="0", probe_logprobs=(), load_s=0, pause_s=0, slices=layout)
    times = MAX_LAYOUT_CHARS / sum(map(len, told))
    assert times < 61 * 3, "it is bounded below the size of that model"
    assert times * max(len(plan.model_dump_json()), len(answer.model_dump_json())) < HttpConfig(port=1).max_body_bytes


def test_a_layout_that_is_too_large_is_not_told() -> None:
    told = [WorkerSlices(boxes={"w": (BOX,)}).model_dump_json()] * 2
    assert layout_of(told, most_chars=2 * len(told[0])) is not None
    assert layout_of(told, most_chars=2 * len(told[0]) - 1) is None
    assert layout_of([told[0], ""]) is None
