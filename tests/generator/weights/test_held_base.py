"""Base weights that a worker holds, and what an adapter makes of them: bit for bit what the learner's merge would."""

import pytest
import torch

from generator.weights.held_base import HeldBase, check_factors
from generator.weights.plan import WeightSyncError
from learner.training.adapters import Adapter
from learner.weights.process_group import Bucket, LaidOut, pack_buckets
from protocol.fleet import LowRank, Prepare

ALPHA, RANK = 3.0, 4
SHAPE = LowRank(base="d", rank=RANK, alpha=ALPHA)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def factors(layer: str) -> list[tuple[str, torch.Tensor]]:
    prefix = f"base_model.model.{layer}"
    return [(f"{prefix}.lora_A.weight", drawn(RANK, 48)), (f"{prefix}.lora_B.weight", drawn(64, RANK))]


def plan_of(sent: list[Bucket]) -> Prepare:
    return Prepare(version="1.1", epoch=0, buckets=tuple(bucket.spec for bucket in sent), adapter=SHAPE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_merge_is_the_learners_bit_for_bit_and_leaves_the_base_as_it_is(dtype: torch.dtype) -> None:
    weights = [("layer.weight", drawn(64, 48).to(dtype)), ("norm.weight", drawn(48).to(dtype))]
    base = pack_buckets(weights, bucket_bytes=4096)
    held = HeldBase()
    held.keep("d", [(bucket.spec, bucket.data) for bucket in base])
    came = dict(factors("layer"))
    down, up = came.values()
    expected = Adapter(down=down, up=up, scale=ALPHA / RANK).merged(weights[0][1]).to(dtype)
    for _ in range(2):
        found: dict[str, torch.Tensor] = {}
        for bucket, made in held.merged(came, SHAPE, room=lambda nbytes: torch.empty(nbytes, dtype=torch.uint8)):
            found |= dict(LaidOut(tensors=bucket.tensors, data=made).named())
        assert torch.equal(found["layer.weight"], expected)
        assert torch.equal(found["norm.weight"], weights[1][1])


def test_factors_that_belong_to_no_weight_are_refused_by_name() -> None:
    base = [bucket.spec for bucket in pack_buckets([("layer.weight", drawn(64, 48))], bucket_bytes=4096)]
    check_factors(plan_of(pack_buckets(factors("layer"), bucket_bytes=4096)), base)
    with pytest.raises(WeightSyncError, match=r"2 factors belong to: base_model.model.other.lora_A.weight"):
        check_factors(plan_of(pack_buckets(factors("other"), bucket_bytes=4096)), base)
