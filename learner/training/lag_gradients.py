"""Gradients of old groups beside those of new ones: how far they point the same way, and how long they are, by lag.

    units of a step's groups by lag, each one's part of its bucket's gradient, sketched ─▶ BucketMoments
    those of a measurement and of the ones before it, up to WINDOW of them ─▶ BucketReading of each bucket

A gradient of some groups is mostly noise, so that two of them have a small cosine though they are of the same policy.
What two different units, of some groups each, have in common is no noise, though: with c_i the parts of K units in the
gradient of a bucket, and z_j those of lag 0,

    P = sum over i != j of <c_i, c_j>      signal = P K / (K - 1)      cross = <sum of c, sum of z>
    cosine = cross / sqrt(signal * signal of lag 0)      norm ratio = sqrt(signal / signal of lag 0)

estimate both for gradients without noise. Where units are not alike in size, K is what they amount to, 1 / sum of the
squares of their shares. The first sum is that over all ways to halve the units, so that nothing is
left to the draw of one. `halves`, the cosine of a half of the units of lag 0 with the other half, is what noise leaves
of a cosine of 1: the floor of such a measurement. Moments are added over measurements before they are divided, each by
the squared length of its gradient of lag 0; the error is that of a jackknife over the measurements.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

WINDOW = 8
"""Measurements that count, the newest ones."""
MIN_MEASUREMENTS = 3
"""As many as make an error that can be believed."""
MIN_HALVES = 0.2
"""Cosine of two halves of lag 0 under which nothing is concluded: with less in common their length is a guess, too."""


def bucket_of(lag: int) -> int:
    """The bucket of a lag: 0, 1, 2, 3 to 4, 5 to 8, 9 to 16, and so on."""
    return 0 if lag == 0 else 1 + (lag - 1).bit_length()


def largest_lag(bucket: int) -> int:
    """The largest lag of a bucket."""
    return 0 if bucket == 0 else 1 << (bucket - 1)


def label_of(bucket: int) -> str:
    """The lags of a bucket as metrics and pages name it, such as 5-8."""
    first, last = 0 if bucket == 0 else largest_lag(bucket - 1) + 1, largest_lag(bucket)
    return str(last) if first == last else f"{first}-{last}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketMoments:
    """Moments of one bucket in one measurement, of the sketches of its units' parts of its gradient.

    units: K. own: the sum of |c_i|^2. pairs: P. cross: the dot product with the gradient of lag 0.
    """

    units: float
    own: float
    pairs: float
    cross: float

    @property
    def signal(self) -> float:
        """Estimate of the squared length of the gradient without noise."""
        return self.pairs * self.units / (self.units - 1)


Moments = Mapping[int, BucketMoments]
"""Of one measurement, by bucket."""


def moments_of(sketches: NDArray[np.float64], buckets: Sequence[int], *, sizes: Sequence[int] = ()) -> Moments:
    """Moments of the units' sketches [U, D], whose buckets these are, over the squared length of lag 0's gradient.

    `sizes` are the units' numbers of groups, if they are not alike. A bucket of one unit is left out: nothing tells its
    noise. Empty without two units of lag 0, and if a number is not finite.
    """
    weights = np.asarray(sizes or np.ones(len(buckets)), dtype=np.float64)
    places = {bucket: np.flatnonzero(np.asarray(buckets) == bucket) for bucket in sorted(set(buckets))}
    fresh = sketches[places.get(0, np.zeros(0, dtype=np.int64))]
    new = fresh.sum(axis=0)
    scale = float(np.square(new).sum())
    if len(fresh) < 2 or not np.isfinite(sketches).all() or scale == 0:
        return {}
    found = {}
    for bucket, at in places.items():
        if len(at) < 2:
            continue
        whole, own = sketches[at].sum(axis=0), float(np.square(sketches[at]).sum())
        found[bucket] = BucketMoments(
            units=float(weights[at].sum() ** 2 / np.square(weights[at]).sum()),
            own=own / scale,
            pairs=(float(np.square(whole).sum()) - own) / scale,
            cross=float(whole @ new) / scale,
        )
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketReading:
    """The gradient of a bucket of lags beside that of lag 0, over `measurements`; None where noise hides a number.

    `cosine` and `norm_ratio` are estimates without noise, so that by chance a cosine may exceed 1. `error` is the
    standard error of the cosine.
    """

    bucket: int
    measurements: int
    cosine: float | None
    error: float | None
    norm_ratio: float | None

    def is_under(self, limit: float) -> bool:
        """True if the cosine is less, by more than two standard errors."""
        return self.cosine is not None and self.error is not None and self.cosine + 2 * self.error < limit

    def is_over(self, limit: float) -> bool:
        """True if the cosine is more, by at least two standard errors."""
        return self.cosine is not None and self.error is not None and self.cosine - 2 * self.error >= limit

    @property
    def label(self) -> str:
        """The bucket's lags."""
        return label_of(self.bucket)


@dataclass(frozen=True, slots=True, kw_only=True)
class LagReading:
    """Result of the measurements up to that of the step after `version`: by bucket, from lag 1 on, the smallest first.

    `halves`: the cosine of two halves of the groups of lag 0, which is what noise makes of 1. `newest`: the bucket of
    the largest lag in the newest measurement. `wait_s` and `pass_s`: seconds that the newest one waited for groups, and
    computed.
    """

    version: int
    buckets: tuple[BucketReading, ...]
    halves: float | None
    newest: int
    wait_s: float = 0.0
    pass_s: float = 0.0

    def at(self, bucket: int) -> BucketReading | None:
        """The reading of a bucket; None if it was not measured."""
        return next((each for each in self.buckets if each.bucket == bucket), None)

    @property
    def tells(self) -> bool:
        """True if lag 0 itself is measured well enough to compare with."""
        return self.halves is not None and self.halves >= MIN_HALVES

    @property
    def cosines(self) -> dict[str, float]:
        """The cosines that are known, by lag, and the floor: as a step's line holds them."""
        known = {f"lag {each.label}": each.cosine for each in self.buckets} | {"halves of lag 0": self.halves}
        return {name: value for name, value in known.items() if value is not None}

    @property
    def errors(self) -> dict[str, float]:
        """Standard errors of the cosines, by lag."""
        return {f"lag {each.label}": each.error for each in self.buckets if each.error is not None}

    @property
    def norm_ratios(self) -> dict[str, float]:
        """Norms over that of lag 0, by lag."""
        return {f"lag {each.label}": each.norm_ratio for each in self.buckets if each.norm_ratio is not None}

    @property
    def text(self) -> str:
        """The reading in a line; empty if noise hides everything."""
        parts = [
            f"{each.cosine:.2f}{'' if each.error is None else f' ± {each.error:.2f}'} at lag {each.label}"
            for each in self.buckets
            if each.cosine is not None
        ]
        floor = "not measurable" if self.halves is None else f"{self.halves:.2f}"
        return f"{', '.join(parts)} (halves of lag 0: {floor})" if parts else ""


def reading_of(history: Sequence[Moments], *, version: int, wait_s: float = 0.0, pass_s: float = 0.0) -> LagReading:
    """The reading of these measurements, the newest last; of at least one."""
    buckets = sorted({bucket for moments in history for bucket in moments if bucket > 0})
    fresh = [moments[0] for moments in history]
    return LagReading(
        version=version,
        buckets=tuple(_reading(bucket, history) for bucket in buckets),
        halves=_halves(fresh),
        newest=max(history[-1]),
        wait_s=wait_s,
        pass_s=pass_s,
    )


def _reading(bucket: int, history: Sequence[Moments]) -> BucketReading:
    measured = [moments for moments in history if bucket in moments]
    old, new = [moments[bucket] for moments in measured], [moments[0] for moments in measured]
    signal, fresh = sum(each.signal for each in old), sum(each.signal for each in new)
    return BucketReading(
        bucket=bucket,
        measurements=len(measured),
        cosine=_cosine(old, new),
        error=_error(old, new),
        norm_ratio=math.sqrt(signal / fresh) if signal > 0 and fresh > 0 else None,
    )


def _cosine(old: Sequence[BucketMoments], new: Sequence[BucketMoments]) -> float | None:
    signal, fresh = sum(each.signal for each in old), sum(each.signal for each in new)
    return sum(each.cross for each in old) / math.sqrt(signal * fresh) if signal > 0 and fresh > 0 else None


def _error(old: Sequence[BucketMoments], new: Sequence[BucketMoments]) -> float | None:
    """The jackknife's standard error; None of fewer than MIN_MEASUREMENTS, or if one more or less hides the cosine."""
    count = len(old)
    if count < MIN_MEASUREMENTS:
        return None
    left = [_cosine([*old[:at], *old[at + 1 :]], [*new[:at], *new[at + 1 :]]) for at in range(count)]
    known = [each for each in left if each is not None]
    if len(known) < count:
        return None
    mean = sum(known) / count
    return math.sqrt((count - 1) / count * sum((each - mean) ** 2 for each in known))


def _halves(fresh: Sequence[BucketMoments]) -> float | None:
    """Of two halves of K units, over all ways to halve them, a pair is apart with K / (2 (K - 1)), else together."""
    apart = sum(each.pairs * each.units / (4 * (each.units - 1)) for each in fresh)
    length = sum(each.own / 2 + each.pairs * (each.units - 2) / (4 * (each.units - 1)) for each in fresh)
    return apart / length if length > 0 else None
