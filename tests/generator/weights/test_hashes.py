"""Hashes that a worker takes where the bytes are: buckets by their plan, and loaded parameters."""

import pytest
import torch
import xxhash

from generator.weights import hashes
from generator.weights.hashes import update_digest, verify_bucket
from generator.weights.plan import WeightSyncError
from learner.weights.process_group import lay_out

TENSORS = [("a", torch.arange(1000.0)), ("b", torch.arange(7).to(torch.bfloat16))]


@pytest.fixture(params=["host", "device"])
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A device's bytes are hashed by torch: here a CPU is taken for one."""
    if request.param == "device":
        monkeypatch.setattr(hashes, "HOST", frozenset())
    return str(request.param)


@pytest.mark.parametrize("for_devices", [False, True])
def test_a_bucket_is_verified_by_the_hash_that_its_place_computes(*, where: str, for_devices: bool) -> None:
    (laid_out,) = lay_out(TENSORS, bucket_bytes=1 << 20)
    bucket = laid_out.hashed(for_devices=for_devices)
    assert bool(bucket.spec.device_hash) == for_devices
    verify_bucket(bucket.data, bucket=bucket.spec, index=0)
    by_torch = where == "device" and for_devices
    expected = bucket.spec.device_hash if by_torch else bucket.spec.xxh3
    bucket.data[777] += 1
    with pytest.raises(WeightSyncError, match=f"bucket 5 has hash [0-9a-f]{{16}}, its plan says {expected}"):
        verify_bucket(bucket.data, bucket=bucket.spec, index=5)


@pytest.mark.usefixtures("where")
def test_a_digest_is_of_the_values_of_a_tensor_wherever_they_lie() -> None:
    def digest(tensor: torch.Tensor) -> str:
        found = xxhash.xxh3_64()
        update_digest(found, tensor)
        return str(found.hexdigest())

    tensor = torch.arange(60.0).view(6, 10)
    changed = tensor.clone()
    changed[3, 3] = -1
    assert digest(tensor) == digest(tensor.t().contiguous().t()) != digest(changed)
