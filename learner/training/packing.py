"""Packing without padding: sequences in rows under a token budget, balanced over ranks, a shared beginning once.

What several sequences of a row begin with alike stands in the row once, as the branches of a tree share its stem. The
last token of each sequence is left out: nothing is predicted from it. How attention keeps the sequences of a row apart
is in `attention`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from learner.training.attention import PackedIndex, build_packed_index
from learner.training.batch import FlatBatch, SequenceRouting
from learner.training.router_replay import GivenExperts
from learner.training.work import work_of

# Sequences that share a smaller part of the shorter one are no family: it would tie all texts of a template together.
_OF_THE_SHORTER = 4


@dataclass(frozen=True)
class SharingOrder:
    """S sequences in an order in which neighbours share the longest beginnings. int64 [S]: `order`, and by place in it
    `shared`, how many tokens a sequence has in common with the one before; 0 where another family begins.
    """

    order: NDArray[np.int64]
    shared: NDArray[np.int64]

    def of(self, sequences: NDArray[np.int64]) -> SharingOrder:
        """The order of some of the sequences [K], by their places in `sequences`."""
        number = np.full(len(self.order), -1, dtype=np.int64)
        number[sequences] = np.arange(len(sequences))
        kept = np.flatnonzero(number[self.order] >= 0)
        if not len(kept):
            return SharingOrder(order=kept, shared=kept)
        # Two have in common what all have that stand between them.
        shared = np.minimum.reduceat(self.shared[: kept[-1] + 1], np.concatenate([[0], kept[:-1] + 1]))
        shared[0] = 0
        return SharingOrder(order=number[self.order[kept]], shared=shared)


@dataclass(frozen=True)
class Prefixes:
    """Beginnings that the S sequences of a batch share. `nodes` int64 [N]: a number for what a sequence is up to and
    with each of its tokens, the same wherever sequences of one family begin alike. `routed_by` int64 [N]: the token of
    the batch whose experts a token takes, -1 if none are known; absent where nobody tells them.
    """

    nodes: NDArray[np.int64]
    sharing: SharingOrder
    routed_by: NDArray[np.int64] | None = None


def shared_prefixes(batch: FlatBatch) -> Prefixes:
    """Sequences share all that they begin with alike, trained tokens too: completions of one prompt, contexts of an
    agent that has edited its history, branches.

    A family is of sequences that have a prompt in common, or a quarter of the shorter one: a token or two that all
    texts begin with make none. What was sampled and sent to other experts is not alike.
    """
    starts, lengths, before = batch.starts, batch.lengths, _tokens_before_training(batch)
    texts = [batch.token_ids[start : start + length] for start, length in zip(starts, lengths, strict=True)]
    as_bytes = [text.astype(">i4").tobytes() for text in texts]
    order = np.array(sorted(range(len(texts)), key=as_bytes.__getitem__), dtype=np.int64)
    shared = np.zeros(len(order), dtype=np.int64)
    nodes = np.arange(len(batch.token_ids), dtype=np.int64)
    for place, (former, latter) in enumerate(pairwise(order.tolist()), start=1):
        prompt = max(int(before[former]), int(before[latter]))
        alike = _alike(texts[former], texts[latter])
        given = min(int(before[former]), int(before[latter]))
        alike = _routed_alike(batch.routing, int(starts[former]), int(starts[latter]), prompt=given, alike=alike)
        if 0 < prompt <= alike or alike * _OF_THE_SHORTER >= min(int(lengths[former]), int(lengths[latter])):
            shared[place] = alike
            nodes[starts[latter] : starts[latter] + alike] = nodes[starts[former] : starts[former] + alike]
    sharing = SharingOrder(order=order, shared=shared)
    return Prefixes(nodes=nodes, sharing=sharing, routed_by=_routed_by(batch.routing, nodes))


def _routed_by(routing: SequenceRouting | None, nodes: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """For each token, [N], the first one of its node whose experts are known: a prompt was computed for each sequence
    by itself, and is sent one way in all rows, whichever of its sequences are in them.
    """
    if routing is None:
        return None
    first = np.full(len(nodes), -1, dtype=np.int64)
    known = np.flatnonzero(routing.known)[::-1]  # of assignments to one place the last one stays
    first[nodes[known]] = known
    return first[nodes]


def _alike(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    """Number of tokens that the two begin with alike."""
    shorter = min(len(one), len(other))
    differ = np.flatnonzero(one[:shorter] != other[:shorter])
    return int(differ[0]) if len(differ) else shorter


def _routed_alike(routing: SequenceRouting | None, one: int, other: int, *, prompt: int, alike: int) -> int:
    """Of the `alike` tokens with which two sequences begin, at the batch's tokens `one` and `other`, those that may
    stand in a row once: a prompt, and behind it what was sent to the same experts, as far as that is known.
    """
    if routing is None or alike <= prompt:
        return alike
    ours, theirs = (slice(start + prompt, start + alike) for start in (one, other))
    # What is known of one alone differs, too: a third sequence may be like that one, and known otherwise.
    told, other_told = routing.known[ours], routing.known[theirs]
    otherwise = (routing.experts[ours] != routing.experts[theirs]).any((1, 2))
    differ = np.flatnonzero((told != other_told) | (told & otherwise))
    return prompt + int(differ[0]) if len(differ) else alike


def _tokens_before_training(batch: FlatBatch) -> NDArray[np.int64]:
    """[S]; 0 for a sequence without a trained token."""
    position = np.arange(len(batch.loss_mask)) - np.repeat(batch.starts, batch.lengths)
    beyond = np.where(batch.loss_mask, position, np.iinfo(np.int64).max)
    first = np.minimum.reduceat(beyond, batch.starts)
    return np.where(first == np.iinfo(np.int64).max, 0, first)


@dataclass(frozen=True)
class PackedRow:
    """A row of T input tokens as a decoder takes it. int64 [T]: `token_ids`, `positions`, and `counts`: how many of the
    sequences have the token. `routing`: the experts that the engine sent its tokens to, if that is known.
    """

    token_ids: Tensor
    positions: Tensor
    index: PackedIndex
    counts: Tensor
    routing: GivenExperts | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class Microbatch(PackedRow):
    """A row of T input tokens, of which N predictions are trained.

    [N]: `rows` int64, the row that predicts each target; `targets` int64;
    `places` int64, of the target among the batch's tokens; `sequences` int64, which of the row's K sequences it is of;
    `behavior_logprobs` float32; `lags` int64; `current` bool, true where exactly one policy version sampled the
    sequence and that version is the learner's own. `candidates` int64 [N, C] are further tokens whose logprobs are
    wanted. [M]: `observed_rows` and `observed_targets`, as the two without, of what the environment said, where that is
    learned. [K]: `members` int64, the sequences' numbers in the batch; `teachers` int64, whom to ask. `pairs` int64
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
    observed_rows: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    observed_targets: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))

    def observing(self) -> Microbatch:
        """With what the environment said among its targets, behind the others: the same row, for one pass."""
        if not len(self.observed_rows):
            return self
        candidates = self.candidates
        if candidates is not None:
            none = candidates.new_zeros(len(self.observed_rows), candidates.shape[1])
            candidates = torch.cat([candidates, none])
        return replace(
            self,
            rows=torch.cat([self.rows, self.observed_rows]),
            targets=torch.cat([self.targets, self.observed_targets]),
            candidates=candidates,
        )

    def to(self, device: torch.device) -> Microbatch:
        """The same microbatch on `device`, but for what indexes things that stay on the CPU."""
        if device.type == "cpu":
            return self
        moved = {
            name: value if name in ("places", "members", "teachers") else value.to(device)
            for name, value in vars(self).items()
            if isinstance(value, Tensor)
        }
        routing = None if self.routing is None else self.routing.to(device)
        return Microbatch(**moved, index=self.index.to(device), routing=routing)


@dataclass(frozen=True)
class _Unit:
    """Sequences that stay together because they begin alike, how many tokens they have, beginnings counted once, and
    their work.
    """

    sequences: tuple[int, ...]
    tokens: int
    work: float


def plan(
    lengths: NDArray[np.int64],
    *,
    sharing: SharingOrder,
    ranks: int,
    microbatch_tokens: int,
    even: float = math.inf,
    pairs: NDArray[np.int64] | None = None,
) -> list[list[NDArray[np.int64]]]:
    """Spreads sequences: for each rank, for each of its microbatches, the sequences' indices by rising length.

    Families go, the most work first, to the rank with the least, a large family in parts, the two sequences of a pair
    (`pairs` [S], -1 for none) always together; each rank then fills rows of at most `microbatch_tokens` (a longer
    sequence or pair has a row to itself). Work is counted in tokens, those at the model's `even` position twice. All
    ranks have the same number of microbatches, at least one, the last ones possibly empty.
    """
    part = microbatch_tokens if ranks == 1 else min(microbatch_tokens, int(lengths.sum()) // (4 * ranks))
    pairs = np.full(len(lengths), -1, dtype=np.int64) if pairs is None else pairs
    units = sorted(_units(lengths, sharing, pairs, most_tokens=part, even=even), key=lambda unit: -unit.work)
    shares: list[list[_Unit]] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    for unit in units:
        rank = loads.index(min(loads))
        shares[rank].append(unit)
        loads[rank] += unit.work
    # By size, so that neighbours in length share a row, and the attention's rectangles waste little.
    shares = [sorted(share, key=lambda unit: unit.tokens) for share in shares]
    rows = [[_by_length(row, lengths) for row in _fill_rows(share, microbatch_tokens)] for share in shares]
    count = max(len(row) for row in rows)
    empty = np.zeros(0, dtype=np.int64)
    return [row + [empty] * (count - len(row)) for row in rows]


def shared_out(sizes: Sequence[int], *, ranks: int) -> list[list[int]]:
    """Spreads units that are not cut over ranks, by their sizes: the largest first, each to whom has least."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for unit in sorted(range(len(sizes)), key=lambda unit: -sizes[unit]):
        rank = loads.index(min(loads))
        shares[rank].append(unit)
        loads[rank] += sizes[unit]
    return shares


def _units(
    lengths: NDArray[np.int64], sharing: SharingOrder, pairs: NDArray[np.int64], *, most_tokens: int, even: float
) -> Iterator[_Unit]:
    place = np.argsort(sharing.order)

    def own(bundle: Sequence[int], behind: int | None) -> NDArray[np.float64]:
        """Tokens of the bundle's sequences that neither those before them in it nor sequence `behind` have, and their
        work.
        """
        found = np.zeros(2)
        for sequence in bundle:
            length = tokens = int(lengths[sequence])
            if behind is not None:
                first, last = sorted((int(place[behind]), int(place[sequence])))
                tokens -= int(sharing.shared[first + 1 : last + 1].min())
            found += tokens, work_of(tokens, length, even=even)
            behind = sequence
        return found

    for family in _families(sharing, pairs):
        current: list[int] = []
        sums = np.zeros(2)
        for bundle in family:
            more = own(bundle, current[-1] if current else None)
            if current and sums[0] + more[0] > most_tokens:
                yield _Unit(tuple(current), tokens=int(sums[0]), work=float(sums[1]))
                current, sums, more = [], np.zeros(2), own(bundle, None)
            current += bundle
            sums += more
        yield _Unit(tuple(current), tokens=int(sums[0]), work=float(sums[1]))


def _families(sharing: SharingOrder, pairs: NDArray[np.int64]) -> list[list[list[int]]]:
    """Bundles of each family in the order of sharing: a sequence, or the two of a pair, where its first one stands."""
    members: dict[int, list[int]] = {}
    for sequence, pair in enumerate(pairs.tolist()):
        members.setdefault(pair if pair >= 0 else -1 - sequence, []).append(sequence)
    families: list[list[list[int]]] = []
    for sequence, shared in zip(sharing.order.tolist(), sharing.shared.tolist(), strict=True):
        pair = int(pairs[sequence])
        bundle = members.pop(pair if pair >= 0 else -1 - sequence, None)
        if bundle is None:  # it came with the other one of its pair
            continue
        if shared == 0 or not families:
            families.append([])
        families[-1].append(bundle)
    return families


def _fill_rows(share: Sequence[_Unit], microbatch_tokens: int) -> list[list[int]]:
    rows: list[list[int]] = [[]]
    used = 0
    for unit in share:
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

    kept = position < lengths[owner] - 1
    row_of_token, new = _rows_of_tokens(prefixes.nodes[source], kept)
    trained = np.flatnonzero(batch.loss_mask[source])
    target = source[trained]
    said = np.flatnonzero(batch.observed[source]) if len(batch.observed) else np.zeros(0, np.int64)
    fresh = (batch.lags[target] == 0) & ~batch.mixed_versions[sequences][owner[trained]]

    inputs, positions = batch.token_ids[source][new], position[new]
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
        observed_rows=torch.from_numpy(row_of_token[said - 1].astype(np.int64)),
        observed_targets=torch.from_numpy(batch.token_ids[source[said]].astype(np.int64)),
        routing=_routing_of_row(batch, source[kept], row_of_token[kept], prefixes=prefixes, tokens=len(inputs)),
    )


def _routing_of_row(
    batch: FlatBatch,
    source: NDArray[np.int64],
    row_of_token: NDArray[np.int64],
    *,
    prefixes: Prefixes,
    tokens: int,
) -> GivenExperts | None:
    """The experts of a row's tokens, of which `source` are the batch's tokens and `row_of_token` their places."""
    routing = batch.routing
    if routing is None or not len(source):
        return None
    routed_by = np.where(routing.known, np.arange(len(routing.known)), -1)[source]
    if prefixes.routed_by is not None:
        routed_by = prefixes.routed_by[source]
    told = np.flatnonzero(routed_by >= 0)
    experts = np.zeros((tokens, *routing.experts.shape[1:]), dtype=routing.experts.dtype)
    known = np.zeros(tokens, dtype=np.bool_)
    experts[row_of_token[told]] = routing.experts[routed_by[told]]
    known[row_of_token[told]] = True
    return GivenExperts.of(SequenceRouting(experts, known))


def _pairs(numbers: NDArray[np.int64], sequences: NDArray[np.int64]) -> NDArray[np.int64]:
    """Places in the row of each pair's two sequences, the one that is first in the batch first, [P, 2]."""
    paired = np.flatnonzero(numbers >= 0)
    order: NDArray[np.int64] = paired[np.lexsort((sequences[paired], numbers[paired]))].astype(np.int64)
    return order.reshape(-1, 2)


def _candidates(batch: FlatBatch, target: NDArray[np.int64]) -> Tensor | None:
    if not len(batch.candidate_ids):
        return None
    return torch.from_numpy(batch.candidate_ids.reshape(len(batch.token_ids), -1)[target].astype(np.int64))


def _rows_of_tokens(nodes: NDArray[np.int64], kept: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """For each of the sequences' tokens, with `nodes` [N], its place in the row, and whether it is the first to stand
    there. A token that is not `kept` [N] has no place; its entry means nothing.
    """
    places = np.flatnonzero(kept)
    _, first, node_of = np.unique(nodes[places], return_index=True, return_inverse=True)
    new = np.zeros(len(nodes), dtype=np.bool_)
    new[places[first]] = True
    rows = np.zeros(len(nodes), dtype=np.int64)
    rows[places] = (np.cumsum(new) - 1)[places[first]][node_of]
    return rows, new


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
