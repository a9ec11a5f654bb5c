"""A plan whose tensors cannot lie where it says is refused before a byte is received."""

import pytest

from generator.weights.plan import WeightSyncError, check_plan
from protocol.fleet import BucketSpec, TensorSpec


def tensor(name: str, *, offset: int, shape: tuple[int, ...] = (4,), dtype: str = "float32") -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, shape=shape, offset=offset)


def bucket(*tensors: TensorSpec, nbytes: int = 64) -> BucketSpec:
    return BucketSpec(nbytes=nbytes, xxh3="0" * 16, tensors=tensors)


def test_tensors_in_any_order_with_gaps_and_without_padding_at_the_end_are_good() -> None:
    check_plan([bucket(tensor("b", offset=48), tensor("a", offset=0), tensor("empty", offset=16, shape=(0,)))])


@pytest.mark.parametrize(
    ("tensors", "complaint"),
    [
        ((tensor("a", offset=8),), "not aligned to 16"),
        ((tensor("a", offset=64),), "ends at 80, beyond the bucket's 64"),
        (
            (tensor("a", offset=0, shape=(5,)), tensor("b", offset=16)),
            "overlaps .* which ends at 20",
        ),
        ((tensor("a", offset=0), tensor("a", offset=16)), "twice"),
        ((tensor("a", offset=0, dtype="float8"),), "dtype float8 is not one of"),
        ((tensor("a", offset=0, shape=(-1, -4)),), "negative"),
    ],
)
def test_a_bucket_that_makes_no_sense_is_refused(tensors: tuple[TensorSpec, ...], complaint: str) -> None:
    with pytest.raises(WeightSyncError, match=complaint):
        check_plan([bucket(*tensors)])


def test_a_tensor_in_two_buckets_is_refused() -> None:
    with pytest.raises(WeightSyncError, match="twice"):
        check_plan([bucket(tensor("a", offset=0)), bucket(tensor("a", offset=0))])
