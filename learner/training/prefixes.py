"""What sequences of a batch have in common: the prompt of a group, computed once for all of its completions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from learner.training.batch import FlatBatch


@dataclass(frozen=True)
class Prefixes:
    """For each of S sequences the length of its shared prefix, int64 [S], and the family that shares it, int64 [S].

    A sequence that shares nothing is a family of its own, with a prefix of length 0.
    """

    lengths: NDArray[np.int64]
    families: NDArray[np.int64]

    def of(self, sequences: NDArray[np.int64]) -> Prefixes:
        """Those of some of the sequences [K], in that order."""
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
