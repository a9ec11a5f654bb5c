"""Levels of outcomes: what the tokens of each process do on average, at each lag, and what the others' do.

The present step counts whole, so that a change that all share, such as a larger update, is seen with those that share
it. Former steps fill up what a step has too few tokens of. All is linear in tokens and processes.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FEWEST_TOKENS = 1000
FEWEST_GROUPS = 8
"""With less of the others at a lag, nothing is compared there."""
FEWEST_OF_EACH = 100
_OF_A_MEDIAN = math.pi / 2
"""The variance of a median of n normal numbers, over that of one by n."""
_DECAY = 0.8

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Moments:
    """Sums over tokens of K outcomes by process and lag, and over the trajectories that they lie in: tokens of one are
    not independent.

    [P, L]: `tokens`, `groups`, and `sizes`, the sum of n^2 over trajectories of n tokens each. [P, L, K]: `sums`, and
    of each trajectory's own sum y: `squares`, the sum of y^2, and `mixed`, of y n.
    """

    tokens: Floats
    groups: Floats
    sizes: Floats
    sums: Floats
    squares: Floats
    mixed: Floats

    @classmethod
    def of(
        cls,
        outcomes: Floats,
        places: NDArray[np.int64],
        *,
        texts: NDArray[np.int64],
        groups: NDArray[np.int64],
        shape: tuple[int, int],
    ) -> "Moments":
        """Moments of N tokens: `outcomes` [K, N]; `places` [N] count processes and lags as one row of P L."""
        cells = shape[0] * shape[1]
        of_texts, inverse, counts = _pairs(places, texts)
        sizes = counts.astype(np.float64)
        by_text = [_summed(inverse, row, count=len(sizes)) for row in outcomes]

        def summed(values: Floats) -> Floats:
            return _summed(of_texts, values, count=cells).reshape(shape)

        seen, *_ = _pairs(places, groups)
        return cls(
            tokens=summed(sizes),
            groups=np.bincount(seen, minlength=cells).reshape(shape).astype(np.float64),
            sizes=summed(sizes**2),
            sums=np.stack([summed(row) for row in by_text], axis=-1),
            squares=np.stack([summed(row**2) for row in by_text], axis=-1),
            mixed=np.stack([summed(row * sizes) for row in by_text], axis=-1),
        )

    def __add__(self, other: "Moments") -> "Moments":
        mine, theirs = vars(self), vars(other)
        return Moments(**{name: value + theirs[name] for name, value in mine.items()})

    def weighed(self, weights: Floats | float) -> "Moments":
        """Each token counts as so many do; `weights` is a number, or [P, L]."""
        of_cells = np.broadcast_to(np.asarray(weights, dtype=np.float64), self.tokens.shape)
        return Moments(
            **{
                name: value * (of_cells if value.ndim == 2 else of_cells[..., None])
                for name, value in vars(self).items()
            }
        )

    def rows(self, chosen: NDArray[np.int64]) -> "Moments":
        """The processes of these rows; zeros for the row -1."""
        return Moments(
            **{name: np.concatenate([row, np.zeros((1, *row.shape[1:]))])[chosen] for name, row in vars(self).items()}
        )

    @property
    def means(self) -> Floats:
        """Mean of each outcome, [P, L, K]; 0 without tokens."""
        return np.asarray(self.sums / np.maximum(self.tokens, 1.0)[..., None])

    @property
    def variances(self) -> Floats:
        """Variance of each mean, [P, L, K], by the spread between trajectories."""
        means = self.means
        spread = self.squares - 2 * means * self.mixed + means**2 * self.sizes[..., None]
        return np.asarray(np.maximum(spread, 0.0) / np.maximum(self.tokens, 1.0)[..., None] ** 2)


class OthersLevels:
    """Levels of all processes at each lag, from which one is left out when it is compared with the others.

    `counted` [P, L] are those that are a measure for others.
    """

    def __init__(self, moments: Moments, counted: NDArray[np.bool_]) -> None:
        self._tokens, self._groups = moments.tokens * counted, moments.groups * counted
        self._all_tokens, self._all_groups = self._tokens.sum(axis=0), self._groups.sum(axis=0)
        self._means, self._variances = moments.means, moments.variances
        self._counted = counted
        self._orders: dict[tuple[int, int, float], tuple[list[int], dict[int, int]]] = {}

    def of(self, process: int, lag: int, row: int, *, sign: float = 1.0) -> tuple[float, float] | None:
        """The median of the other processes' means of an outcome, times `sign`, and its variance; None where they are
        too few.

        Of two the larger: of an even number of processes half may be wrong, and an honest one is not to look bad beside
        those that do nothing but say what the learner says.
        """
        if self._all_tokens[lag] - self._tokens[process, lag] < FEWEST_TOKENS:
            return None
        if self._all_groups[lag] - self._groups[process, lag] < FEWEST_GROUPS:
            return None
        order, places = self._order(lag, row, sign)
        itself = process in places
        count = len(order) - itself
        middle = count // 2
        chosen = order[middle + (itself and places[process] <= middle)]
        mean = sign * float(self._means[chosen, lag, row])
        return mean, float(self._variances[chosen, lag, row]) * min(1.0, _OF_A_MEDIAN / count)

    def _order(self, lag: int, row: int, sign: float) -> tuple[list[int], dict[int, int]]:
        """The processes that are counted, the lowest mean first, and the place of each."""
        key = (lag, row, sign)
        if key not in self._orders:
            counted = np.flatnonzero(self._counted[:, lag])
            order = counted[np.argsort(sign * self._means[counted, lag, row], kind="stable")].tolist()
            self._orders[key] = order, {process: place for place, process in enumerate(order)}
        return self._orders[key]


class Levels:
    """Moments of each process at each lag, of the present step and of those before it."""

    def __init__(self) -> None:
        self._names: tuple[str, ...] = ()
        self._past: Moments | None = None
        self._now: Moments | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The processes, in the order of the rows: those of the present step come first."""
        return self._names

    def see(self, names: Sequence[str], now: Moments) -> None:
        """A new step, with the moments of these processes."""
        before, past = self._names, self._past
        if self._now is not None:
            past = (self._now if past is None else self._now + past).weighed(_DECAY)
        lives = [] if past is None else np.asarray((past.tokens >= 1.0).any(axis=1)).tolist()
        mine = set(names)
        self._names = (*names, *(n for n, lives_on in zip(before, lives, strict=True) if lives_on and n not in mine))
        self._now = now.rows(_rows(self._names, of=names))
        self._past = None if past is None else past.rows(_rows(self._names, of=before))

    def of_others(self, *, left_out: Collection[str] = (), wanted: float = 0.0) -> OthersLevels:
        """The levels, of which those left out are no part. Former steps count as far as a process has less than
        `wanted` tokens in this one. To be asked after the first step.
        """
        assert self._now is not None, "no step has been seen"
        filled, believed = self._now, np.array([name not in left_out for name in self._names], dtype=np.bool_)
        if self._past is not None:
            present = (believed[:, None] & ((self._now.tokens > 0) | (self._past.tokens > 0))).sum(axis=0)
            least = np.maximum(max(wanted, FEWEST_OF_EACH), FEWEST_TOKENS / np.maximum(1, present - 1))
            missing = np.maximum(0.0, least - self._now.tokens)
            filled = self._now + self._past.weighed(np.minimum(1.0, missing / np.maximum(self._past.tokens, 1.0)))
        return OthersLevels(filled, (filled.tokens >= FEWEST_OF_EACH) & believed[:, None])


def _rows(names: Sequence[str], *, of: Sequence[str]) -> NDArray[np.int64]:
    """The row of each name in another list; -1 for one that is not there."""
    places = {name: place for place, name in enumerate(of)}
    return np.array([places.get(name, -1) for name in names], dtype=np.int64)


def _summed(places: NDArray[np.int64], values: Floats, *, count: int) -> Floats:
    return np.asarray(np.bincount(places, weights=values, minlength=count), dtype=np.float64)


def _pairs(
    places: NDArray[np.int64], others: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Different pairs of two rows [N]: the place of each, its number for each of the N, and how often it is there."""
    names, codes = np.unique(others, return_inverse=True)
    width = max(1, len(names))
    pairs, inverse, counts = np.unique(places * width + codes, return_inverse=True, return_counts=True)
    return pairs // width, inverse, counts
