"""A held-out part of the data, and how long the data is."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import xxhash

from learner.data.examples import Tokenized
from learner.data.sources import DataError

Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class Split(Generic[Item]):
    """What is trained on, and what is held out; both in the order of the data."""

    training: Sequence[Item]
    held_out: Sequence[Item]


def split(items: Sequence[Item], *, prompt: Callable[[Item], bytes], share: float, seed: int) -> Split[Item]:
    """Holds out `share` (0 to below 1) of the prompts, at least one if it is above 0, with all that answers them.

    Which ones depends on seed and prompt only: where the records stand does not matter. Raises DataError if nothing
    would be left to train on.
    """
    assert 0 <= share < 1, f"a share of {share} is not within 0 and 1"
    keys = [_rank(prompt(item), seed) for item in items]
    ranked = sorted(set(keys))
    out = set(ranked[: max(1, round(share * len(ranked)))]) if share > 0 else set()
    training = [item for item, key in zip(items, keys, strict=True) if key not in out]
    if not training:
        raise DataError(f"holding out {share:g} of {len(ranked)} prompts leaves nothing to train on")
    return Split(training=training, held_out=[item for item, key in zip(items, keys, strict=True) if key in out])


def prompt_of(tokenized: Tokenized) -> bytes:
    """The prompt's tokens, by which records with one prompt stay on one side of a split."""
    return tokenized.token_ids[: tokenized.prompt_length].tobytes()


def _rank(prompt: bytes, seed: int) -> bytes:
    return xxhash.xxh3_128_digest(seed.to_bytes(8, "little") + prompt)


@dataclass(frozen=True, kw_only=True)
class LengthStatistics:
    """Lengths in tokens of `count` sequences, prompts included; `trained` is how many tokens are trained in all."""

    count: int
    total: int
    trained: int
    mean: float
    median: float
    p90: float
    p99: float
    longest: int

    def __str__(self) -> str:
        return (
            f"{self.count} sequences, {self.total} tokens ({self.trained} trained); length {self.mean:.1f} on average, "
            f"median {self.median:.0f}, p90 {self.p90:.0f}, p99 {self.p99:.0f}, longest {self.longest}"
        )


def length_statistics(sequences: Sequence[Tokenized]) -> LengthStatistics:
    """At least one sequence is needed."""
    assert sequences, "lengths of nothing"
    lengths = np.array([len(sequence.token_ids) for sequence in sequences])
    median, p90, p99 = np.percentile(lengths, [50, 90, 99])
    return LengthStatistics(
        count=len(lengths),
        total=int(lengths.sum()),
        trained=sum(sequence.trained_length for sequence in sequences),
        mean=float(lengths.mean()),
        median=float(median),
        p90=float(p90),
        p99=float(p99),
        longest=int(lengths.max()),
    )
