"""Layouts in which a decoder meets a microbatch: its packed row, or rectangles of whole sequences.

A packed row goes through the model as it is, if each of its layers keeps the row's sequences apart. A layer with a
recurrent state, a convolution over tokens, or attention of a kind of its own would run from one sequence into the next:
such a model takes rectangles [sequences, longest], padded on the right, as in transformers' own batches. No token sees
what comes after it, so the padding changes nothing. A prompt that sequences share is computed for each of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

from learner.training.attention import ATTENTION_NAME, LengthBucket, PackedIndex
from learner.training.packing import PackedRow
from learner.training.router_replay import GivenExperts, RouterReplay
from learner.training.routing import ExpertWatch, RoutingSums
from learner.training.sequence_groups import HeadExchange


def takes_packed_rows(model: nn.Module) -> bool:
    """True if the attention that the model of transformers was loaded with is that of packed rows."""
    return _attention_of(model) == ATTENTION_NAME


def last_states(
    model: nn.Module,
    row: PackedRow,
    *,
    watch: ExpertWatch | None = None,
    replay: RouterReplay | None = None,
    exchange: HeadExchange | None = None,
) -> tuple[Tensor, RoutingSums | None]:
    """The last hidden states [T, H] of the row's T tokens, in the row's order, whichever layout the model takes; and
    the sums that `watch` made of its routers, None without `watch`, or where a layer's experts were given no choice.
    With `replay` routers take the experts that the row has, if it has any. With `exchange` the row is this rank's part
    of one that ranks share, and the model takes packed rows.
    """
    decoder = _decoder_of(model)
    if takes_packed_rows(model):
        named: dict[str, object] = {"position_ids": row.positions[None], "packed_index": row.index}
        if exchange is not None:
            named["head_exchange"] = exchange
        given = None if replay is None else row.routing
        hidden, routing = _run(
            decoder, row.token_ids[None], watch=watch, replay=replay, given=given, counts=row.counts, **named
        )
        return hidden[0], routing
    assert exchange is None, "rectangles are of whole rows"
    states, sums = [], []
    for bucket in _rectangles(model, row.index):
        rows = row.token_ids.index_select(0, bucket.rectangle).view(bucket.sequences, bucket.longest)
        # A shared token counts at its first copy alone, which is at one of the places.
        counts = torch.zeros_like(bucket.rectangle)
        counts[bucket.places] = row.counts[bucket.rectangle[bucket.places]].to(counts)
        # Positions are left to the model: each row begins at 0.
        given = None if replay is None or row.routing is None else row.routing.at(bucket.rectangle)
        hidden, routing = _run(decoder, rows, watch=watch, replay=replay, given=given, counts=counts)
        states.append(hidden.flatten(0, 1).index_select(0, bucket.places))
        sums.append(routing)
    hidden = states[0] if len(states) == 1 else torch.cat(states)
    if row.index.order is not None:
        hidden = hidden.index_select(0, row.index.order)
    return hidden, _added(sums)


def _run(
    decoder: nn.Module,
    rows: Tensor,
    *,
    watch: ExpertWatch | None,
    replay: RouterReplay | None,
    given: GivenExperts | None,
    counts: Tensor,
    **named: object,
) -> tuple[Tensor, RoutingSums | None]:
    asked = {"output_router_logits": True} if watch is not None and watch.has_softmax else {}
    if replay is not None:
        named = {**named, **replay.arguments(given)}
    with nullcontext() if watch is None else watch.watching(), nullcontext() if replay is None else replay.watching():
        output = decoder(input_ids=rows, use_cache=False, **named, **asked)
    hidden: Tensor = output.last_hidden_state
    if watch is None:
        return hidden, None
    tally = None if replay is None else replay.tally(counts)
    return hidden, watch.sums(output.router_logits if asked else (), counts, replayed=tally)


def _added(parts: Sequence[RoutingSums | None]) -> RoutingSums | None:
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    return RoutingSums(*(torch.stack(each).sum(0) for each in zip(*known, strict=True)))


def _decoder_of(model: nn.Module) -> nn.Module:
    decoder: object = model.base_model
    if decoder is model:  # Llama 4's text model: base_model looks for a module by a prefix that none of them has
        decoder = getattr(model, "model", None)
    assert isinstance(decoder, nn.Module), "a model of transformers has a decoder"
    return decoder


def _rectangles(model: nn.Module, index: PackedIndex) -> tuple[LengthBucket, ...]:
    """The index's buckets; of a sharded model one alone, since all ranks have to call it the same number of times."""
    sharded = any(hasattr(parameter, "ds_id") for parameter in model.parameters())
    return (one_rectangle(index),) if sharded and len(index.buckets) > 1 else index.buckets


def one_rectangle(index: PackedIndex) -> LengthBucket:
    """All buckets of the index as one, whose kept places come in the same order."""
    longest = max(bucket.longest for bucket in index.buckets)
    rows, places, above = [], [], 0
    for bucket in index.buckets:
        rectangle = bucket.rectangle.view(bucket.sequences, bucket.longest)
        rows.append(nn.functional.pad(rectangle, (0, longest - bucket.longest)))
        sequence, column = bucket.places // bucket.longest, bucket.places % bucket.longest
        places.append((above + sequence) * longest + column)
        above += bucket.sequences
    return LengthBucket(sequences=above, longest=longest, rectangle=torch.cat(rows).flatten(), places=torch.cat(places))


@contextmanager
def plain_attention(model: nn.Module, name: str = "eager") -> Iterator[None]:
    """Within it the model computes in rectangles, with the attention of transformers that is called `name`.

    By default it is the eager one, which the model's own code writes out. Other kernels leave out what they do not
    know, as torch's does with a softcap.
    """
    usual = _attention_of(model)
    replaced = usual in (ATTENTION_NAME, "sdpa") and usual != name
    if replaced:
        _set_attention(model, name)
    try:
        yield
    finally:
        if replaced:
            _set_attention(model, str(usual))


def _attention_of(model: nn.Module) -> object:
    return getattr(getattr(model, "config", None), "_attn_implementation", None)


def _set_attention(model: nn.Module, name: str) -> None:
    set_implementation = getattr(model, "set_attn_implementation", None)
    assert callable(set_implementation), "a model of transformers"
    set_implementation(name)
