"""A tally of what pieces of work of one thread cost, by what they held."""

import time
from collections.abc import Callable

from protocol.costs import CostSums


class CostTally:
    """Adds up pieces of work with so many counts each. `clock` counts the CPU seconds of the thread that works.

    Pieces follow each other without a gap (`turn`, `hold`), or are added with their seconds.
    """

    def __init__(self, counts: int, *, clock: Callable[[], float] = time.thread_time) -> None:
        self._clock = clock
        self._products = [[0.0] * counts for _ in range(counts)]
        self._seconds = [0.0] * counts
        self._held: tuple[float, ...] | None = None
        self._since = 0.0

    def turn(self) -> None:
        """The piece at work is over, and the next one begins."""
        now = self._clock()
        if self._held is not None:
            self.add(now - self._since, *self._held)
        self._held, self._since = None, now

    def hold(self, *counts: float) -> None:
        """The piece that has begun has these counts."""
        self._held = counts

    def drop(self) -> None:
        """The piece at work does not count: something else was done in it."""
        self._held = None

    def add(self, seconds: float, *counts: float) -> None:
        """Adds a piece of work."""
        for index, count in enumerate(counts):
            self._seconds[index] += count * seconds
            row = self._products[index]
            for other, another in enumerate(counts):
                row[other] += count * another

    def taken(self) -> CostSums:
        """Sums over all pieces since the last call."""
        found = self.sums()
        self._products = [[0.0] * len(self._seconds) for _ in self._seconds]
        self._seconds = [0.0] * len(self._seconds)
        return found

    def sums(self) -> CostSums:
        """Sums over all pieces that are over."""
        return CostSums(products=tuple(map(tuple, self._products)), seconds=tuple(self._seconds))
