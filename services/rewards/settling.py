"""Items are asked for until each has a reward, or an error that another attempt would not change."""

import asyncio
from collections.abc import Callable, Iterable, Sequence

from protocol.trajectories import ErrorKind
from services.http_client import ServiceError
from services.rewards.entries import Entry, Part
from services.rewards.metrics import RewardMetrics
from services.rewards.routes import Route, Routes
from services.rewards.settings import ClientSettings
from services.verdicts import fault_of, is_busy


class Settling:
    """Settles entries by rounds of requests. Once `closed`, what is not settled is given up."""

    def __init__(
        self, *, routes: Routes, settings: ClientSettings, metrics: RewardMetrics, closed: Callable[[], bool]
    ) -> None:
        self._routes = routes
        self._settings = settings
        self._metrics = metrics
        self._closed = closed

    async def settle(self, entries: Sequence[Entry]) -> None:
        """Returns when all are settled, which may be never while no service answers."""
        by_verifier: dict[str, list[Entry]] = {}
        for entry in entries:
            by_verifier.setdefault(entry.item.verifier, []).append(entry)
        async with asyncio.TaskGroup() as tasks:
            for verifier, group in by_verifier.items():
                route = self._routes.of(verifier)
                if route is None:
                    _give_up(group, kind="user", why=f"no reward service is set for verifier {verifier!r}")
                    continue
                most = self._settings.batch_items
                for at in range(0, len(group), most):
                    tasks.create_task(self._piece(route, group[at : at + most], verifier=verifier, merge=True))

    async def _piece(self, route: Route, pending: Sequence[Entry], *, verifier: str, merge: bool) -> None:
        """With `merge` requests may be shared with other calls, until one breaks a service or is refused: what did it
        takes no others along.
        """
        tried: list[str] = []
        failures = 0
        while not self._closed():
            part = Part(pending)
            await route.ask(part, verifier=verifier, merge=merge, avoid=tried)
            pending = [entry for entry in pending if entry.scored is None]
            failure = part.failure
            if not pending:
                return
            if failure is None:
                tried = part.asked
                self._metrics.rescored.inc(len(pending))
                continue
            for entry in pending:
                entry.setback = str(failure)
            fault = fault_of(failure)
            if fault == "request" and not part.is_shared:
                await self._refused(route, pending, verifier=verifier)
                return
            merge = merge and fault == "unavailable"
            tried = [*tried, *part.asked]
            failures += fault == "counterpart"
            if failures >= self._settings.attempts:
                why = f"{failures} attempts at reward services failed, last: {failure}"
                _give_up(pending, kind="infrastructure", why=why)
                return
            await self._pause(route, tried, failure)
        _give_up(pending, kind="infrastructure", why="the client of the reward services was closed")

    async def _refused(self, route: Route, entries: Sequence[Entry], *, verifier: str) -> None:
        """Halves of a request that is refused are tried apart: only what is wrong by itself is given up."""
        if len(entries) == 1:
            _give_up(entries, kind="user", why=entries[0].setback)
            return
        middle = len(entries) // 2
        async with asyncio.TaskGroup() as tasks:
            for half in (entries[:middle], entries[middle:]):
                tasks.create_task(self._piece(route, half, verifier=verifier, merge=False))

    async def _pause(self, route: Route, tried: Sequence[str], failure: ServiceError) -> None:
        """Only once all services have been tried, and not beside the pause that a busy one asks for."""
        rounds, rest = divmod(len(tried), len(route.endpoints))
        if not rest and not is_busy(failure):
            await self._settings.backoff.pause(rounds)


def _give_up(entries: Iterable[Entry], *, kind: ErrorKind, why: str) -> None:
    for entry in entries:
        entry.give_up(kind=kind, why=why)
