"""Items are asked for until each has a reward, or an error that another attempt would not change."""

import asyncio
from collections.abc import Iterable, Sequence

from protocol.trajectories import ErrorKind
from services.http.calls import fault_of, is_busy, is_too_large
from services.http.client import ServiceError, ServiceTimeout
from services.rewards.items import Entry, Part, RewardMetrics
from services.rewards.routes import Route, Routes
from services.rewards.settings import ClientSettings


class Settling:
    """Settles entries by rounds of requests."""

    def __init__(self, *, routes: Routes, settings: ClientSettings, metrics: RewardMetrics) -> None:
        self._routes = routes
        self._settings = settings
        self._metrics = metrics

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
        """With `merge` requests may be shared with other calls, until one breaks a service, hangs it or is refused:
        what did it takes no others along.
        """
        tried: list[str] = []
        failures = 0
        while pending:
            part = Part(pending)
            await route.ask(part, verifier=verifier, merge=merge, avoid=tried)
            pending = [entry for entry in pending if entry.scored is None]
            failure = part.failure
            if failure is None:
                tried = part.asked
                self._metrics.rescored.inc(len(pending))
                continue
            if not pending:
                return
            for entry in pending:
                entry.setback = str(failure)
            fault = fault_of(failure)
            if fault == "request" and not part.is_shared:
                await self._refused(route, pending, failure, verifier=verifier)
                return
            merge = merge and fault == "unavailable" and not isinstance(failure, ServiceTimeout)
            tried = [*tried, *part.asked]
            failures += fault == "counterpart"
            if failures >= self._settings.attempts:
                why = f"{failures} attempts at reward services failed, last: {failure}"
                _give_up(pending, kind="infrastructure", why=why)
                return
            await self._pause(route, tried, failure)

    async def _refused(self, route: Route, entries: Sequence[Entry], failure: ServiceError, *, verifier: str) -> None:
        """A request that is wrong is given up; one that is too large is tried again as two halves."""
        if len(entries) == 1 or not is_too_large(failure):
            _give_up(entries, kind="user", why=str(failure))
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
