"""Data of several clients' operations in packed rows: those of an adapter side by side, each sequence whole.

Nothing is shared between sequences, not even a prompt that two have in common: the adapters differ, and so do their
hidden states.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch

from learner.training.adapter_layers import AdapterSegment, ClientAdapter
from learner.training.attention import build_packed_index
from learner.training.client_checks import TARGETS
from learner.training.client_operations import Array, ForwardBackward
from learner.training.packing import PackedRow

_WORK_WITH_GRADIENT = 3
"""Passes that a token costs that goes back, too."""


@dataclass(frozen=True)
class PlacedDatum:
    """Place of a datum: tokens `start` to `stop` of the segment with the number `segment`; `width` targets for each
    token. `operation` and `number`: which one it is of its round and of its operation.
    """

    operation: int
    number: int
    segment: int
    start: int
    stop: int
    width: int


@dataclass(frozen=True)
class ClientRow:
    """A row, its segments and the data in it. Those of `models`, one for each segment, gather gradients, unless it is
    `forward_only`.
    """

    row: PackedRow
    segments: tuple[AdapterSegment, ...]
    models: tuple[str, ...]
    data: tuple[PlacedDatum, ...]
    forward_only: bool


@dataclass(frozen=True)
class RankShare:
    """Rank number `rank` of `count`."""

    rank: int
    count: int


@dataclass(frozen=True)
class _Entry:
    operation: int
    number: int
    model_id: str
    length: int
    forward_only: bool


def rows_of(
    operations: Sequence[ForwardBackward],
    *,
    adapters: Mapping[str, ClientAdapter],
    max_tokens: int,
    device: torch.device,
    share: RankShare | None = None,
) -> Iterator[ClientRow]:
    """The operations' data in rows of at most `max_tokens`; a longer sequence has a row to itself.

    Data that need no gradient have rows of their own. The order is by adapter, then by length. With a `share` they are
    those of one rank: about as much work as any other has, of as few adapters as may be.
    """
    order = {model_id: place for place, model_id in enumerate(dict.fromkeys(each.model_id for each in operations))}
    entries = [
        _Entry(place, number, operation.model_id, len(datum.token_ids), operation.forward_only)
        for place, operation in enumerate(operations)
        for number, datum in enumerate(operation.data)
    ]
    entries.sort(key=lambda entry: (entry.forward_only, order[entry.model_id], entry.length))
    if share is not None:
        entries = _of_rank(entries, share)
    row: list[_Entry] = []
    used = 0
    for entry in entries:
        if row and (used + entry.length > max_tokens or entry.forward_only != row[0].forward_only):
            yield _packed(row, operations, adapters, device)
            row, used = [], 0
        row.append(entry)
        used += entry.length
    if row:
        yield _packed(row, operations, adapters, device)


def _of_rank(entries: Sequence[_Entry], share: RankShare) -> list[_Entry]:
    """Entries whose middle lies in the rank's part of all the work, in which they stand one after another."""
    work = np.array([entry.length * (1 if entry.forward_only else _WORK_WITH_GRADIENT) for entry in entries])
    middles = np.cumsum(work) - work / 2
    ranks = (middles * share.count / max(1, work.sum())).astype(int)
    return [entry for entry, rank in zip(entries, ranks, strict=True) if rank == share.rank]


def _packed(
    entries: Sequence[_Entry],
    operations: Sequence[ForwardBackward],
    adapters: Mapping[str, ClientAdapter],
    device: torch.device,
) -> ClientRow:
    lengths = np.array([entry.length for entry in entries])
    starts = np.cumsum(lengths) - lengths
    places = [np.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)]
    tokens = np.concatenate([operations[entry.operation].data[entry.number].token_ids for entry in entries])
    index = build_packed_index([places[number] for number in np.argsort(lengths, kind="stable")], tokens=len(tokens))
    segments: list[AdapterSegment] = []
    models: list[str] = []
    data: list[PlacedDatum] = []
    for model_id, members in groupby(range(len(entries)), key=lambda place: entries[place].model_id):
        own = list(members)
        start, stop = int(starts[own[0]]), int(starts[own[-1]] + lengths[own[-1]])
        targets = [
            operations[entries[place].operation].data[entries[place].number].inputs[TARGETS].reshape(lengths[place], -1)
            for place in own
        ]
        data += [
            PlacedDatum(
                operation=entries[place].operation,
                number=entries[place].number,
                segment=len(segments),
                start=int(starts[place]) - start,
                stop=int(starts[place]) - start + entries[place].length,
                width=each.shape[1],
            )
            for place, each in zip(own, targets, strict=True)
        ]
        widest = max(each.shape[1] for each in targets)
        # Fewer targets than the widest datum has are filled up, and what is found for them is dropped.
        filled = np.concatenate([_widened(each, widest) for each in targets])
        segments.append(
            AdapterSegment(adapters[model_id], start, stop, torch.from_numpy(filled.astype(np.int64)).to(device))
        )
        models.append(model_id)
    row = PackedRow(
        token_ids=torch.from_numpy(tokens.astype(np.int64)).to(device),
        positions=torch.from_numpy(np.concatenate([np.arange(length) for length in lengths])).to(device),
        index=index.to(device),
        counts=torch.ones(len(tokens), dtype=torch.int64, device=device),
    )
    return ClientRow(row, tuple(segments), tuple(models), tuple(data), entries[0].forward_only)


def _widened(targets: Array, width: int) -> Array:
    """Targets [t, K] with columns of 0 up to the width."""
    missing = width - targets.shape[1]
    return np.pad(targets, ((0, 0), (0, missing))) if missing else targets
