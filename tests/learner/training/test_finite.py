"""Tensors with and without a number that is not finite, wherever it stands and whatever it is."""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import pytest
import torch

from learner.training.finite import all_finite
from learner.training.policy import NamedTensor, WeightSnapshot, host_copy
from learner.training.trainer import NotFinite, check_snapshot


@dataclass(frozen=True)
class Whole:
    """A model on the CPU that nobody trains."""

    model: torch.nn.Module

    def gathered(self, parameters: Sequence[torch.nn.Parameter]) -> AbstractContextManager[None]:
        return nullcontext()

    def master_weight(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        return parameter.detach()


FLOATS = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
BAD = [math.nan, math.inf, -math.inf]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("shape", [(), (1,), (7, 3), (70_001,)])
def test_one_number_that_is_not_finite_is_found_anywhere(
    dtype: torch.dtype, bad: float, shape: tuple[int, ...]
) -> None:
    tensor = torch.randn(shape).to(dtype)
    assert all_finite(tensor)
    last = tensor.numel() - 1
    for place in {0, last // 2, last}:
        wrong = tensor.clone()
        wrong.view(-1)[place] = bad
        assert not all_finite(wrong)


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_greatest_numbers_of_a_kind_are_finite(dtype: torch.dtype) -> None:
    limits = torch.finfo(dtype)
    assert all_finite(torch.tensor([limits.max, limits.min, limits.tiny, -0.0], dtype=dtype))


def test_infinities_of_both_signs_and_nan_do_not_hide_each_other() -> None:
    assert not all_finite(torch.tensor([math.inf, -math.inf, 0.0]))
    assert not all_finite(torch.tensor([math.nan, math.inf, -math.inf, 0.0]))


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float8_e4m3fn, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(0,), (3, 0)])
def test_an_empty_tensor_is_finite(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    assert all_finite(torch.empty(shape, dtype=dtype))


def test_kinds_without_extremes_are_looked_through_too() -> None:
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        assert all_finite(torch.tensor([1.0, -2.0]).to(dtype))
        assert not all_finite(torch.tensor([1.0, math.nan]).to(dtype))
    for dtype in (torch.int64, torch.uint8, torch.bool):
        assert all_finite(torch.ones(5, dtype=dtype))
    assert not all_finite(torch.tensor([complex(0, math.inf), complex(1, 1)]))


def test_a_transposed_and_a_trained_tensor_are_looked_through() -> None:
    parameter = torch.nn.Parameter(torch.randn(64, 48))
    assert all_finite(parameter.T)
    parameter.data[3, 40] = math.nan
    assert not all_finite(parameter)
    assert not all_finite(parameter.T)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_snapshot_with_such_a_weight_is_refused_by_name(dtype: torch.dtype, bad: float) -> None:
    whole = [NamedTensor("embedding", torch.ones(9, 5, dtype=dtype)), NamedTensor("none", torch.empty(0, dtype=dtype))]
    snapshot = WeightSnapshot(tensors=tuple(whole))
    assert check_snapshot(snapshot) is snapshot
    wrong = NamedTensor("head", torch.tensor([1.0, bad, 2.0], dtype=dtype))
    with pytest.raises(NotFinite, match="weight head is not finite"):
        check_snapshot(WeightSnapshot(tensors=(*whole, wrong)))


@pytest.mark.parametrize("bucket_bytes", [0, 1 << 20])
def test_a_weight_that_the_type_which_is_sent_cannot_hold_is_refused(bucket_bytes: int) -> None:
    head = torch.nn.Linear(2, 2)
    head.weight.data[1, 0] = torch.finfo(torch.float32).max  # it is infinite once it is rounded to bfloat16
    whole = Whole(torch.nn.Sequential(torch.nn.Linear(3, 2), head))

    check_snapshot(host_copy(whole, dtype="float32", keep=True, bucket_bytes=bucket_bytes))
    sent = host_copy(whole, dtype="bfloat16", keep=True, bucket_bytes=bucket_bytes)

    with pytest.raises(NotFinite, match=r"weight 1\.weight is not finite as bfloat16, in which it would be published"):
        check_snapshot(sent)
    assert sum(not all_finite(bucket.data.view(torch.bfloat16)) for bucket in sent.buckets) == 1


def test_what_is_seen_where_a_weight_lies_is_not_looked_for_again() -> None:
    tensors = (NamedTensor("a", torch.ones(3)), NamedTensor("b", torch.ones(3)))
    assert check_snapshot(WeightSnapshot(tensors=tensors, not_finite=()))
    with pytest.raises(NotFinite, match="weight b is not finite"):
        check_snapshot(WeightSnapshot(tensors=tensors, not_finite=("b",)))
