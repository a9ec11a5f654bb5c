"""Times of the leases that are open: when one was granted, and when its group was there.

    granted() ─▶ accepted() ─▶ taken(): the group's times, for whoever looks at the run afterwards

They are of this process's life: a group that a former one granted or accepted has no such time.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from protocol.trajectories import TrajectoryGroup


@dataclass(frozen=True, kw_only=True)
class LeaseTimes:
    """Times of a group that a batch took, in seconds since 1970; None for what this process has not seen.

    They are as far apart as the monotonic clock says, whatever was done to the other one meanwhile.
    """

    granted_unix_s: float | None
    accepted_unix_s: float | None
    taken_unix_s: float


class LeaseDiary:
    """Notes times of open leases, of which each has at most one entry. `clock` is monotonic, `wall` since 1970."""

    def __init__(self, *, clock: Callable[[], float], wall: Callable[[], float] = time.time) -> None:
        self._clock, self._wall = clock, wall
        self._granted: dict[int, tuple[int, int, float]] = {}
        self._accepted: dict[int, tuple[float | None, float]] = {}

    def granted(self, lease_id: int, *, incarnation: int, attempt: int) -> None:
        """An attempt begins; what was noted of a former one is of no use any more."""
        self._granted[lease_id] = (incarnation, attempt, self._clock())

    def accepted(self, group: TrajectoryGroup) -> None:
        """The group is there. It may be of another attempt than the newest: then nobody knows when that was granted."""
        *newest, began = self._granted.pop(group.lease_id, (None, None, 0.0))
        own = newest == [group.incarnation, group.attempt]
        self._accepted[group.lease_id] = (began if own else None, self._clock())

    def forget(self, lease_id: int) -> None:
        """Its group, if there is one, will not be trained."""
        self._granted.pop(lease_id, None)
        self._accepted.pop(lease_id, None)

    def taken(self, lease_ids: Sequence[int]) -> tuple[LeaseTimes, ...]:
        """Times of the groups of a batch, which is taken now; nothing is kept of them."""
        now, wall = self._clock(), self._wall()

        def unix(at: float | None) -> float | None:
            return None if at is None else round(wall - (now - at), 3)

        return tuple(
            LeaseTimes(granted_unix_s=unix(granted), accepted_unix_s=unix(accepted), taken_unix_s=round(wall, 3))
            for granted, accepted in (self._accepted.pop(lease_id, (None, None)) for lease_id in lease_ids)
        )
