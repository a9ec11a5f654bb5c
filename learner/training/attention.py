"""Causal attention over a packed row, without a mask of the row's size.

The row's sequences are cut into buckets of similar length. A bucket whose sequences are equally long is a rectangle
already, seen through a view; another is copied to a right-padded rectangle and back. Under a causal mask no token sees
what comes after it, so padding on the right changes nothing, and the result is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

ATTENTION_NAME = "headway_packed"
# A bucket may hold this share of padding. More padding costs arithmetic, more buckets cost calls.
MAX_PADDING = 0.2


@dataclass(frozen=True)
class Bucket:
    """Neighbouring sequences of a row: `tokens` of them, to be seen as [sequences, longest].

    `rectangle` int64 [sequences * longest]: the token in each place, padding naming any; `tokens_at` int64 [tokens]:
    the place of each token; `padding` int64: the places that hold none. All three are absent where there is no
    padding.
    """

    tokens: int
    sequences: int
    longest: int
    rectangle: Tensor | None = None
    tokens_at: Tensor | None = None
    padding: Tensor | None = None


@dataclass(frozen=True)
class PackedIndex:
    """How the T tokens of a row fall into buckets, in the row's order."""

    buckets: tuple[Bucket, ...]

    def to(self, device: torch.device) -> PackedIndex:
        """The same index on `device`."""
        return PackedIndex(buckets=tuple(_bucket_to(bucket, device) for bucket in self.buckets))


def _bucket_to(bucket: Bucket, device: torch.device) -> Bucket:
    if bucket.rectangle is None or bucket.tokens_at is None or bucket.padding is None:
        return bucket
    return Bucket(
        tokens=bucket.tokens,
        sequences=bucket.sequences,
        longest=bucket.longest,
        rectangle=bucket.rectangle.to(device),
        tokens_at=bucket.tokens_at.to(device),
        padding=bucket.padding.to(device),
    )


def build_packed_index(lengths: Sequence[int]) -> PackedIndex:
    """The index of a row whose sequences have these lengths, in this order."""
    buckets: list[Bucket] = []
    current: list[int] = []
    for length in lengths:
        grown = [*current, length]
        if current and 1.0 - sum(grown) / (max(grown) * len(grown)) > MAX_PADDING:
            buckets.append(_bucket(current))
            grown = [length]
        current = grown
    buckets.append(_bucket(current))
    return PackedIndex(buckets=tuple(buckets))


def _bucket(lengths: Sequence[int]) -> Bucket:
    longest, tokens = max(lengths), sum(lengths)
    if tokens == longest * len(lengths):
        return Bucket(tokens=tokens, sequences=len(lengths), longest=longest)
    sizes = torch.tensor(lengths)
    real = torch.arange(longest)[None, :] < sizes[:, None]
    tokens_at = real.flatten().nonzero()[:, 0]
    rectangle = torch.zeros(real.numel(), dtype=torch.int64)
    rectangle[tokens_at] = torch.arange(tokens)
    return Bucket(
        tokens=tokens,
        sequences=len(lengths),
        longest=longest,
        rectangle=rectangle,
        tokens_at=tokens_at,
        padding=(~real).flatten().nonzero()[:, 0],
    )


class _ToRectangle(torch.autograd.Function):
    """[tokens, ...] to [places, ...]. Backward copies the places of tokens, where autograd would add rows up."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, flat: Tensor, rectangle: Tensor, tokens_at: Tensor) -> Tensor:
        ctx.save_for_backward(tokens_at)
        return flat.index_select(0, rectangle)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor, None, None]:
        (tokens_at,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return grads[0].index_select(0, tokens_at), None, None


class _FromRectangle(torch.autograd.Function):
    """[places, ...] to [tokens, ...]. Backward puts zeros where there is padding."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, places: Tensor, rectangle: Tensor, tokens_at: Tensor, padding: Tensor
    ) -> Tensor:
        ctx.save_for_backward(rectangle, padding)
        return places.index_select(0, tokens_at)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        rectangle, padding = ctx.saved_tensors  # type: ignore[attr-defined]
        return grads[0].index_select(0, rectangle).index_fill_(0, padding, 0), None, None, None


def _attend(query: Tensor, key: Tensor, value: Tensor, *, bucket: Bucket, scaling: float | None) -> Tensor:
    """query [tokens, H, D]; key and value [tokens, K, D], H a multiple of K. Returns [tokens, H, D]."""
    attended = torch.nn.functional.scaled_dot_product_attention(
        _as_rectangle(query, bucket),
        _as_rectangle(key, bucket),
        _as_rectangle(value, bucket),
        is_causal=bucket.longest > 1,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    places = attended.transpose(1, 2).flatten(0, 1)
    if bucket.rectangle is None or bucket.tokens_at is None or bucket.padding is None:
        return places
    taken: Tensor = _FromRectangle.apply(  # type: ignore[no-untyped-call]
        places, bucket.rectangle, bucket.tokens_at, bucket.padding
    )
    return taken


def _as_rectangle(flat: Tensor, bucket: Bucket) -> Tensor:
    """[tokens, H, D] to [sequences, H, longest, D]."""
    places = flat
    if bucket.rectangle is not None:
        places = _ToRectangle.apply(flat, bucket.rectangle, bucket.tokens_at)  # type: ignore[no-untyped-call]
    return places.view(bucket.sequences, bucket.longest, *flat.shape[1:]).transpose(1, 2)


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed_index: PackedIndex,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: object,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence of a packed row, in the form that transformers calls.

    query [1, H, T, D], key and value [1, K, T, D]; returns [1, T, H, D]. `packed_index` reaches it through the model's
    keyword arguments. Dropout and a sliding window are refused.
    """
    assert attention_mask is None, "a packed row has no mask"
    assert dropout == 0.0, "attention dropout in training is not supported"
    flat = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
    if len(packed_index.buckets) == 1:
        return _attend(*flat, bucket=packed_index.buckets[0], scaling=scaling)[None], None
    sizes = [bucket.tokens for bucket in packed_index.buckets]
    parts = zip(packed_index.buckets, *(torch.split(tensor, sizes) for tensor in flat), strict=True)
    return torch.cat([_attend(q, k, v, bucket=bucket, scaling=scaling) for bucket, q, k, v in parts])[None], None


def _no_mask(**_: object) -> None:
    return None


def register_packed_attention() -> None:
    """Makes `attn_implementation=ATTENTION_NAME` known to transformers. May be called again."""
    AttentionInterface.register(ATTENTION_NAME, packed_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, _no_mask)
