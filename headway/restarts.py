"""How often, and how soon, a process that has died is started again. A record without clock or process."""

from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True)
class RestartPolicy:
    """At most `most` restarts of one process without `stable_s` seconds of life between them.

    The first comes `first_s` seconds after the death, each further one twice as long after it, `longest_s` at most.
    """

    most: int = 5
    first_s: float = 1.0
    longest_s: float = 30.0
    stable_s: float = 60.0


@dataclass(frozen=True)
class Restart:
    """The `number`-th restart, from 1, `after_s` seconds from now."""

    number: int
    after_s: float


class Restarts:
    """The restarts of several processes, by name. `now` is in seconds."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._in_row: Counter[str] = Counter()
        self._deaths: Counter[str] = Counter()
        self._started_at: dict[str, float] = {}

    def started(self, name: str, *, now: float) -> None:
        """The process runs."""
        self._started_at[name] = now

    def count(self, name: str) -> int:
        """How often it has died so far."""
        return self._deaths[name]

    def ended(self, name: str, *, now: float) -> Restart | None:
        """The process has died; None if it is not to be started again."""
        self._deaths[name] += 1
        if now - self._started_at[name] >= self._policy.stable_s:
            self._in_row[name] = 0
        if self._in_row[name] >= self._policy.most:
            return None
        self._in_row[name] += 1
        after_s = min(self._policy.longest_s, self._policy.first_s * 2.0 ** (self._in_row[name] - 1))
        return Restart(number=self._in_row[name], after_s=after_s)
