"""Attention within the sequences of a packed row, and what computes it.

It is causal, without a mask of the row's size. The row's sequences are cut into buckets of similar length, each copied
to a right-padded rectangle and back. Under a causal mask no token sees what comes after it, so padding on the right
changes nothing. A prefix that sequences share stands in the row once and in each of their rectangles; what the first of
them computes for it is kept. Of sequences that are shared for the most part only the ends ask: rectangles [S, H, Q, D]
of queries over those of keys. All of it is exact.

    [T, H, D] of a row ─▶ rectangle [S, H, L, D] ─▶ kernel_for(its shape, type and device) ─▶ [T, H, D]

On a GPU, in a type of 16 bits, the row goes through one call as it is (`varlen`). The kernels here all take a
rectangle; one of another package has its place in `kernel_for`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from learner.training import varlen
from learner.training.sequence_groups import HeadExchange
from learner.training.unfit_model import UnfitModel

Kernel = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""Causal attention of query [S, H, L, D] over key and value [S, K, L, D], H a multiple of K, scores multiplied by the
last argument; returns [S, H, L, D].
"""

# Above this many tokens torch's own kernel is as fast, which never holds more than a tile of the probabilities.
_MAX_BY_HAND = 1024
# Below, keeping the probabilities costs less memory than what other layers keep; above, they are computed once more.
_MAX_KEPT = 256
# The most elements of the probabilities that one call may hold: half a GiB in bfloat16.
_MAX_PROBABILITIES = 1 << 28
# The most pairs of a query and a key in the ends of a bucket: they have a mask, of a byte for each.
_MAX_SEEN = 1 << 28
ATTENTION_NAME = "headway_packed"
# What transformers passes that changes nothing: places are in the queries, and nothing is cached or shown.
_HARMLESS = frozenset(
    {"position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states", "output_router_logits"}
)
# A bucket may hold this share of padding. More padding costs arithmetic, more buckets cost calls.
MAX_PADDING = 0.2


def kernel_for(query: Tensor) -> Kernel:
    """The kernel that computes attention of a query [S, H, L, D] fastest, forward and backward.

    In bfloat16 on a CPU the backward pass of torch's kernel takes most of the time of short sequences, several times
    what plain products take. In float32, and for long sequences, it is the fastest; on GPUs, at all lengths.
    """
    sequences, heads, length, _ = query.shape
    short = length <= _MAX_BY_HAND and sequences * heads * length * length <= _MAX_PROBABILITIES
    if query.device.type == "cpu" and query.dtype == torch.bfloat16 and short:
        return by_hand
    return by_torch


def by_torch(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """The kernel that torch chooses: flash where it has one."""
    return torch.nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        is_causal=query.shape[2] > 1,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def by_hand(query: Tensor, key: Tensor, value: Tensor, scaling: float, seen: Tensor | None = None) -> Tensor:
    """Products of matrices in the inputs' type, the query heads of one key head as rows of one matrix.

    `seen` bool [S, Q, L] says which keys each of Q queries sees; without it, that is causal.
    """
    attended: Tensor = _ByHand.apply(query, key, value, scaling, seen)  # type: ignore[no-untyped-call]
    return attended


class _ByHand(torch.autograd.Function):
    """With B = S K matrices, and R = H / K Q rows of queries in each."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, query: Tensor, key: Tensor, value: Tensor, scaling: float, seen: Tensor | None
    ) -> Tensor:
        folded, key_rows, value_rows = _folded(query, key), key.flatten(0, 1), value.flatten(0, 1)
        probabilities = _probabilities(folded, key_rows, scaling, seen)
        kept = (probabilities,) if key.shape[2] <= _MAX_KEPT else ()
        ctx.seen = seen  # type: ignore[attr-defined]
        ctx.save_for_backward(folded, key_rows, value_rows, *kept)
        ctx.shapes = (query.shape, key.shape, value.shape)  # type: ignore[attr-defined]
        ctx.scaling = scaling  # type: ignore[attr-defined]
        # Values of latent attention have another width than queries and keys.
        return torch.bmm(probabilities, value_rows).view(*query.shape[:3], value.shape[3])

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        folded, key_rows, value_rows, *kept = ctx.saved_tensors  # type: ignore[attr-defined]
        of_query, of_key, of_value = ctx.shapes  # type: ignore[attr-defined]
        scaling: float = ctx.scaling  # type: ignore[attr-defined]
        grad = grads[0].reshape(*folded.shape[:2], of_value[3])
        seen: Tensor | None = ctx.seen  # type: ignore[attr-defined]
        probabilities = kept[0] if kept else _probabilities(folded, key_rows, scaling, seen)
        grad_value = torch.bmm(probabilities.transpose(1, 2), grad)
        grad_scores = torch._softmax_backward_data(
            torch.bmm(grad, value_rows.transpose(1, 2)), probabilities, -1, probabilities.dtype
        )
        grad_query = torch.bmm(grad_scores, key_rows).mul_(scaling)
        grad_key = torch.bmm(grad_scores.transpose(1, 2), folded).mul_(scaling)
        return grad_query.view(of_query), grad_key.view(of_key), grad_value.view(of_value), None, None


def _folded(query: Tensor, key: Tensor) -> Tensor:
    """[S, H, Q, D] to [S K, H / K Q, D]."""
    return query.reshape(key.shape[0] * key.shape[1], -1, query.shape[3])


def _probabilities(folded: Tensor, key_rows: Tensor, scaling: float, seen: Tensor | None) -> Tensor:
    """folded [B, R, D] and key_rows [B, L, D] to [B, R, L]; 0 where a row's token would see a later one."""
    length = key_rows.shape[1]
    if seen is not None:
        scores = torch.bmm(folded, key_rows.transpose(1, 2)).mul_(scaling)
        scores.view(len(seen), -1, *seen.shape[1:]).masked_fill_(~seen[:, None], float("-inf"))
        return torch.softmax(scores, dim=-1)
    mask = folded.new_full((length, length), float("-inf")).triu_(1).repeat(folded.shape[1] // length, 1)
    return torch.softmax(torch.baddbmm(mask, folded, key_rows.transpose(1, 2), alpha=scaling), dim=-1)


@dataclass(frozen=True)
class ScoreRules:
    """Rules of scores beyond plain causal attention: a query sees the keys less than `window` before it; scores s are
    `softcap` tanh(s / softcap); and `sinks` [H] are scores of a key more, whose value is 0.
    """

    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


def kernel_seeing(rules: ScoreRules, query: Tensor, places: Tensor, *, keys: int) -> Kernel:
    """The kernel for a query [S, H, Q, D] over L = `keys` keys, under `rules`; `places` int64 [S, Q] are those of the
    queries among the keys, of which each sees those up to its own.
    """
    key = torch.arange(keys, device=query.device)
    seen = key <= places[..., None]
    if rules.window is not None and rules.window < keys:
        seen &= key > places[..., None] - rules.window
    if rules.softcap is not None or rules.sinks is not None:
        return lambda query, key, value, scaling: _by_formula(query, key, value, scaling, seen=seen, rules=rules)
    sequences, heads, queries, _ = query.shape
    short = keys <= _MAX_BY_HAND and sequences * heads * queries * keys <= _MAX_PROBABILITIES
    if query.device.type == "cpu" and query.dtype == torch.bfloat16 and short:
        return lambda query, key, value, scaling: by_hand(query, key, value, scaling, seen)
    return lambda query, key, value, scaling: torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=seen[:, None], scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
    )


def kernel_with(rules: ScoreRules, query: Tensor) -> Kernel:
    """The kernel for a query [S, H, L, D] under `rules`; the fastest one where they change nothing."""
    length = query.shape[2]
    windowed = rules.window is not None and rules.window < length
    if rules.softcap is None and rules.sinks is None and not windowed:
        return kernel_for(query)
    place = torch.arange(length, device=query.device)
    distance = place[:, None] - place[None, :]
    seen = (distance >= 0) & (distance < (rules.window or length)) if windowed else distance >= 0
    if rules.softcap is None and rules.sinks is None:
        return lambda query, key, value, scaling: torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=seen, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
        )
    return lambda query, key, value, scaling: _by_formula(query, key, value, scaling, seen=seen, rules=rules)


def _by_formula(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, *, seen: Tensor, rules: ScoreRules
) -> Tensor:
    """The formula with a softmax in float32 (float64 for float64); all probabilities are held. `seen` bool [L, L], or
    [S, Q, L] of Q queries.
    """
    grouped = query.reshape(*key.shape[:2], -1, *query.shape[2:])
    scores = (grouped @ key[:, :, None].transpose(-1, -2)).to(torch.promote_types(query.dtype, torch.float32)) * scaling
    if rules.softcap is not None:
        scores = rules.softcap * torch.tanh(scores / rules.softcap)
    scores = scores.masked_fill(~(seen if seen.dim() == 2 else seen[:, None, None]), float("-inf"))
    if rules.sinks is not None:
        sinks = rules.sinks.to(scores).view(1, *grouped.shape[1:3], 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    probabilities = torch.softmax(scores, dim=-1)[..., : key.shape[2]]
    return (probabilities.to(value.dtype) @ value[:, :, None]).flatten(1, 2)


@dataclass(frozen=True)
class BucketEnds:
    """The last `longest` tokens of each sequence of a bucket, which are all that is asked for: [sequences, longest].

    int64 [sequences * longest]: `rectangle`, the row's token in each place, and `positions`, its own among its
    sequence's; `places` int64 [n]: as of the bucket.
    """

    longest: int
    rectangle: Tensor
    positions: Tensor
    places: Tensor

    def to(self, device: torch.device) -> BucketEnds:
        """The same ends on `device`."""
        return BucketEnds(
            longest=self.longest,
            rectangle=self.rectangle.to(device),
            positions=self.positions.to(device),
            places=self.places.to(device),
        )


@dataclass(frozen=True)
class LengthBucket:
    """Sequences of like length, seen as [sequences, longest].

    `rectangle` int64 [sequences * longest]: the row's token in each place, padding naming any. `places` int64 [n]: the
    places whose results are kept, one for each token that is first seen in this bucket. `ends`: where all of these are,
    if that is a small part of the rectangle.
    """

    sequences: int
    longest: int
    rectangle: Tensor
    places: Tensor
    ends: BucketEnds | None = None


@dataclass(frozen=True)
class PackedIndex:
    """Buckets of the T tokens of a row. `order` int64 [T]: where, in the buckets' results put end to end,
    each token's is; absent if they come in the row's order. `spans`: the same sequences without buckets, if the row's
    order allows it.
    """

    buckets: tuple[LengthBucket, ...]
    order: Tensor | None
    spans: varlen.SequenceSpans | None

    def to(self, device: torch.device) -> PackedIndex:
        """The same index on `device`."""
        return PackedIndex(
            buckets=tuple(
                LengthBucket(
                    sequences=bucket.sequences,
                    longest=bucket.longest,
                    rectangle=bucket.rectangle.to(device),
                    places=bucket.places.to(device),
                    ends=None if bucket.ends is None else bucket.ends.to(device),
                )
                for bucket in self.buckets
            ),
            order=None if self.order is None else self.order.to(device),
            spans=None if self.spans is None else self.spans.to(device),
        )


def build_packed_index(rows: Sequence[NDArray[np.int64]], *, tokens: int) -> PackedIndex:
    """The index of a row of `tokens` tokens; `rows` are those of each sequence, and every token is in one at least."""
    own, owned = [], np.zeros(tokens, dtype=np.bool_)
    for row in rows:
        own.append(~owned[row])
        owned[row] = True
    results: list[NDArray[np.int64]] = []
    buckets: list[LengthBucket] = []
    # Those that others have begun have buckets of their own, in which only their ends are computed; those that others
    # are wholly have none.
    begun = [not mine[: (len(mine) + 1) // 2].any() for mine in own]
    for kind in (False, True):
        chosen = [number for number, each in enumerate(begun) if each == kind and own[number].any()]
        for part in _similar([rows[number] for number in chosen]):
            members = [chosen[place] for place in part]
            bucket, kept = _bucket([rows[each] for each in members], [own[each] for each in members], ends=kind)
            buckets.append(bucket)
            results.append(kept)
    order = np.argsort(np.concatenate(results), kind="stable")
    in_order = bool((order == np.arange(tokens)).all())
    return PackedIndex(
        buckets=tuple(buckets),
        order=None if in_order else torch.from_numpy(order),
        spans=varlen.sequence_spans(rows, tokens=tokens),
    )


def _similar(rows: Sequence[NDArray[np.int64]]) -> list[list[int]]:
    """Neighbours together, by their places, as long as their rectangle holds little padding."""
    groups: list[list[int]] = []
    total = longest = 0
    for place, row in enumerate(rows):
        total, longest = total + len(row), max(longest, len(row))
        if not groups or 1.0 - total / (longest * (len(groups[-1]) + 1)) > MAX_PADDING:
            groups.append([])
            total = longest = len(row)
        groups[-1].append(place)
    return groups


def _bucket(
    members: Sequence[NDArray[np.int64]], own: Sequence[NDArray[np.bool_]], *, ends: bool
) -> tuple[LengthBucket, NDArray[np.int64]]:
    """The bucket, and the row's tokens whose results it gives: those that are the sequences' `own`."""
    lengths = np.array([len(row) for row in members])
    longest = int(lengths.max())
    real = np.arange(longest)[None, :] < lengths[:, None]
    rectangle = np.zeros(real.shape, dtype=np.int64)
    rectangle[real] = np.concatenate(members)
    kept = np.zeros(real.shape, dtype=np.bool_)
    kept[real] = np.concatenate(own)
    bucket = LengthBucket(
        sequences=len(members),
        longest=longest,
        rectangle=torch.from_numpy(rectangle.reshape(-1)),
        places=torch.from_numpy(np.flatnonzero(kept)),
        ends=_ends(rectangle, kept, lengths) if ends else None,
    )
    return bucket, rectangle[kept]


def _ends(rectangle: NDArray[np.int64], kept: NDArray[np.bool_], lengths: NDArray[np.int64]) -> BucketEnds | None:
    """The ends of the sequences of a rectangle [S, L] from the first token on that is `kept` [S, L], which each has;
    None if their mask would be too large.
    """
    longest = int((lengths - kept.argmax(axis=1)).max())
    if longest * rectangle.size > _MAX_SEEN:
        return None
    # A sequence that is shorter than that begins with padding, which sees its first key, and is not kept.
    positions = lengths[:, None] - longest + np.arange(longest)[None, :]
    among = np.maximum(positions, 0)
    rows = np.arange(len(lengths))[:, None]
    return BucketEnds(
        longest=longest,
        rectangle=torch.from_numpy(rectangle[rows, among].reshape(-1)),
        positions=torch.from_numpy(among.reshape(-1)),
        places=torch.from_numpy(np.flatnonzero(kept[rows, among] & (positions >= 0))),
    )


def _attend(
    query: Tensor, key: Tensor, value: Tensor, *, bucket: LengthBucket, scaling: float, rules: ScoreRules
) -> Tensor:
    """query [T, H, D]; key and value [T, K, D], H a multiple of K. Returns [n, H, D] for the bucket's kept places."""
    # Of a token's copies one is kept: gradients of its others are 0, and any type adds them up exactly.
    ends = bucket.ends
    longest, asked = (bucket.longest, bucket.rectangle) if ends is None else (ends.longest, ends.rectangle)
    asking = _as_rectangle(query.index_select(0, asked), bucket.sequences, longest)
    keys, values = (
        _as_rectangle(varlen.gather_summing(flat, bucket.rectangle), bucket.sequences, bucket.longest)
        for flat in (key, value)
    )
    if ends is None:
        kernel, places = kernel_with(rules, asking), bucket.places
    else:
        positions = ends.positions.view(bucket.sequences, longest)
        kernel, places = kernel_seeing(rules, asking, positions, keys=bucket.longest), ends.places
    attended = kernel(asking, keys, values, scaling)
    return attended.transpose(1, 2).flatten(0, 1).index_select(0, places)


def _as_rectangle(places: Tensor, sequences: int, longest: int) -> Tensor:
    """[sequences * longest, H, D] to [sequences, H, longest, D]."""
    return places.view(sequences, longest, *places.shape[1:]).transpose(1, 2)


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed_index: PackedIndex,
    head_exchange: HeadExchange | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence of a packed row, in the form that transformers calls.

    query [1, H, T, D], key and value [1, K, T, D]; returns [1, T, H, D]. `packed_index` reaches it through the model's
    keyword arguments, and so does `head_exchange` where ranks share the row: T is then the number of this one's tokens.
    Dropout is refused, and every other argument that may change the result is a ValueError.
    """
    assert attention_mask is None, "a packed row has no mask"
    assert dropout == 0.0, "attention dropout in training is not supported"
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    _refuse_others(module, {**others, "is_causal": None if causal else False})
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if head_exchange is not None:
        head_exchange.check(query.shape[1], layer=type(module).__name__)
        query, key, value = map(head_exchange.to_heads, (query, key, value))
        s_aux = None if s_aux is None else head_exchange.own_heads(s_aux)
    rules = ScoreRules(window=_window_of(module, sliding_window), softcap=softcap, sinks=s_aux)
    attended = _attended(query, key, value, index=packed_index, scaling=scaling, rules=rules)
    return (attended if head_exchange is None else head_exchange.to_tokens(attended))[None], None


def _attended(
    query: Tensor, key: Tensor, value: Tensor, *, index: PackedIndex, scaling: float, rules: ScoreRules
) -> Tensor:
    """query [T, H, D], key and value [T, K, D] of a whole row, to [T, H, D]."""
    kernel, spans = _kernel_of_rows(query, value, index=index, rules=rules), index.spans
    if kernel is not None and spans is not None:
        return varlen.attend_spans(query, key, value, kernel=kernel, spans=spans, scaling=scaling, window=rules.window)
    parts = [_attend(query, key, value, bucket=bucket, scaling=scaling, rules=rules) for bucket in index.buckets]
    attended = parts[0] if len(parts) == 1 else torch.cat(parts)
    return attended if index.order is None else attended.index_select(0, index.order)


def _kernel_of_rows(
    query: Tensor, value: Tensor, *, index: PackedIndex, rules: ScoreRules
) -> varlen.VarlenKernel | None:
    """The kernel that takes the row in one call; None if there is none, or rectangles are faster."""
    if rules.softcap is not None or rules.sinks is not None:
        return None
    (bucket, *others), spans = index.buckets, index.spans
    alike = rules.window is None and not others and spans is not None and spans.keys is None
    if alike and bucket.sequences * bucket.longest**2 > varlen.MANY_SCORES:
        return None
    return varlen.kernel_taking(query, value)


def _refuse_others(module: torch.nn.Module, others: Mapping[str, object]) -> None:
    unknown = sorted(name for name, value in others.items() if value is not None and name not in _HARMLESS)
    if unknown:
        raise UnfitModel(
            f"{type(module).__name__} gives attention the argument {unknown[0]}, which attention of packed rows does "
            "not know: expected causal attention, with a sliding window, softcap or sinks at most. Name another model."
        )


def _window_of(module: torch.nn.Module, given: int | None) -> int | None:
    """The layer's sliding window: `given`, or its config's, where a model's layers leave that to their mask."""
    config = getattr(module, "config", None)
    # A config that merely carries such a number, as one of Llama may, has no field for it.
    if given is not None or not hasattr(type(config), "sliding_window"):
        return given
    kinds, layer = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    if kinds and layer is not None and kinds[layer] != "sliding_attention":
        return None
    window: int | None = getattr(config, "sliding_window", None)
    return window


def _no_mask(**_: object) -> None:
    return None


def register_packed_attention() -> None:
    """Makes `attn_implementation=ATTENTION_NAME` known to transformers. May be called again."""
    # Where layers are compiled it is not: a part ends before it, and the next begins after it.
    untraced = torch.compiler.disable(packed_attention)  # type: ignore[no-untyped-call]
    AttentionInterface.register(ATTENTION_NAME, untraced)
    AttentionMaskInterface.register(ATTENTION_NAME, _no_mask)
