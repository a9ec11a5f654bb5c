"""Choice of the steps that compare the gradients of groups by their lag, and of the groups that take part in it.

    served? ─▶ batch ─▶ groups of the newest version, waited for ─┬▶ units ─▶ sketches ─▶ moments by bucket of lag
                  └▶ of its own groups some of each lag ──────────┘

The groups of the newest version are leases like all others: they are trained in their own turn, later, or with the
batch itself if they were short enough to be in it. They are those that were granted first since this version is served,
whether they are long or short. Under a bound of 0 they are the batch.

The groups of a bucket are shared out to a few units, of each of which one gradient is computed and sketched: what units
have in common tells as much as what groups have, and eight sketches cost less than a hundred.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from learner.leases.intake import TakenBatch
from learner.training.lag_gradients import bucket_of
from protocol.trajectories import TrajectoryGroup

_UNITS = 8
"""Of a bucket: 7/8 of its pairs of groups are in different ones."""


@dataclass(frozen=True, kw_only=True)
class MeasurementPlan:
    """`every` so many steps a measurement, of at most `groups` groups of each bucket of lags; none with None.

    `timeout_s`: longest wait for generators to serve the newest version, and then for groups of it, in seconds.
    """

    every: int | None
    groups: int
    timeout_s: float

    def is_due(self, version: int) -> bool:
        """True if the step that is taken at `version` measures. At the first one nothing is old."""
        return self.every is not None and version > 0 and (version + 1) % self.every == 0

    def select(self, batch: TakenBatch, newest: Sequence[TrajectoryGroup]) -> "ComparedGroups":
        """The groups that take part: of each bucket the first ones. `newest` are those of lag 0; others of the batch
        that have it take no part: to be in it already they had to be short. Neither do those that are trained again:
        the weights have seen them, which the gradients of others do not tell of.
        """
        fresh = zip(batch.fresh, batch.lags[: len(batch.fresh)], strict=True)
        lagging = [(group, bucket_of(lag)) for group, lag in fresh if lag > 0]
        room: dict[int, int] = {}
        chosen = []
        for group, bucket in (*lagging, *((group, 0) for group in newest)):
            room[bucket] = room.get(bucket, self.groups) - 1
            if room[bucket] >= 0:
                chosen.append((group, bucket))
        return ComparedGroups(groups=tuple(group for group, _ in chosen), buckets=tuple(one for _, one in chosen))


@dataclass(frozen=True)
class ComparedGroups:
    """Groups, and the bucket of each one's lag."""

    groups: tuple[TrajectoryGroup, ...]
    buckets: tuple[int, ...]

    def only(self, places: Collection[int]) -> "ComparedGroups":
        """The groups at these places, in this order."""
        groups, buckets = self.groups, self.buckets
        return ComparedGroups(groups=tuple(groups[at] for at in places), buckets=tuple(buckets[at] for at in places))

    @property
    def fresh(self) -> int:
        """Number of groups of lag 0."""
        return self.buckets.count(0)

    @property
    def units(self) -> tuple[int, ...]:
        """The unit of each group: those of a bucket are dealt out in turn."""
        return units_of(self.buckets)

    @property
    def unit_buckets(self) -> tuple[int, ...]:
        """The bucket of each unit."""
        found = dict(zip(self.units, self.buckets, strict=True))
        return tuple(found[unit] for unit in range(len(found)))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of groups of each unit."""
        count = Counter(self.units)
        return tuple(count[unit] for unit in range(len(count)))


def units_of(buckets: Sequence[int]) -> tuple[int, ...]:
    """Units for groups of these buckets, 8 for a bucket, or as many as it has groups; numbered from 0 on."""
    seen: Counter[int] = Counter()
    numbers: dict[tuple[int, int], int] = {}
    found = []
    for bucket in buckets:
        place = (bucket, seen[bucket] % _UNITS)
        seen[bucket] += 1
        found.append(numbers.setdefault(place, len(numbers)))
    return tuple(found)
