"""The reward services: which of them is asked next, and the wait when none answers."""

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

from services.breaker import Breakers, Call
from services.waiting import Waiting

_BUSY_S = 1.0
"""How long a service is left alone that says it is busy, and not for how long."""


class RewardEndpoints:
    """The services at `urls`, taken in turn, the least busy first; one that fails again and again is left alone.

    One that is not there yet, or not any more, costs no more than a refused connection now and then.
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
        self._busy_until: dict[str, float] = {}
        self._under_way = Counter[str]()

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
            if admitted := self._admitted():
                return self._take(admitted, avoid=avoid)
            await self._change()

    def another(self, *, than: Collection[str]) -> str | None:
        """One that is believed to work, is not busy, and is not among `than`; None if there is none."""
        admitted = [url for url in self._admitted() if url not in than and self._breakers[url].state == "closed"]
        return self._take(admitted, avoid=()) if admitted else None

    @contextmanager
    def call(self, url: str) -> Iterator[Call]:
        """A request to one of them, under way while the body runs, which says how it went."""
        self._under_way[url] += 1
        try:
            with self._breakers[url].call() as call:
                yield call
        finally:
            self._under_way[url] -= 1

    def busy(self, url: str, *, for_s: float | None) -> None:
        """It takes nothing for so long. A little longer, by chance: not all come back at the same moment."""
        rest_s = (_BUSY_S if for_s is None else for_s) * random.uniform(1.0, 1.25)
        self._busy_until[url] = max(self._busy_until.get(url, 0.0), self._clock() + rest_s)
        self._breakers.stir()

    async def watch(self, waits: Waiting) -> None:
        """Keep `waits` true to whether any of them answers and takes requests, until cancelled."""
        whom = f"the reward service at {' or '.join(self.urls)}"
        while True:
            while self._at_hand():
                await self._change()
            with waits.wait(whom, quiet_s=0.5):
                while not self._at_hand():
                    await self._change()

    def _take(self, admitted: Sequence[str], *, avoid: Collection[str]) -> str:
        chosen = min(admitted, key=lambda url: (url in avoid, self._under_way[url]))
        self._urls.remove(chosen)
        self._urls.append(chosen)
        return chosen

    def _admitted(self) -> list[str]:
        return [url for url in self._urls if self._breakers[url].admits and not self._busy_s(url)]

    def _at_hand(self) -> bool:
        return any(self._breakers[url].state == "closed" and not self._busy_s(url) for url in self._urls)

    def _busy_s(self, url: str) -> float:
        """Seconds until it is to be asked again; 0 if it may be now."""
        return max(0.0, self._busy_until.get(url, 0.0) - self._clock())

    async def _change(self) -> None:
        """Return after the next verdict, or when a rest is over."""
        rests = [rest for url in self._urls if (rest := self._busy_s(url))]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(rests) if rests else None):
                await self._breakers.change(self._urls)
