"""The reward services: which of them is asked next, and the wait when none answers."""

import random
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf

from services.breaker import Breakers, Call
from services.waiting import Waiting

_BUSY_S = 1.0
"""How long a service is left alone that says it is busy, and not for how long."""

_GROWTH_S = 10.0
"""After so many seconds without being told that it is busy, a service is asked for twice as much at once."""


@dataclass
class _Load:
    """`under_way` requests at a service, of which it takes no more than `most` at once, nor any before `busy_until`."""

    under_way: int = 0
    most: float = inf
    busy_until: float = -inf
    grows_at: float = inf

    def refused(self, *, until: float, now: float) -> None:
        """It is busy with what is under way: no more than that fits in."""
        self.busy_until = max(self.busy_until, until)
        self.most = max(1, min(self.most, self.under_way))
        self.grows_at = max(self.busy_until, now) + _GROWTH_S

    def has_room(self, now: float) -> bool:
        if now >= self.grows_at:
            self.most, self.grows_at = 2 * self.most, now + _GROWTH_S
        return now >= self.busy_until and self.under_way < self.most


class RewardEndpoints:
    """The services at `urls`, taken in turn, the least busy first; one that fails again and again is left alone.

    One that is not there yet, or not any more, costs no more than a refused connection now and then. One that is busy
    is asked for no more at once than it took.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        breakers: Breakers | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._urls = [url.rstrip("/") for url in urls]
        self._breakers = breakers or Breakers("reward service")
        self._clock = clock
        self._loads = {url: _Load() for url in self._urls}

    def __len__(self) -> int:
        return len(self._urls)

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(sorted(self._urls))

    async def choose(self, *, avoid: Collection[str] = ()) -> str:
        """The address of the next request's service; waits, without end, until one is not left alone.

        One in `avoid` only if there is no other. To be followed by `call` without an await between them.
        """
        while True:
            looked_at = self._clock()
            if admitted := self._admitted():
                return self._take(admitted, avoid=avoid)
            await self._change(since=looked_at)

    def another(self, *, than: Collection[str]) -> str | None:
        """One that is believed to work, is not busy, and is not among `than`; None if there is none."""
        admitted = [url for url in self._admitted() if url not in than and self._breakers[url].state == "closed"]
        return self._take(admitted, avoid=()) if admitted else None

    @contextmanager
    def call(self, url: str) -> Iterator[Call]:
        """A request to one of them, under way while the body runs, which says how it went."""
        load = self._loads[url]
        load.under_way += 1
        try:
            with self._breakers[url].call() as call:
                yield call
        finally:
            load.under_way -= 1
            if load.under_way < load.most < inf:
                self._breakers.stir()

    def busy(self, url: str, *, for_s: float | None) -> None:
        """It takes nothing for so long. A little longer, by chance: not all clients come back at the same moment."""
        now = self._clock()
        rest_s = (_BUSY_S if for_s is None else for_s) * random.uniform(1.0, 1.25)
        self._loads[url].refused(until=now + rest_s, now=now)
        self._breakers.stir()

    async def watch(self, waits: Waiting) -> None:
        """Keep `waits` true to whether any of them answers and takes requests, until cancelled."""
        whom = f"the reward service at {' or '.join(self.urls)}"
        while True:
            await self._until(at_hand=False)
            with waits.wait(whom, quiet_s=0.5):
                await self._until(at_hand=True)

    def _take(self, admitted: Sequence[str], *, avoid: Collection[str]) -> str:
        chosen = min(admitted, key=lambda url: (url in avoid, self._loads[url].under_way))
        self._urls.remove(chosen)
        self._urls.append(chosen)
        return chosen

    def _admitted(self) -> list[str]:
        now = self._clock()
        return [url for url in self._urls if self._breakers[url].admits and self._loads[url].has_room(now)]

    def _at_hand(self) -> bool:
        now = self._clock()
        return any(self._breakers[url].state == "closed" and now >= self._loads[url].busy_until for url in self._urls)

    async def _until(self, *, at_hand: bool) -> None:
        while True:
            looked_at = self._clock()
            if self._at_hand() == at_hand:
                return
            await self._change(since=looked_at)

    async def _change(self, *, since: float) -> None:
        """Return after the next verdict, or when a rest is over that was not at `since`."""
        ends = (load.busy_until for load in self._loads.values() if load.busy_until > since)
        await self._breakers.change(self._urls, since=since, until=min(ends, default=inf))
