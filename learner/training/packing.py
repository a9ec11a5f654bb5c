"""Packing without padding: sequences in rows under a token budget, balanced over ranks, a group's prompt once.

A prompt that several sequences of a row have in common stands in the row once. The last token of each sequence is left
out: nothing is predicted from it. How attention keeps the sequences of a row apart is in `attention`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from learner.training.attention import PackedIndex, build_packed_index
from learner.training.batch import FlatBatch


@dataclass(frozen=True)
class Prefixes:
    """For each of S sequences the length of its shared prefix, int64 [S], and the family that shares it, int64 [S].

    A sequence that shares nothing is a family of its own, with a prefix of length 0.
    """

    lengths: NDArray[np.int64]
    families: NDArray[np.int64]

    def of(self, sequences: NDArray[np.int64]) -> Prefixes:
        """The prefixes of some of the sequences [K], in that order."""
        return Prefixes(lengths=self.lengths[sequences], families=self.families[sequences])


def shared_prefixes(batch: FlatBatch) -> Prefixes:
    """Sequences share what comes before their first trained token, if that is the same in each.

    No trained token is ever in a shared prefix, and the row that predicts the first trained one may be.
    """
    starts, lengths = batch.starts, batch.lengths
    before = _tokens_before_training(batch)
    members: dict[bytes, list[int]] = {}
    for sequence in range(len(lengths)):
        start, length = int(starts[sequence]), int(before[sequence])
        members.setdefault(batch.token_ids[start : start + length].tobytes(), []).append(sequence)
    shared = np.zeros(len(lengths), dtype=np.int64)
    families = np.arange(len(lengths), dtype=np.int64)
    for prefix, family in members.items():
        if prefix and len(family) > 1:
            shared[family] = before[family]
            families[family] = family[0]
    return Prefixes(lengths=shared, families=families)


def _tokens_before_training(batch: FlatBatch) -> NDArray[np.int64]:
    """[S]; 0 for a sequence without a trained token."""
    position = np.arange(len(batch.loss_mask)) - np.repeat(batch.starts, batch.lengths)
    beyond = np.where(batch.loss_mask, position, np.iinfo(np.int64).max)
    first = np.minimum.reduceat(beyond, batch.starts)
    return np.where(first == np.iinfo(np.int64).max, 0, first)


@dataclass(frozen=True)
class PackedRow:
    """A row of T input tokens as a decoder takes it. int64 [T]: `token_ids`, `positions`, and `counts`: how many of the
    sequences have the token.
    """

    token_ids: Tensor
    positions: Tensor
    index: PackedIndex
    counts: Tensor


@dataclass(frozen=True)
class Microbatch(PackedRow):
    """A row of T input tokens, of which N predictions are trained.

    [N]: `rows` int64, the row that predicts each target; `targets` int64;
    `places` int64, of the target among the batch's tokens; `sequences` int64, which of the row's K sequences it is of;
    `behavior_logprobs` float32; `lags` int64; `current` bool, true where exactly one policy version sampled the
    sequence and that version is the learner's own. `candidates` int64 [N, C] are further tokens whose logprobs are
    wanted. [K]: `members` int64, the sequences' numbers in the batch; `teachers` int64, whom to ask. `pairs` int64
    [P, 2]: chosen and rejected.
    """

    rows: Tensor
    targets: Tensor
    places: Tensor
    sequences: Tensor
    behavior_logprobs: Tensor
    lags: Tensor
    current: Tensor
    members: Tensor
    teachers: Tensor
    pairs: Tensor
    candidates: Tensor | None = None

    def to(self, device: torch.device) -> Microbatch:
        """The same microbatch on `device`, but for what indexes things that stay on the CPU."""
        if device.type == "cpu":
            return self
        moved = {
            name: value if name in ("places", "members", "teachers") else value.to(device)
            for name, value in vars(self).items()
            if isinstance(value, Tensor)
        }
        return Microbatch(**moved, index=self.index.to(device))


@dataclass(frozen=True)
class _Unit:
    """Sequences that stay together because they share a prefix, and how many tokens they have with it counted once."""

    sequences: tuple[int, ...]
    tokens: int


def plan(
    lengths: NDArray[np.int64],
    *,
    prefixes: Prefixes,
    ranks: int,
    microbatch_tokens: int,
    pairs: NDArray[np.int64] | None = None,
) -> list[list[NDArray[np.int64]]]:
    """Spreads sequences: for each rank, for each of its microbatches, the sequences' indices by rising length.

    Families go, largest first, to the rank with the fewest tokens, a large family in parts, the two sequences of a pair
    (`pairs` [S], -1 for none) always together; each rank then fills rows of at most `microbatch_tokens` (a longer
    sequence or pair has a row to itself). All ranks have the same number of
    microbatches, at least one, the last ones possibly empty.
    """
    part = microbatch_tokens if ranks == 1 else min(microbatch_tokens, int(lengths.sum()) // (4 * ranks))
    pairs = np.full(len(lengths), -1, dtype=np.int64) if pairs is None else pairs
    units = sorted(_units(lengths, prefixes, pairs, most_tokens=part), key=lambda unit: -unit.tokens)
    shares: list[list[_Unit]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for unit in units:
        rank = loads.index(min(loads))
        shares[rank].append(unit)
        loads[rank] += unit.tokens
    rows = [[_by_length(row, lengths) for row in _fill_rows(share, microbatch_tokens)] for share in shares]
    count = max(len(row) for row in rows)
    empty = np.zeros(0, dtype=np.int64)
    return [row + [empty] * (count - len(row)) for row in rows]


def _units(
    lengths: NDArray[np.int64], prefixes: Prefixes, pairs: NDArray[np.int64], *, most_tokens: int
) -> Iterator[_Unit]:
    for members in _families(prefixes, pairs).values():
        shared = int(prefixes.lengths[members[0][0]])
        current: list[int] = []
        tokens = shared
        for bundle in members:
            own = sum(int(lengths[sequence]) - shared for sequence in bundle)
            if current and tokens + own > most_tokens:
                yield _Unit(sequences=tuple(current), tokens=tokens)
                current, tokens = [], shared
            current += bundle
            tokens += own
        yield _Unit(sequences=tuple(current), tokens=tokens)


def _families(prefixes: Prefixes, pairs: NDArray[np.int64]) -> dict[int, list[list[int]]]:
    """The sequences of each family, those of one pair as one; a pair of which one shares a prefix shares it whole."""
    bundles: dict[int, list[int]] = {}
    for sequence, pair in enumerate(pairs.tolist()):
        bundles.setdefault(pair if pair >= 0 else -1 - sequence, []).append(sequence)
    families: dict[int, list[list[int]]] = {}
    for bundle in bundles.values():
        families.setdefault(int(prefixes.families[bundle[0]]), []).append(bundle)
    return families


def _fill_rows(share: Sequence[_Unit], microbatch_tokens: int) -> list[list[int]]:
    # Units come by falling size: neighbours in length share a row, so that the attention's rectangles waste little.
    rows: list[list[int]] = [[]]
    used = 0
    for unit in reversed(share):
        if rows[-1] and used + unit.tokens > microbatch_tokens:
            rows.append([])
            used = 0
        rows[-1] += unit.sequences
        used += unit.tokens
    return rows


def _by_length(sequences: Sequence[int], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    row = np.array(sequences, dtype=np.int64)
    return row[np.argsort(lengths[row], kind="stable")]


def pack(batch: FlatBatch, sequences: NDArray[np.int64], *, prefixes: Prefixes) -> Microbatch:
    """The row made of `sequences` [K], indices into `batch`, in that order.

    Without sequences the row holds one token that nothing is predicted from, so that a rank with nothing to do still
    takes part in every collective.
    """
    lengths = batch.lengths[sequences]
    source = _ranges(batch.starts[sequences], lengths)
    owner = np.repeat(np.arange(len(sequences)), lengths)
    position = np.arange(len(source)) - (np.cumsum(lengths) - lengths)[owner]

    row_of_token, new = _rows_of_tokens(sequences, position, owner, lengths=lengths, prefixes=prefixes)
    trained = np.flatnonzero(batch.loss_mask[source])
    target = source[trained]
    fresh = (batch.lags[target] == 0) & ~batch.mixed_versions[sequences][owner[trained]]

    inputs, positions = batch.token_ids[source][new], position[new]
    kept = position < lengths[owner] - 1
    rows_of_sequences = np.split(row_of_token[kept], np.cumsum(lengths - 1)[:-1]) if len(sequences) else []
    rows_of_sequences = [rows for rows in rows_of_sequences if len(rows)]
    counts = np.bincount(row_of_token[kept], minlength=max(len(inputs), 1))
    if not len(inputs):
        inputs, positions = np.zeros(1, np.int32), np.zeros(1, np.int64)
        rows_of_sequences = [np.zeros(1, np.int64)]
    return Microbatch(
        token_ids=torch.from_numpy(inputs.astype(np.int64)),
        positions=torch.from_numpy(positions.astype(np.int64)),
        index=build_packed_index(rows_of_sequences, tokens=len(inputs)),
        counts=torch.from_numpy(counts.astype(np.int64)),
        rows=torch.from_numpy(row_of_token[trained - 1].astype(np.int64)),
        targets=torch.from_numpy(batch.token_ids[target].astype(np.int64)),
        places=torch.from_numpy(target.astype(np.int64)),
        sequences=torch.from_numpy(owner[trained].astype(np.int64)),
        behavior_logprobs=torch.from_numpy(batch.behavior_logprobs[target]),
        lags=torch.from_numpy(batch.lags[target].astype(np.int64)),
        current=torch.from_numpy(fresh),
        members=torch.from_numpy(sequences.astype(np.int64)),
        teachers=torch.from_numpy(batch.teachers[sequences].astype(np.int64)),
        pairs=torch.from_numpy(_pairs(batch.pairs[sequences], sequences)),
        candidates=_candidates(batch, target),
    )


def _pairs(numbers: NDArray[np.int64], sequences: NDArray[np.int64]) -> NDArray[np.int64]:
    """Places in the row of each pair's two sequences, the one that is first in the batch first, [P, 2]."""
    paired = np.flatnonzero(numbers >= 0)
    order: NDArray[np.int64] = paired[np.lexsort((sequences[paired], numbers[paired]))].astype(np.int64)
    return order.reshape(-1, 2)


def _candidates(batch: FlatBatch, target: NDArray[np.int64]) -> Tensor | None:
    if not len(batch.candidate_ids):
        return None
    return torch.from_numpy(batch.candidate_ids.reshape(len(batch.token_ids), -1)[target].astype(np.int64))


def _rows_of_tokens(
    sequences: NDArray[np.int64],
    position: NDArray[np.int64],
    owner: NDArray[np.int64],
    *,
    lengths: NDArray[np.int64],
    prefixes: Prefixes,
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """For each of the sequences' tokens its place in the row, and whether it is the first to stand there.

    A sequence's last token has no place; its entry means nothing.
    """
    families = prefixes.families[sequences]
    _, first_member, member_of = np.unique(families, return_index=True, return_inverse=True)
    leader = first_member[member_of]  # the sequence of this row whose prefix the family shares
    shared = (position < prefixes.lengths[sequences][owner]) & (leader[owner] != owner)
    new = (position < lengths[owner] - 1) & ~shared
    row = np.cumsum(new) - 1
    starts = np.cumsum(lengths) - lengths
    row[shared] = row[(starts[leader[owner]] + position)[shared]]
    return row, new


def _ranges(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """start, start + 1, ... of each range, end to end."""
    offsets = np.cumsum(lengths) - lengths
    return np.asarray(np.repeat(starts - offsets, lengths) + np.arange(int(lengths.sum())), dtype=np.int64)


def slices_of(batch: FlatBatch, *, updates: int) -> list[NDArray[np.int64]]:
    """The sequences of each update: all of a trajectory, and the two of a pair, are in the same one. What is only
    measured is in none.
    """
    paired = bool((batch.pairs >= 0).all())
    units = np.unique(batch.trajectories[~batch.mismatched]).reshape(-1, 2 if paired else 1)
    return [np.flatnonzero(np.isin(batch.trajectories, part)) for part in np.array_split(units, updates) if len(part)]
