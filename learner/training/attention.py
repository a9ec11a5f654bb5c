"""Causal attention over a packed row, without a mask of the row's size.

The row's sequences are cut into buckets of similar length, each copied to a right-padded rectangle and back. Under a
causal mask no token sees what comes after it, so padding on the right changes nothing. A prefix that sequences share
stands in the row once and in each of their rectangles; what the first of them computes for it is kept. Both are exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

ATTENTION_NAME = "headway_packed"
# A bucket may hold this share of padding. More padding costs arithmetic, more buckets cost calls.
MAX_PADDING = 0.2


@dataclass(frozen=True)
class LengthBucket:
    """Sequences of like length, seen as [sequences, longest].

    `rectangle` int64 [sequences * longest]: the row's token in each place, padding naming any. `places` int64 [n]: the
    places whose results are kept, one for each token that is first seen in this bucket.
    """

    sequences: int
    longest: int
    rectangle: Tensor
    places: Tensor


@dataclass(frozen=True)
class PackedIndex:
    """How the T tokens of a row fall into buckets. `order` int64 [T]: where, in the buckets' results put end to end,
    each token's is; absent if they come in the row's order.
    """

    buckets: tuple[LengthBucket, ...]
    order: Tensor | None

    def to(self, device: torch.device) -> PackedIndex:
        """The same index on `device`."""
        return PackedIndex(
            buckets=tuple(
                LengthBucket(
                    sequences=bucket.sequences,
                    longest=bucket.longest,
                    rectangle=bucket.rectangle.to(device),
                    places=bucket.places.to(device),
                )
                for bucket in self.buckets
            ),
            order=None if self.order is None else self.order.to(device),
        )


def build_packed_index(rows: Sequence[NDArray[np.int64]], *, tokens: int) -> PackedIndex:
    """The index of a row of `tokens` tokens; `rows` are those of each sequence, and every token is in one at least."""
    owned = np.zeros(tokens, dtype=np.bool_)
    results: list[NDArray[np.int64]] = []
    buckets: list[LengthBucket] = []
    for members in _similar(rows):
        bucket, kept = _bucket(members, owned)
        buckets.append(bucket)
        results.append(kept)
    order = np.argsort(np.concatenate(results), kind="stable")
    in_order = bool((order == np.arange(tokens)).all())
    return PackedIndex(
        buckets=tuple(buckets),
        order=None if in_order else torch.from_numpy(order),
    )


def _similar(rows: Sequence[NDArray[np.int64]]) -> list[list[NDArray[np.int64]]]:
    """Neighbours together, as long as their rectangle holds little padding."""
    groups: list[list[NDArray[np.int64]]] = [[]]
    total = longest = 0
    for row in rows:
        total, longest = total + len(row), max(longest, len(row))
        if groups[-1] and 1.0 - total / (longest * (len(groups[-1]) + 1)) > MAX_PADDING:
            groups.append([])
            total = longest = len(row)
        groups[-1].append(row)
    return groups


def _bucket(members: Sequence[NDArray[np.int64]], owned: NDArray[np.bool_]) -> tuple[LengthBucket, NDArray[np.int64]]:
    """The bucket, and the row's tokens whose results it gives, which are marked as owned."""
    lengths = np.array([len(row) for row in members])
    longest = int(lengths.max())
    real = np.arange(longest)[None, :] < lengths[:, None]
    rectangle = np.zeros(real.shape, dtype=np.int64)
    rectangle[real] = np.concatenate(members)
    found, first = np.unique(rectangle[real], return_index=True)
    first = np.sort(first[~owned[found]])
    places = np.flatnonzero(real)[first]
    kept = rectangle.reshape(-1)[places]
    owned[kept] = True
    bucket = LengthBucket(
        sequences=len(members),
        longest=longest,
        rectangle=torch.from_numpy(rectangle.reshape(-1)),
        places=torch.from_numpy(places),
    )
    return bucket, kept


class _ToRectangle(torch.autograd.Function):
    """[T, ...] to [places, ...]. What comes back to padding is 0, and to a repeated token is added up."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, flat: Tensor, rectangle: Tensor) -> Tensor:
        ctx.save_for_backward(rectangle)
        ctx.tokens = len(flat)  # type: ignore[attr-defined]
        return flat.index_select(0, rectangle)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor, None]:
        (rectangle,) = ctx.saved_tensors  # type: ignore[attr-defined]
        summed = grads[0].new_zeros(ctx.tokens, *grads[0].shape[1:])  # type: ignore[attr-defined]
        return summed.index_add_(0, rectangle, grads[0]), None


def _attend(query: Tensor, key: Tensor, value: Tensor, *, bucket: LengthBucket, scaling: float | None) -> Tensor:
    """query [T, H, D]; key and value [T, K, D], H a multiple of K. Returns [n, H, D] for the bucket's kept places."""
    attended = torch.nn.functional.scaled_dot_product_attention(
        _as_rectangle(query, bucket),
        _as_rectangle(key, bucket),
        _as_rectangle(value, bucket),
        is_causal=bucket.longest > 1,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return attended.transpose(1, 2).flatten(0, 1).index_select(0, bucket.places)


def _as_rectangle(flat: Tensor, bucket: LengthBucket) -> Tensor:
    """[T, H, D] to [sequences, H, longest, D]."""
    places: Tensor = _ToRectangle.apply(flat, bucket.rectangle)  # type: ignore[no-untyped-call]
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
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    parts = [_attend(query, key, value, bucket=bucket, scaling=scaling) for bucket in packed_index.buckets]
    attended = parts[0] if len(parts) == 1 else torch.cat(parts)
    if packed_index.order is not None:
        attended = attended.index_select(0, packed_index.order)
    return attended[None], None


def _no_mask(**_: object) -> None:
    return None


def register_packed_attention() -> None:
    """Makes `attn_implementation=ATTENTION_NAME` known to transformers. May be called again."""
    AttentionInterface.register(ATTENTION_NAME, packed_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, _no_mask)
