"""The level of an environment that new leases are of: up when most recent rollouts solve their tasks, down when few do.

    accepted groups of the present level ─▶ window ─▶ share of solved ─┬─▶ high: the next level, from the next lease on
                                                                       └─▶ low: the level before, likewise

A lease's task must be the same whenever it is granted again, after a death of the learner too. So a lease's level is
that of the time when it was first granted, told by its number: each change of the level is written to the run's folder
before the first lease of that level is granted, and so is a bound on the leases that are granted, since nothing else
remembers those that were with nobody when the learner died. After a restart levels change from that bound on. The
window is not kept: it fills anew.
"""

import logging
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from learner.journal.files import anyone
from learner.leases.disk_trouble import DiskTrouble
from learner.leases.run_rows import RunRows
from protocol.trajectories import TrajectoryGroup

logger = logging.getLogger(__name__)

FILE = "curriculum.jsonl"
_AHEAD = 64
"""Leases for which the bound is written at once: so many, at most, keep the level before a restart."""


@dataclass(frozen=True, kw_only=True)
class CurriculumRules:
    """A rollout is solved with a reward of at least `success_reward`. Of `window` groups of the present level that were
    accepted in a row: at least `raise_at` solved raise it, at most `lower_at` lower it. The first lease is of level
    `start`.
    """

    start: int = 0
    window: int = 32
    raise_at: float = 0.8
    lower_at: float = 0.2
    success_reward: float = 1.0


@dataclass(frozen=True)
class LevelChange:
    """Leases from `first_lease` on are of this level."""

    first_lease: int
    level: int


class LevelLog:
    """The changes of one run's level, in a file that lives as long as the run's folder; rows of other runs are left.

    `may_write` is called before each row, and raises if the folder is not this process's any more.
    """

    def __init__(self, path: Path, *, run: str, may_write: Callable[[], None] = anyone) -> None:
        self._rows = RunRows(path, run=run, may_write=may_write)

    def read(self) -> list[LevelChange]:
        """In the order in which they were written; a torn last row was never acted upon."""
        rows = self._rows.read()
        return [LevelChange(first_lease=row["first_lease"], level=row["level"]) for row in rows if "level" in row]

    def granted_below(self) -> int:
        """No lease from this one on was ever granted."""
        return max((row["granted_below"] for row in self._rows.read() if "granted_below" in row), default=0)

    def append(self, change: LevelChange) -> None:
        """On the disk when this returns, with its name. Raises what `may_write` does, and OSError: then the file is
        as it was, since a row that was not acted upon would give leases another level in a later life.
        """
        self._rows.append({"first_lease": change.first_lease, "level": change.level})

    def append_bound(self, lease_id: int) -> None:
        """Leases below this one may be granted from here on. As `append`."""
        self._rows.append({"granted_below": lease_id})


class Curriculum:
    """The level of each lease. Without a log nothing is remembered."""

    def __init__(self, *, levels: int, rules: CurriculumRules, record: LevelLog | None = None) -> None:
        self._levels = levels
        self._rules = rules
        self._record = record
        start = LevelChange(first_lease=0, level=min(rules.start, levels - 1))
        known = record.read() if record is not None else []
        self._changes = [start, *(change for change in known if change.level < levels)]
        self._recent: deque[float] = deque(maxlen=rules.window)
        self._former = self._bound = record.granted_below() if record is not None else 0
        self._unbounded = DiskTrouble(logger, over="how far leases are granted is written down again")
        self._unmoved = DiskTrouble(logger, over="levels are written down again")

    @property
    def levelled(self) -> bool:
        """True if there is more than one level."""
        return self._levels > 1

    @property
    def level(self) -> int:
        """Level of the leases that are yet to be granted for the first time."""
        return self._changes[-1].level

    def level_of(self, lease_id: int) -> int:
        """The same at every grant of a lease."""
        place = bisect_right(self._changes, lease_id, key=lambda change: change.first_lease)
        return self._changes[place - 1].level

    def granting(self, below: int) -> None:
        """Leases below this one are granted next: that they may be stands on the disk when this returns.

        A disk that does not take it is asked again at the next grant: it takes no group either meanwhile.
        """
        if self._record is None or below <= self._bound:
            return
        try:
            self._record.append_bound(below + _AHEAD)
        except OSError as error:
            self._unbounded.goes_on("leases below %d are granted, but that cannot be written down: %s", below, error)
            return
        self._unbounded.is_over()
        self._bound = below + _AHEAD

    def accepted(self, group: TrajectoryGroup, *, next_lease: int) -> None:
        """Notes how many of a group's rollouts solved their task. `next_lease` is the first that was never granted, as
        far as the ledger knows.
        """
        next_lease = max(next_lease, self._former)
        if next_lease <= self._changes[-1].first_lease:
            return  # a former life has granted what comes next already: it keeps the levels that it had
        if group.lease_id < self._changes[-1].first_lease:
            return  # of the level before
        self._recent.append(_solved(group, self._rules.success_reward))
        if len(self._recent) < self._rules.window:
            return
        share = sum(self._recent) / len(self._recent)
        if share >= self._rules.raise_at and self.level + 1 < self._levels:
            self._move(self.level + 1, next_lease=next_lease, share=share)
        elif share <= self._rules.lower_at and self.level > 0:
            self._move(self.level - 1, next_lease=next_lease, share=share)

    def _move(self, level: int, *, next_lease: int, share: float) -> None:
        change = LevelChange(first_lease=next_lease, level=level)
        try:
            if self._record is not None:
                self._record.append(change)
        except OSError as error:
            self._unmoved.goes_on("level %d would be next, but that cannot be written down: %s", level, error)
            return
        self._unmoved.is_over()
        logger.info(
            "%.0f %% of the recent rollouts are solved: level %d from lease %d on", 100 * share, level, next_lease
        )
        self._changes.append(change)
        self._recent.clear()


def _solved(group: TrajectoryGroup, success_reward: float) -> float:
    solved, of = solved_of(group, success_reward)
    return solved / max(1, of)


def solved_of(group: TrajectoryGroup, success_reward: float) -> tuple[int, int]:
    """Numbers of a group's rollouts that have a reward of at least this, and that have one at all."""
    rewards: Sequence[float] = [one.reward.reward for one in group.trajectories if one.reward.reward is not None]
    return sum(reward >= success_reward for reward in rewards), len(rewards)


MakeCurriculum = Callable[[int], Curriculum]
"""From the number of levels, which the first env_service tells."""
