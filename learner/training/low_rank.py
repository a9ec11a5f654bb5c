"""Low-rank terms of several adapters in a packed row: one after another, or all at once where the row is short.

    one after another   inputs[rows] ─▶ @ down^T ─▶ features [t, r] ─▶ @ up^T ─▶ output[rows], for each adapter
    all at once         inputs ─▶ @ downs^T ─▶ features [T, R], 0 outside of an adapter's rows ─▶ @ ups^T ─▶ output

All at once computes products with zeros, and needs as many calls for eight adapters as for one: of few tokens and small
layers a pass consists of calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from learner.training.adapters import Adapter

_PRODUCTS = 1 << 22
"""Up to so many products of numbers, forward, eight adapters take less time at once than one after another."""


@dataclass(frozen=True)
class AdaptedRows:
    """The rows of an input whose outputs get an adapter's term."""

    rows: slice
    pair: Adapter


class RowMasks:
    """The features' masks of a row, made once for all of its layers that have the same adapters."""

    def __init__(self) -> None:
        self._made: dict[tuple[tuple[int, int, int, float], ...], Tensor] = {}

    def of(self, places: Sequence[AdaptedRows], like: Tensor) -> Tensor:
        """[T, R] for inputs `like` [T, in]: the scale of an adapter in its rows and columns, 0 elsewhere. It is float32
        at least: in bfloat16 a scale such as 4/3 would be another one.
        """
        layout = tuple((each.rows.start, each.rows.stop, len(each.pair.down), each.pair.scale) for each in places)
        if layout not in self._made:
            dtype = torch.promote_types(like.dtype, torch.float32)
            mask = like.new_zeros(len(like), sum(rank for *_, rank, _ in layout), dtype=dtype)
            column = 0
            for start, stop, rank, scale in layout:
                mask[start:stop, column : column + rank] = scale
                column += rank
            self._made[layout] = mask
        return self._made[layout]


def at_once(places: Sequence[AdaptedRows], tokens: int, width: int, *, most: int = _PRODUCTS) -> bool:
    """True if the terms are to be computed all at once for so many tokens; `width`: inputs and outputs of the layer."""
    return len(places) > 1 and tokens * width * sum(len(each.pair.down) for each in places) <= most


def with_terms(output: Tensor, inputs: Tensor, places: Sequence[AdaptedRows], masks: RowMasks) -> Tensor:
    """A layer's output [T, out] of its inputs [T, in] with the terms of the adapters in their rows."""
    factors = [factor for each in places for factor in (each.pair.down, each.pair.up)]
    made: Tensor
    if at_once(places, len(inputs), inputs.shape[1] + output.shape[1]):
        made = _TermsAtOnce.apply(output, inputs, masks.of(places, inputs), *factors)  # type: ignore[no-untyped-call]
    else:
        spans = [(each.rows, each.pair.scale) for each in places]
        made = _TermsInTurn.apply(output, inputs, spans, *factors)  # type: ignore[no-untyped-call]
    return made


def features_at_once(inputs: Tensor, places: Sequence[AdaptedRows], masks: RowMasks) -> tuple[Tensor, Tensor]:
    """Features [T, R] of all adapters, 0 outside of their rows, and their ups side by side [out, R]; for autograd."""
    downs = torch.cat([each.pair.down.to(inputs.dtype) for each in places])
    ups = torch.cat([each.pair.up.to(inputs.dtype) for each in places], dim=1)
    features = nn.functional.linear(inputs, downs) * masks.of(places, inputs)
    return features.to(inputs.dtype), ups


class _TermsInTurn(torch.autograd.Function):
    """Terms of `places`, their rows and scale.

    One step of the graph for all of them: as many slices of a row would each fill a gradient of the whole row with
    zeros on the way back.
    """

    @staticmethod
    def forward(
        ctx: Any, plain: Tensor, inputs: Tensor, places: Sequence[tuple[slice, float]], *factors: Tensor
    ) -> Tensor:
        output, features = plain.clone(), []
        for (rows, scale), down, up in zip(places, factors[::2], factors[1::2], strict=True):
            features.append(nn.functional.linear(inputs[rows], down.to(inputs.dtype)) * scale)
            output[rows].addmm_(features[-1], up.to(output.dtype).T)
        ctx.places = places
        ctx.save_for_backward(inputs, *features, *factors)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, *saved = ctx.saved_tensors
        features, factors = saved[: len(ctx.places)], saved[len(ctx.places) :]
        of_inputs = torch.zeros_like(inputs) if ctx.needs_input_grad[1] else None
        of_factors: list[Tensor] = []
        for (rows, scale), feature, down, up in zip(ctx.places, features, factors[::2], factors[1::2], strict=True):
            part = gradient[rows]
            low = (part @ up.to(part.dtype)) * scale
            of_factors += [(low.T @ inputs[rows]).to(down.dtype), (part.T @ feature).to(up.dtype)]
            if of_inputs is not None:
                torch.mm(low, down.to(low.dtype), out=of_inputs[rows])
        return gradient, of_inputs, None, *of_factors


class _TermsAtOnce(torch.autograd.Function):
    """Terms of adapters whose features have the mask [T, R]."""

    @staticmethod
    def forward(ctx: Any, plain: Tensor, inputs: Tensor, mask: Tensor, *factors: Tensor) -> Tensor:
        downs = torch.cat(factors[::2]).to(inputs.dtype)
        ups = torch.cat(factors[1::2], dim=1).to(plain.dtype)
        features = nn.functional.linear(inputs, downs).mul_(mask)
        ctx.save_for_backward(inputs, mask, features, downs, ups)
        ctx.ranks, ctx.kept = [len(down) for down in factors[::2]], factors[0].dtype
        return torch.addmm(plain, features, ups.T)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, mask, features, downs, ups = ctx.saved_tensors
        low = (gradient @ ups).mul_(mask)
        of_downs = torch.split((low.T @ inputs).to(ctx.kept), ctx.ranks)
        of_ups = torch.split((gradient.T @ features).to(ctx.kept), ctx.ranks, dim=1)
        of_inputs = low @ downs if ctx.needs_input_grad[1] else None
        return gradient, of_inputs, None, *(part for pair in zip(of_downs, of_ups, strict=True) for part in pair)
