"""Bound on the completions outstanding at each generator: lower while they wait in its queue, higher while few do.

    every poll_s: GET /v1/state ─▶ waiting for too long? ─┬─▶ yes: a fifth less than are outstanding
                                                          └─▶ few wait, and the bound is reached: a few more

A completion that waits in a generator's queue waits behind whatever came before it; one that waits here goes by the age
of its lease, and to whichever generator has room first. An engine admits nothing while its cache is full, so that its
queue tells of the cache, too.
"""

import asyncio
import logging
from dataclasses import dataclass
from math import inf

from env_service.rollouts.fleet import GeneratorFleet
from protocol.generation import GeneratorState
from services.http.client import HttpClient, ServiceError

logger = logging.getLogger(__name__)

_LESS = 0.8
_MORE = 0.05
_FEW = 0.5
"""Of the share that may wait. Where completions are short, some of them are being read in whenever one looks."""
_PATIENCE = 2
"""Polls in a row in which a queue is seen: one may be a group that has just come."""
_DEADLINE_S = 5.0


@dataclass(frozen=True)
class ConcurrencyBounds:
    """`least` and `most` completions at a generator; `queue_share` of them may wait for their first token."""

    least: int
    most: int
    queue_share: float


@dataclass
class ConcurrencyWindow:
    """The bound of one generator: none, until its queue was seen."""

    bounds: ConcurrencyBounds
    allowed: float = inf
    _crowded: int = 0

    def told(self, *, running: int, waiting: int, outstanding: int) -> float:
        """The bound from now on. `running` completions are at the generator, `waiting` of them have no token yet;
        `outstanding` are ours.
        """
        bounds = self.bounds
        if waiting > bounds.queue_share * running + 1:
            self._crowded += 1
            if self._crowded >= _PATIENCE:
                self.allowed = max(bounds.least, int(_LESS * min(self.allowed, outstanding)))
                self._crowded = 0
            return self.allowed
        self._crowded = 0
        if waiting <= _FEW * bounds.queue_share * running and outstanding >= self.allowed:
            self.allowed += max(1, int(_MORE * self.allowed))
        self.allowed = min(self.allowed, bounds.most)
        return self.allowed


class Concurrency:
    """Watches the generators of a fleet."""

    def __init__(self, *, http: HttpClient, fleet: GeneratorFleet, bounds: ConcurrencyBounds, poll_s: float) -> None:
        self._http = http
        self._fleet = fleet
        self._bounds = bounds
        self._poll_s = poll_s
        self._windows: dict[str, ConcurrencyWindow] = {}

    async def watch(self) -> None:
        """Ask every generator again and again, until cancelled."""
        while True:
            await asyncio.sleep(self._poll_s)
            await self.look()

    async def look(self) -> None:
        """Ask every generator once. One that does not answer keeps its bound: its breaker tells of that."""
        serving = {generator.generator_id: generator.url for generator in self._fleet.serving}
        self._windows = {name: self._windows.get(name) or ConcurrencyWindow(self._bounds) for name in serving}
        await asyncio.gather(*(self._ask(name, url) for name, url in serving.items()))

    async def _ask(self, name: str, url: str) -> None:
        outstanding = self._fleet.outstanding.get(name, 0)
        try:
            state = await self._http.get(f"{url.rstrip('/')}/v1/state", GeneratorState, deadline_s=_DEADLINE_S)
        except ServiceError as error:
            logger.debug("generator %s does not tell its load: %s", name, error)
            return
        window = self._windows[name]
        before = window.allowed
        self._fleet.allow(name, window.told(running=state.running, waiting=state.waiting, outstanding=outstanding))
        if window.allowed != before:
            logger.debug(
                "at most %s completions at generator %s, now that %d wait", window.allowed, name, state.waiting
            )
