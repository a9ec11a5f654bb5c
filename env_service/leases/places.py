"""Places for leases, and who of those that wait gets the next one.

    evaluation before training ─▶ environments below their limit ─▶ the least of its share ─▶ the oldest lease

An environment whose episodes take hours holds its places for hours. Without a limit and without weights it comes to
hold all of them, since each place that a short one leaves goes to whoever is next in the line.
"""

import asyncio
import itertools
from bisect import insort
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

Rank = tuple[int, ...]
"""Of a lease: 0 or 1, evaluation or training; then its age, the oldest first."""


@dataclass(frozen=True)
class PlaceRule:
    """At most `most` leases of an environment run at once. Of environments that wait, one gets its `weight` in places
    relative to the others; where none has one, the oldest lease is next, whichever it is of.
    """

    most: int | None = None
    weight: float | None = None


class LeasePlaces:
    """`count` places. `running` and `waiting` count leases by environment."""

    def __init__(self, count: int, rules: Mapping[str, PlaceRule] | None = None) -> None:
        self._free = count
        self._rules = rules or {}
        self._is_weighed = any(rule.weight is not None for rule in self._rules.values())
        self._lines: dict[str, list[tuple[Rank, int, asyncio.Future[None]]]] = {}
        self._arrivals = itertools.count()
        self.running: Counter[str] = Counter()
        self.waiting: Counter[str] = Counter()

    @asynccontextmanager
    async def held(self, rank: Rank, environment: str) -> AsyncIterator[None]:
        """A place, while the body runs."""
        given: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        insort(self._lines.setdefault(environment, []), (rank, next(self._arrivals), given))
        self.waiting[environment] += 1
        self._give()
        try:
            await given
        except asyncio.CancelledError:
            if given.done() and not given.cancelled():
                self._take_back(environment)
            raise
        finally:
            self.waiting[environment] -= 1
        try:
            yield
        finally:
            self._take_back(environment)

    def _take_back(self, environment: str) -> None:
        self._free += 1
        self.running[environment] -= 1
        self._give()

    def _give(self) -> None:
        while self._free and (environment := self._next()) is not None:
            _, _, given = self._lines[environment].pop(0)
            given.set_result(None)
            self._free -= 1
            self.running[environment] += 1

    def _next(self) -> str | None:
        """The environment whose oldest lease gets the next place."""
        heads = {name: rank for name in list(self._lines) if (rank := self._head(name)) is not None}
        return min(heads, key=lambda name: (heads[name][0], self._load(name), heads[name]), default=None)

    def _head(self, name: str) -> Rank | None:
        """Rank of an environment's lease that is first in line; None if none waits, or none of it may run now."""
        line = self._lines[name]
        while line and line[0][2].done():  # it was cancelled
            line.pop(0)
        if not line:
            del self._lines[name]
            return None
        most = self._rule(name).most
        return line[0][0] if most is None or self.running[name] < most else None

    def _load(self, name: str) -> float:
        """Places that an environment holds, by its weight."""
        if not self._is_weighed:
            return 0.0
        weight = self._rule(name).weight
        return self.running[name] / (1.0 if weight is None else weight)

    def _rule(self, name: str) -> PlaceRule:
        return self._rules.get(name, PlaceRule())
