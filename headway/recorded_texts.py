"""Tokens that a learner computes of a group, by the texts of a recorded run: what completions begin with alike is
computed once, and a group whose rewards are all equal is measured and not trained on.

    trajectories/ ──▶ of whole groups, and of their halves ──▶ of groups of another size, as each doubling changes alike
"""

import math
import sqlite3
import statistics
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from learner.page.reading import opened
from learner.page.store import FOLDER, unpacked

_MAX_GROUPS = 500
_LEAST_GROUPS = 20
_EQUAL = 1e-6
"""Rewards that differ by less are equal."""
_GROUPS = "SELECT id, tokens FROM groups WHERE size > 1 AND step > ? ORDER BY id DESC LIMIT ?"
_REWARDS = "SELECT reward FROM rows WHERE grp = ? ORDER BY place"

Member = tuple[tuple[int, ...], float]
"""Token ids of a sequence, and its reward."""


@dataclass(frozen=True)
class GroupTexts:
    """Groups of `size`: tokens of one that a pass computes, and the share of those whose rewards are all equal; by how
    much both change when groups are twice as large.
    """

    size: int
    tokens: float
    alike: float
    tokens_doubled: float = 2.0
    alike_doubled: float = 1.0

    def tokens_of(self, size: float) -> float:
        """Tokens of a group of another size that a pass computes."""
        return self.tokens * math.pow(self.tokens_doubled, math.log2(size / self.size))

    def alike_of(self, size: float) -> float:
        """Share of the groups of another size whose rewards are all equal."""
        return min(1.0, self.alike * math.pow(self.alike_doubled, math.log2(size / self.size)))


@dataclass(frozen=True)
class LearningPasses:
    """Forward passes of a step; a backward pass is as much as two. `updates` in each of `epochs` over a batch."""

    updates: int
    epochs: int

    def tokens(self, texts: GroupTexts, *, groups: int, group_size: int) -> float:
        """Tokens of all passes of a step: each token before the first of several updates, and then three times in each
        epoch if its group is trained on, else once. An update is never left without anything to train on.
        """
        alike = texts.alike_of(group_size)
        idle = alike - math.pow(alike, max(1.0, groups / self.updates))
        each = (1 if self.updates > 1 else 0) + idle + 3 * self.epochs * (1 - idle)
        return groups * texts.tokens_of(group_size) * each


def group_texts(folder: Path, *, after_step: int = 0) -> GroupTexts | None:
    """Of the newest groups in a run's store, of the size that most have; None if it has too few."""
    try:
        found = [group for path in _parts(folder) for group in _groups(path, after_step)][:_MAX_GROUPS]
    except (sqlite3.DatabaseError, ValueError, KeyError, TypeError, zlib.error, struct.error):
        return None  # of an earlier release, or damaged
    if len(found) < _LEAST_GROUPS:
        return None
    size = statistics.mode(map(len, found))
    whole = [group for group in found if len(group) == size]
    half = size // 2
    halves = [part for group in whole for part in (group[:half], group[-half:])]
    tokens, alike = _mean_of(whole)
    fewer, more_alike = _mean_of(halves)
    doublings = math.log2(size / half)
    return GroupTexts(
        size=size,
        tokens=tokens,
        alike=alike,
        tokens_doubled=(tokens / fewer) ** (1 / doublings),
        alike_doubled=(alike / more_alike) ** (1 / doublings) if more_alike else 1.0,
    )


def _mean_of(groups: Sequence[Sequence[Member]]) -> tuple[float, float]:
    return statistics.fmean(map(_computed, groups)), statistics.fmean(map(_is_alike, groups))


def _computed(group: Sequence[Member]) -> int:
    """Distinct beginnings: nothing is predicted from a sequence's last token."""
    return len({tokens[:end] for tokens, _ in group for end in range(1, len(tokens))})


def _is_alike(group: Sequence[Member]) -> bool:
    rewards = [reward for _, reward in group]
    return max(rewards) - min(rewards) < _EQUAL


def _groups(path: Path, after_step: int) -> Iterator[list[Member]]:
    with opened(path) as database:
        for number, blob in database.execute(_GROUPS, (after_step, _MAX_GROUPS)).fetchall():
            rewards = [reward for (reward,) in database.execute(_REWARDS, (number,))]
            texts = [tuple(columns["token_ids"].tolist()) for columns in unpacked(blob)]
            if len(texts) == len(rewards) and None not in rewards:
                yield list(zip(texts, rewards, strict=True))


def _parts(folder: Path) -> list[Path]:
    return sorted((folder / FOLDER).glob("part-*.db"), reverse=True)
