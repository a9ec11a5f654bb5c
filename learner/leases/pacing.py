"""Bound on running and buffered groups, so that training neither waits for groups nor trains old ones.

Groups that wait in the buffer only grow older. So the learner asks for as few groups at once as keep it from waiting:
more when it had to wait for a batch, fewer when a good part of another batch lay ready. That is the rule `demand`. With
`full` it always asks for as many as the bound permits, and what is trained is as old as that. The hard bound is the
ledger's and does not depend on this.
"""

from dataclasses import dataclass
from typing import Literal

PacingRule = Literal["demand", "full"]

_WAITED_SHARE = 0.05
_GROW, _SHRINK = 0.1, 0.05
_GROW_EVERY_S = 10.0
_SPARE = 0.15


@dataclass
class Pacing:
    """`ahead` is the number of groups that may be running or buffered; it moves between one step's and the bound's."""

    groups_per_step: int
    max_lag: int
    rule: PacingRule = "demand"
    ahead: float = 0.0
    _grown: int = 0
    """Number of times that it grew while the next batch was waited for."""

    def __post_init__(self) -> None:
        self.ahead = self._most if self.rule == "full" else min(2.0 * self.groups_per_step, self._most)

    @property
    def _most(self) -> float:
        return (self.max_lag + 1.0) * self.groups_per_step

    def bound(self, max_lag: int) -> None:
        """The bound is another one now: no more groups are asked for ahead than it permits."""
        self.max_lag = max_lag
        self.ahead = self._most if self.rule == "full" else min(self.ahead, self._most)

    def taken(self, *, waited_s: float, since_last_s: float, left_over: int) -> None:
        """A batch was taken: the trainer had waited so long for it, and so many groups stay in the buffer."""
        self._grown = 0
        if self.rule == "full":
            return
        step = self.groups_per_step
        if waited_s > _WAITED_SHARE * since_last_s:
            self.ahead = min(self.ahead + _GROW * step, self._most)
        elif left_over > _SPARE * step:
            self.ahead = max(self.ahead - _SHRINK * step, float(step))

    def awaited(self, *, waited_s: float) -> None:
        """A batch has been waited for so long, and no more groups may be granted. If all that run are long, none of
        them will make it full, and no step would ever say that more are needed.
        """
        due = int(waited_s / _GROW_EVERY_S)
        self.ahead = min(self.ahead + max(0, due - self._grown) * _GROW * self.groups_per_step, self._most)
        self._grown = max(due, self._grown)

    def room(self, *, running: int, buffered: int) -> int:
        """Number of groups that may be granted now."""
        return max(0, int(self.ahead) - running - buffered)
