"""Attention of a packed row in one call, by torch's flash kernel for sequences of unequal lengths.

Each sequence asks with the tokens that are first seen in it, and sees all of its own, a prefix that it shares with
others among them; nothing is padded, and nothing copied but the keys and values of shared prefixes. The last query of a
sequence stands at its last key, so that causal attention counts from the end of both.

    query [T, H, D] of a row, as it lies ─▶ one call ─▶ [T, H, D]
    key, value [T, K, D] ─▶ as they lie, or gathered [n, K, D] ─▶
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

# Scores of a row above which its sequences, if they make one rectangle, are computed faster there: on an H200 cuDNN's
# kernel takes 0.7 of FlashAttention-2's time, once that outweighs the copies (benchmarks/results/gpu.md).
MANY_SCORES = 1 << 25
# What FlashAttention-2 computes with.
_DTYPES = (torch.bfloat16, torch.float16)
_MAX_WIDTH, _WIDTHS = 256, 8


@dataclass(frozen=True)
class SequenceSpans:
    """Where the S sequences of a row lie: int32 [S + 1] `query_starts` among the row's T tokens, and `key_starts` among
    the keys; the longest of both. `keys` int64 [n]: the row's token at each key; absent if the keys are the row.
    """

    query_starts: Tensor
    key_starts: Tensor
    longest_query: int
    longest_key: int
    keys: Tensor | None

    def to(self, device: torch.device) -> SequenceSpans:
        """The same spans on `device`."""
        return SequenceSpans(
            query_starts=self.query_starts.to(device),
            key_starts=self.key_starts.to(device),
            longest_query=self.longest_query,
            longest_key=self.longest_key,
            keys=None if self.keys is None else self.keys.to(device),
        )


def sequence_spans(rows: Sequence[NDArray[np.int64]], *, tokens: int) -> SequenceSpans | None:
    """The spans of a row of `tokens` tokens, of which each sequence has `rows`. None for a row in which the tokens that
    are first seen in a sequence are not its last ones, or do not lie one after the other.
    """
    begins = 0
    queries, keys = [], []
    for row in rows:
        own = row[row >= begins]
        if len(own) and not np.array_equal(own, np.arange(begins, begins + len(own))):
            return None
        if not np.array_equal(row[len(row) - len(own) :], own):
            return None
        begins += len(own)
        # One that has nothing of its own asks nothing.
        if len(own):
            queries.append(len(own))
            keys.append(row)
    if begins != tokens:
        return None
    lengths = [len(row) for row in keys]
    shares = lengths != queries
    return SequenceSpans(
        query_starts=_starts(queries),
        key_starts=_starts(lengths),
        longest_query=max(queries),
        longest_key=max(lengths),
        keys=torch.from_numpy(np.concatenate(keys)) if shares else None,
    )


def _starts(lengths: Sequence[int]) -> Tensor:
    return torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))


class VarlenKernel(Protocol):
    """Causal attention of query [T, H, D] over key and value [n, K, D] within spans."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, spans: SequenceSpans, scaling: float, window: int | None
    ) -> Tensor:
        """[T, H, D]; scores are multiplied by `scaling`, and a query sees the keys less than `window` before it."""


@cache
def torch_kernel() -> VarlenKernel | None:
    """Torch's own kernel; None where torch has none, or an older one."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    known = inspect.signature(varlen_attn).parameters
    if not {"scale", "window_size"} <= known.keys():
        return None
    # Before it had this argument it took fewer heads of keys without being told.
    named: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in known else {}

    def attend(
        query: Tensor, key: Tensor, value: Tensor, *, spans: SequenceSpans, scaling: float, window: int | None
    ) -> Tensor:
        attended = varlen_attn(
            query,
            key,
            value,
            spans.query_starts,
            spans.key_starts,
            spans.longest_query,
            spans.longest_key,
            scale=scaling,
            # To the left of a query, which sees itself besides; nothing to the right.
            window_size=(-1 if window is None or window >= spans.longest_key else window - 1, 0),
            **named,
        )
        assert isinstance(attended, Tensor), "nothing more was asked for"
        return attended

    return attend


def kernel_taking(query: Tensor, value: Tensor) -> VarlenKernel | None:
    """A kernel for a query [T, H, D] and values [n, K, E] of this type, width and device; None if there is none."""
    width = query.shape[2]
    if query.device.type != "cuda" or query.dtype not in _DTYPES:
        return None
    if width > _MAX_WIDTH or width % _WIDTHS or value.shape[2] != width or not _has_flash(query.device):
        return None
    return torch_kernel()


@cache
def _has_flash(device: torch.device) -> bool:
    """True if torch was built with FlashAttention, and the GPU is one of those that it is for: from Ampere on."""
    return torch.backends.cuda.is_flash_attention_available() and torch.cuda.get_device_capability(device) >= (8, 0)


def attend_spans(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    kernel: VarlenKernel,
    spans: SequenceSpans,
    scaling: float,
    window: int | None,
) -> Tensor:
    """[T, H, D] of query [T, H, D], key and value [T, K, D] of a row. Gradients of what sequences share are added in
    float32.
    """
    if spans.keys is not None:
        key, value = gather_summing(key, spans.keys), gather_summing(value, spans.keys)
    return kernel(query, key, value, spans=spans, scaling=scaling, window=window)


def gather_summing(flat: Tensor, places: Tensor) -> Tensor:
    """`flat` [T, ...] at `places` int64 [n], to [n, ...]. What comes back to a place is added up in float32."""
    gathered: Tensor = _GatherSumming.apply(flat, places)  # type: ignore[no-untyped-call]
    return gathered


class _GatherSumming(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, flat: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.tokens = len(flat)  # type: ignore[attr-defined]
        return flat.index_select(0, places)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor, None]:
        (places,) = ctx.saved_tensors  # type: ignore[attr-defined]
        dtype = torch.promote_types(grads[0].dtype, torch.float32)
        summed = grads[0].new_zeros(ctx.tokens, *grads[0].shape[1:], dtype=dtype)  # type: ignore[attr-defined]
        return summed.index_add_(0, places, grads[0].to(dtype)).to(grads[0].dtype), None
