"""Kernels of attention, against float32 and against the plain formula."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from learner.training.attention import build_packed_index, by_hand, by_torch, kernel_for, packed_attention

# Relative errors of the output and of the gradients of query, key and value. bfloat16 has 8 bits: 2^-9 is 2.0e-3.
BOUNDS = (4.5e-3, 5.5e-3, 5.5e-3, 4.5e-3)
SHAPES = {
    "one token": (3, 4, 2, 1, 16),
    "no shared heads": (16, 4, 4, 11, 32),
    "shared heads": (3, 9, 3, 73, 64),
    "one key head": (2, 6, 1, 90, 64),
    "probabilities computed again": (1, 4, 2, 300, 32),
}
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class AttentionCase:
    """Inputs [S, H, L, D], [S, K, L, D], and what comes back from the output."""

    query: Tensor
    key: Tensor
    value: Tensor
    grad: Tensor

    def to(self, dtype: torch.dtype) -> "AttentionCase":
        return AttentionCase(*(tensor.to(dtype) for tensor in (self.query, self.key, self.value, self.grad)))

    def run(self, attend: Attend) -> list[Tensor]:
        """The output, and the gradients of query, key and value."""
        inputs = [tensor.clone().requires_grad_() for tensor in (self.query, self.key, self.value)]
        output = attend(*inputs)
        return [output.detach(), *torch.autograd.grad(output, inputs, self.grad)]


def drawn(sequences: int, heads: int, shared: int, length: int, width: int) -> AttentionCase:
    """Numbers of bfloat16, so that only what is computed of them differs."""
    random = torch.Generator().manual_seed(0)

    def normal(count: int) -> Tensor:
        return torch.randn(sequences, count, length, width, generator=random).bfloat16().float()

    return AttentionCase(normal(heads), normal(shared), normal(shared), normal(heads))


def written_out(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The formula, with each key head repeated for its query heads."""
    key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for tensor in (key, value))
    scores = query @ key.transpose(2, 3) / query.shape[3] ** 0.5
    future = torch.ones(query.shape[2], query.shape[2], dtype=torch.bool).triu(1)
    return torch.softmax(scores.masked_fill(future, float("-inf")), dim=-1) @ value


def scaled(attend: Callable[[Tensor, Tensor, Tensor, float], Tensor]) -> Attend:
    return lambda query, key, value: attend(query, key, value, query.shape[-1] ** -0.5)


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-12))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_by_hand_is_the_formula_and_its_derivative(shape: tuple[int, int, int, int, int]) -> None:
    case = drawn(*shape).to(torch.float64)
    for found, expected in zip(case.run(scaled(by_hand)), case.run(written_out), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def test_by_hand_takes_values_of_another_width_than_queries() -> None:
    case = drawn(3, 4, 2, 7, 16).to(torch.float64)
    narrow = AttentionCase(case.query, case.key, case.value[..., :10].contiguous(), case.grad[..., :10].contiguous())
    for found, expected in zip(narrow.run(scaled(by_hand)), narrow.run(written_out), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("shape", [shape for shape in SHAPES.values() if shape[3] > 1], ids=lambda shape: f"{shape}")
def test_by_hand_in_bfloat16_errs_from_float32_by_its_rounding_alone(shape: tuple[int, int, int, int, int]) -> None:
    case = drawn(*shape)
    found, expected = case.to(torch.bfloat16).run(scaled(by_hand)), case.run(scaled(by_torch))
    errors = [relative(one, other) for one, other in zip(found, expected, strict=True)]
    assert all(error < bound for error, bound in zip(errors, BOUNDS, strict=True)), errors


def test_short_bfloat16_on_a_cpu_is_computed_by_hand_and_everything_else_by_torch() -> None:
    def chosen(*shape: int, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> object:
        return kernel_for(torch.empty(1, dtype=dtype, device=device).expand(*shape))

    assert chosen(256, 4, 11, 32) is by_hand
    assert chosen(4, 9, 512, 64) is by_hand
    assert chosen(1, 9, 2048, 64) is by_torch
    assert chosen(64, 9, 1024, 64) is by_torch  # its probabilities alone would take more than a GiB
    assert chosen(256, 4, 11, 32, dtype=torch.float32) is by_torch
    assert chosen(256, 4, 11, 32, device="meta") is by_torch


def rows_of(kind: str) -> tuple[list[np.ndarray[tuple[int], np.dtype[np.int64]]], int]:
    """The row's tokens of each sequence, and how many the row has."""
    if kind == "alike":
        return [np.arange(start, start + 9) for start in (0, 9, 18)], 27
    if kind == "padded":
        return [np.arange(0, 7), np.arange(7, 16), np.arange(16, 25)], 25
    if kind == "several rectangles":
        return [np.arange(0, 1), np.arange(1, 3), np.arange(3, 33), np.arange(33, 73)], 73
    if kind == "branches":  # the second leaves the first, the third the second, and the fourth is the beginning of one
        second = np.concatenate([np.arange(10), np.arange(12, 15)])
        third = np.concatenate([second[:11], np.arange(15, 20)])
        return [np.arange(12), second, third, second[:8], np.arange(20, 27)], 27
    shared = np.arange(5)  # a prompt that stands in the row once
    return [np.concatenate([shared, np.arange(start, start + own)]) for start, own in ((5, 4), (9, 6), (15, 3))], 18


KINDS = ["alike", "padded", "several rectangles", "a shared prompt", "branches"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shared", [1, 3, 6])
def test_a_packed_row_in_bfloat16_attends_as_each_sequence_by_itself(kind: str, shared: int) -> None:
    rows, tokens = rows_of(kind)
    index = build_packed_index(rows, tokens=tokens)
    case = drawn(1, 6, shared, tokens, 16)

    def packed(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return packed_attention(torch.nn.Module(), query, key, value, None, packed_index=index)[0].transpose(1, 2)

    def one_by_one(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = torch.zeros_like(query)
        for row in map(torch.from_numpy, rows):
            output = output.index_copy(2, row, written_out(query[:, :, row], key[:, :, row], value[:, :, row]))
        return output

    found, expected = case.to(torch.bfloat16).run(packed), case.run(one_by_one)
    errors = [relative(one, other) for one, other in zip(found, expected, strict=True)]
    assert all(error < bound for error, bound in zip(errors, BOUNDS, strict=True)), errors


class WindowedConfig:
    sliding_window = 4


class WindowedLayer(torch.nn.Module):
    config = WindowedConfig()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rules", ["none", "window", "softcap", "sinks", "all"])
def test_a_packed_row_attends_by_the_rules_as_each_sequence_by_itself(kind: str, rules: str) -> None:
    rows, tokens = rows_of(kind)
    index = build_packed_index(rows, tokens=tokens)
    assert any(bucket.ends is not None for bucket in index.buckets) == (kind in ("branches", "a shared prompt"))
    case = drawn(1, 6, 2, tokens, 16).to(torch.float64)
    window = 4 if rules in ("window", "all") else None
    softcap = 1.5 if rules in ("softcap", "all") else None
    sinks = torch.linspace(-1, 1, 6, dtype=torch.float64) if rules in ("sinks", "all") else None
    layer = torch.nn.Module() if window is None else WindowedLayer()

    def packed(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return packed_attention(layer, query, key, value, None, packed_index=index, softcap=softcap, s_aux=sinks)[
            0
        ].transpose(1, 2)

    def alone(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key, value = (tensor.repeat_interleave(3, dim=1) for tensor in (key, value))
        scores = query @ key.transpose(2, 3) / 4
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        place = torch.arange(query.shape[2])
        behind = place[:, None] - place
        scores = scores.masked_fill((behind < 0) | (behind >= (window or len(place))), float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks.view(1, 6, 1, 1).expand(*scores.shape[:3], 1)], dim=-1)
        return torch.softmax(scores, dim=-1)[..., : len(place)] @ value

    def one_by_one(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = torch.zeros_like(query)
        for row in map(torch.from_numpy, rows):
            output = output.index_copy(2, row, alone(query[:, :, row], key[:, :, row], value[:, :, row]))
        return output

    for found, expected in zip(case.run(packed), case.run(one_by_one), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
