"""How much of the training time the generators had nothing to do: asked of each every few seconds."""

import asyncio
import logging

from learner.weights.fleet import Fleet
from protocol.generation import GeneratorState
from services.http_client import HttpClient, ServiceError

log = logging.getLogger(__name__)

_EVERY_S = 5.0


class IdleWatch:
    """Sums idle and passed seconds over all serving generators, between `begin` and `end`."""

    def __init__(self, *, fleet: Fleet, client: HttpClient) -> None:
        self._fleet = fleet
        self._client = client
        self._last: dict[str, GeneratorState] = {}
        self._counting = False
        self._idle_s = 0.0
        self._passed_s = 0.0

    @property
    def share(self) -> float | None:
        """Idle time over passed time; None if nothing was measured."""
        return self._idle_s / self._passed_s if self._passed_s > 0 else None

    async def begin(self) -> None:
        """Training begins: count from now."""
        await self._ask_all()
        self._counting = True

    async def end(self) -> None:
        """Training has ended: count until now."""
        await self._ask_all()
        self._counting = False

    async def run(self) -> None:
        """Asks until cancelled."""
        while True:
            await asyncio.sleep(_EVERY_S)
            await self._ask_all()

    async def _ask_all(self) -> None:
        for generator in self._fleet.serving():
            try:
                state = await self._client.get(f"{generator.url}/v1/state", GeneratorState, deadline_s=5.0)
            except ServiceError as error:
                log.debug("no state of generator %s: %s", generator.generator_id, error)
                continue
            before = self._last.get(generator.generator_id)
            self._last[generator.generator_id] = state
            if self._counting and before is not None and state.uptime_s >= before.uptime_s:
                self._idle_s += state.idle_s - before.idle_s
                self._passed_s += state.uptime_s - before.uptime_s
