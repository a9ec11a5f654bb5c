"""Places for leases, and who of those that wait gets the next one.

    evaluation before training ─▶ environments below their limit ─▶ the least of its share ─▶ the oldest lease

An environment whose rollouts take hours holds its places for hours. Without a limit and without weights it comes to
hold all of them, since each place that a short one leaves goes to whoever is next in the line.

How many places in all evaluation has beside training the learner says, by what it grants. Those of one environment that
has a limit would be held by evaluation alone until its last task: so while training of it waits, evaluation goes first
in half of them, and in a single one takes turns with training.
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
_EVALUATION, _TRAINING = 0, 1
_Line = tuple[str, int]
"""Of an environment's leases that wait, those of one kind."""


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
        self._lines: dict[_Line, list[tuple[Rank, int, asyncio.Future[None]]]] = {}
        self._arrivals = itertools.count()
        self.running: Counter[str] = Counter()
        self.waiting: Counter[str] = Counter()
        self._evaluating: Counter[str] = Counter()
        self._evaluated_last: set[str] = set()
        """Environments of which the place that was given last is an evaluation's."""

    @asynccontextmanager
    async def held(self, rank: Rank, environment: str) -> AsyncIterator[None]:
        """A place, while the body runs."""
        given: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        line = environment, rank[0]
        insort(self._lines.setdefault(line, []), (rank, next(self._arrivals), given))
        self.waiting[environment] += 1
        self._give()
        try:
            await given
        except asyncio.CancelledError:
            if given.done() and not given.cancelled():
                self._take_back(line)
            raise
        finally:
            self.waiting[environment] -= 1
        try:
            yield
        finally:
            self._take_back(line)

    def _take_back(self, line: _Line) -> None:
        self._free += 1
        self._count(line, -1)
        self._give()

    def _count(self, line: _Line, change: int) -> None:
        name, kind = line
        self.running[name] += change
        self._evaluating[name] += change * (kind == _EVALUATION)

    def _give(self) -> None:
        while self._free and (line := self._next()) is not None:
            _, _, given = self._lines[line].pop(0)
            given.set_result(None)
            self._free -= 1
            self._count(line, 1)
            (self._evaluated_last.add if line[1] == _EVALUATION else self._evaluated_last.discard)(line[0])

    def _next(self) -> _Line | None:
        """The line whose oldest lease gets the next place."""
        heads = {line: rank for line in list(self._lines) if (rank := self._head(line)) and self._may_run(*line)}
        return min(heads, key=lambda line: (heads[line][0], self._load(line[0]), heads[line]), default=None)

    def _head(self, line: _Line) -> Rank | None:
        """Rank of the lease that is first in a line; None if none waits."""
        waiting = self._lines.get(line, [])
        while waiting and waiting[0][2].done():  # it was cancelled
            waiting.pop(0)
        if not waiting:
            self._lines.pop(line, None)
            return None
        return waiting[0][0]

    def _may_run(self, name: str, kind: int) -> bool:
        """True if the environment's limit has a place for a lease of that kind."""
        most = self._rule(name).most
        if most is None:
            return True
        if self.running[name] >= most:
            return False
        if kind == _TRAINING or self._head((name, _TRAINING)) is None:
            return True
        return name not in self._evaluated_last if most == 1 else self._evaluating[name] < most // 2

    def _load(self, name: str) -> float:
        """Places that an environment holds, by its weight."""
        if not self._is_weighed:
            return 0.0
        weight = self._rule(name).weight
        return self.running[name] / (1.0 if weight is None else weight)

    def _rule(self, name: str) -> PlaceRule:
        return self._rules.get(name, PlaceRule())
