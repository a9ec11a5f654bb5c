"""Choice of the steps that compare the gradients of groups by their lag, and of the groups that take part in it.

    served? ─▶ batch ─▶ groups of the newest version, waited for ─┬▶ sketches of all ─▶ moments by bucket of lag
                  └▶ of its own groups some of each lag ──────────┘

The groups of the newest version are leases like all others: they are trained in their own turn, later. They are those
that were granted first since this version is served, whether they are long or short.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from learner.leases.intake import TakenBatch
from learner.training.lag_gradients import bucket_of
from protocol.trajectories import TrajectoryGroup


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
        """The groups that take part: of each bucket the first ones. Those of the batch that have lag 0 take none: to be
        in it already they had to be short.
        """
        lagging = [(group, bucket_of(lag)) for group, lag in zip(batch.groups, batch.lags, strict=True) if lag > 0]
        room: dict[int, int] = {}
        chosen = []
        for group, bucket in (*lagging, *((group, 0) for group in newest)):
            room[bucket] = room.get(bucket, self.groups) - 1
            if room[bucket] >= 0:
                chosen.append((group, bucket))
        return ComparedGroups(groups=tuple(group for group, _ in chosen), buckets=tuple(bucket for _, bucket in chosen))


@dataclass(frozen=True)
class ComparedGroups:
    """Groups, and the bucket of each one's lag."""

    groups: tuple[TrajectoryGroup, ...]
    buckets: tuple[int, ...]

    @property
    def fresh(self) -> int:
        """Number of groups of lag 0."""
        return self.buckets.count(0)
