"""Packing without padding: sequences end to end in rows under a token budget, balanced over the ranks.

A row leaves out the last token of each sequence: nothing is predicted from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from learner.training.attention import PackedIndex, build_packed_index
from learner.training.batch import FlatBatch


@dataclass(frozen=True)
class Microbatch:
    """One row of T input tokens, of which N predictions are trained.

    `token_ids` and `positions` int64 [T]. [N]: `rows` int64, the row that predicts each target; `targets` int64;
    `weights`, `behavior_logprobs`, `advantages` float32; `lags` int64; `current` bool, true where exactly one policy
    version sampled the sequence and that version is the learner's own.
    """

    token_ids: Tensor
    positions: Tensor
    index: PackedIndex
    rows: Tensor
    targets: Tensor
    weights: Tensor
    behavior_logprobs: Tensor
    advantages: Tensor
    lags: Tensor
    current: Tensor
    sequences: int

    def to(self, device: torch.device) -> Microbatch:
        """The same microbatch on `device`."""
        if device.type == "cpu":
            return self
        moved = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return Microbatch(**moved, index=self.index.to(device), sequences=self.sequences)


def plan(lengths: NDArray[np.int64], *, ranks: int, microbatch_tokens: int) -> list[list[NDArray[np.int64]]]:
    """Which sequences go where: for each rank, for each of its microbatches, the sequences' indices by rising length.

    Sequences go, longest first, to the rank with the fewest tokens; each rank then fills rows of at most
    `microbatch_tokens` (a longer sequence has a row to itself). All ranks have the same number of microbatches, at
    least one, the last ones possibly empty.
    """
    order = np.argsort(-lengths, kind="stable")
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for sequence in order.tolist():
        rank = loads.index(min(loads))
        shares[rank].append(sequence)
        loads[rank] += int(lengths[sequence])
    rows = [_fill_rows(share, lengths=lengths, microbatch_tokens=microbatch_tokens) for share in shares]
    count = max(len(row) for row in rows)
    empty = np.zeros(0, dtype=np.int64)
    return [row + [empty] * (count - len(row)) for row in rows]


def _fill_rows(share: Sequence[int], *, lengths: NDArray[np.int64], microbatch_tokens: int) -> list[NDArray[np.int64]]:
    # Neighbours in length share a row, so that the attention's rectangles waste little.
    rows: list[list[int]] = [[]]
    used = 0
    for sequence in reversed(share):
        length = int(lengths[sequence])
        if rows[-1] and used + length > microbatch_tokens:
            rows.append([])
            used = 0
        rows[-1].append(sequence)
        used += length
    return [np.array(row, dtype=np.int64) for row in rows]


def pack(batch: FlatBatch, sequences: NDArray[np.int64], *, weights: NDArray[np.float64]) -> Microbatch:
    """The row made of `sequences` [K], indices into `batch`, in that order. `weights` [S]: one per sequence.

    Without sequences the row holds one token that nothing is predicted from, so that a rank with nothing to do still
    takes part in every collective.
    """
    lengths = batch.lengths[sequences]
    source = _ranges(batch.starts[sequences], lengths)
    offsets = np.cumsum(lengths) - lengths
    owner = np.repeat(np.arange(len(sequences)), lengths)
    position = np.arange(len(source)) - offsets[owner]

    kept = position < lengths[owner] - 1
    # Targets are counted among all tokens; their predicting rows among the tokens that are kept.
    trained = np.flatnonzero(batch.loss_mask[source])
    row_of_token = np.cumsum(kept) - 1
    target = source[trained]
    fresh = (batch.lags[target] == 0) & ~batch.mixed_versions[sequences][owner[trained]]

    inputs = batch.token_ids[source][kept]
    positions = position[kept]
    row_lengths = np.maximum(lengths - 1, 0)
    if not len(inputs):
        inputs, positions, row_lengths = np.zeros(1, np.int32), np.zeros(1, np.int64), np.ones(1, np.int64)
    return Microbatch(
        token_ids=torch.from_numpy(inputs.astype(np.int64)),
        positions=torch.from_numpy(positions.astype(np.int64)),
        index=build_packed_index(row_lengths[row_lengths > 0].tolist()),
        rows=torch.from_numpy(row_of_token[trained - 1].astype(np.int64)),
        targets=torch.from_numpy(batch.token_ids[target].astype(np.int64)),
        weights=torch.from_numpy(weights[sequences][owner[trained]].astype(np.float32)),
        behavior_logprobs=torch.from_numpy(batch.behavior_logprobs[target]),
        advantages=torch.from_numpy(batch.advantages[target]),
        lags=torch.from_numpy(batch.lags[target].astype(np.int64)),
        current=torch.from_numpy(fresh),
        sequences=len(sequences),
    )


def _ranges(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """start, start + 1, ... of each range, end to end."""
    offsets = np.cumsum(lengths) - lengths
    return np.asarray(np.repeat(starts - offsets, lengths) + np.arange(int(lengths.sum())), dtype=np.int64)
