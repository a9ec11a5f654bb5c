"""Scores items by reward services: everything that can go wrong on the way there, and what is done about it.

score(items) ─▶ by verifier ─▶ route ─▶ pieces ─▶ round of requests ─▶ settled ─▶ results in order
                                          ▲         └─ not settled: those again, elsewhere first
                                          └─────────────┘

async with RewardClient(urls=["http://rewards-0:7320", "http://rewards-1:7320"], token=token) as client:
    results = await client.score(items)

`score_sync` does it from a script, without an event loop of one's own.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from types import TracebackType
from typing import Self, TypeVar

from pydantic import SecretStr

from protocol.rewards import ScoreItem
from protocol.trajectories import ErrorKind
from services.http.client import Contact, ServiceError, ServiceTimeout
from services.http.faults import fault_of, is_busy, is_too_large
from services.http.metrics import Metrics
from services.http.tls import TlsContext, TlsFiles, client_tls
from services.http.waiting import Waiting
from services.rewards.groups import halves, pieces
from services.rewards.items import CallPart, Entry, ItemScore, RewardMetrics
from services.rewards.routes import Route, Routes
from services.rewards.settings import ClientSettings, RewardService

T = TypeVar("T")


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
                for piece in pieces(group, most=self._settings.batch_items):
                    tasks.create_task(self._piece(route, piece, verifier=verifier, merge=True))

    async def _piece(self, route: Route, pending: Sequence[Entry], *, verifier: str, merge: bool) -> None:
        """With `merge` requests may be shared with other calls, until one breaks a service, hangs it or is refused:
        what did it takes no others along.
        """
        tried: list[str] = []
        failures = 0
        while pending:
            part = CallPart(pending, avoid=tried)
            await route.ask(part, verifier=verifier, merge=merge)
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
            if self._is_hopeless(part, pending):
                return
            hangs = isinstance(failure, ServiceTimeout) and part.was_sent
            if hangs and len(pending) > 1 and not part.is_shared:
                await self._halves(route, pending, verifier=verifier)
                return
            merge = merge and fault == "unavailable" and not hangs
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
        await self._halves(route, entries, verifier=verifier)

    async def _halves(self, route: Route, entries: Sequence[Entry], *, verifier: str) -> None:
        async with asyncio.TaskGroup() as tasks:
            for half in halves(entries):
                tasks.create_task(self._piece(route, half, verifier=verifier, merge=False))

    def _is_hopeless(self, part: CallPart, pending: Sequence[Entry]) -> bool:
        """Gives up an item that took so many attempts' time alone, of services that were well."""
        if not part.hung:
            return False
        for entry in pending:
            entry.hangs += 1
        hangs = pending[0].hangs
        if hangs < self._settings.attempts:
            return False
        why = (
            f"{hangs} requests for this item alone ran out of time at reward services that answered others, "
            f"last: {part.failure}; expected an answer in time: see why the verifier hangs on it, or allow more time"
        )
        _give_up(pending, kind="data", why=why)
        return True

    async def _pause(self, route: Route, tried: Sequence[str], failure: ServiceError) -> None:
        """Only once all services have been tried, and not beside the pause that a busy one asks for."""
        rounds, rest = divmod(len(tried), len(route.endpoints))
        if not rest and not is_busy(failure):
            await self._settings.backoff.pause(rounds)


def _give_up(entries: Iterable[Entry], *, kind: ErrorKind, why: str) -> None:
    for entry in entries:
        entry.give_up(kind=kind, why=why)


class RewardClient:
    """A client of the services at `urls`, and of `services`, which may be for certain verifiers only.

    An async context manager: leaving it ends what still runs. `token` is shown to those that have none of their own.
    `metrics` are those of the process that it works in, `tls` says whose certificates are believed.
    """

    def __init__(
        self,
        urls: Sequence[str] = (),
        *,
        services: Sequence[RewardService] = (),
        token: SecretStr | None = None,
        settings: ClientSettings | None = None,
        metrics: Metrics | None = None,
        tls: TlsContext | None = None,
    ) -> None:
        self._settings = settings or ClientSettings()
        every = [*(RewardService(url=url) for url in urls), *services]
        self._urls = tuple(dict.fromkeys(service.url for service in every))
        counted = RewardMetrics(metrics or Metrics("reward-client"))
        counted.failures.present(self._urls)
        counted.busy.present(self._urls)
        self._routes = Routes(every, token=token, settings=self._settings, metrics=counted, tls=tls)
        self._settling = Settling(routes=self._routes, settings=self._settings, metrics=counted)
        self._numbers = count()
        self._calls: set[asyncio.Task[None]] = set()
        self._tasks = asyncio.TaskGroup()

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        await self._routes.open(self._tasks)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for call in self._calls:
            call.cancel()
        self._routes.cancel()
        # What the body raised is not for the group, which would wrap it.
        try:
            await self._tasks.__aexit__(None, None, None)
        finally:
            await self._routes.close()

    async def score(self, items: Sequence[ScoreItem]) -> list[ItemScore]:
        """A reward or an error for each item, in order; their ids are the caller's own. Raises nothing.

        What is not scored when the client is closed has an error of the infrastructure.
        """
        entries = [self._entry(item) for item in items]
        call = self._tasks.create_task(self._settling.settle(entries), name="scoring")
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        try:
            in_time, _ = await asyncio.wait([call], timeout=self._settings.patience_s)
        finally:
            call.cancel()
        why = "the client was closed" if in_time else f"not scored within {self._settings.patience_s} s"
        for entry in entries:
            entry.give_up(kind="infrastructure", why=f"{why}{entry.setback and ', last: '}{entry.setback}")
        return [entry.outcome() for entry in entries]

    async def unready(self) -> tuple[Sequence[str], ...]:
        """The addresses of each set of services of which none says that it is ready."""
        return await self._routes.unready()

    async def watch(self, waits: Waiting) -> None:
        """Keep `waits` true to which services do not answer, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for route in self._routes.all():
                tasks.create_task(route.watch(waits))

    @property
    def urls(self) -> tuple[str, ...]:
        """The addresses of all services, as they were given."""
        return self._urls

    def contacts(self) -> tuple[Contact, ...]:
        """Records of calls to each service."""
        return self._routes.contacts()

    def _entry(self, item: ScoreItem) -> Entry:
        return Entry(item, wire_id=str(next(self._numbers)), item_attempts=self._settings.item_attempts)


def score_sync(
    items: Sequence[ScoreItem],
    *,
    urls: Sequence[str],
    token: str | None = None,
    settings: ClientSettings | None = None,
    tls: TlsFiles | None = None,
) -> list[ItemScore]:
    """A reward or an error for each item, in order, by the services at `urls`; see `RewardClient.score`.

    `tls` names the CA of services at https:// addresses, and a certificate to show. Connections last for one call: one
    with many items is cheaper than many calls. Within an event loop, such as a notebook's, it is done in a thread.
    """

    async def score() -> list[ItemScore]:
        trust = None if tls is None else client_tls(tls)
        secret = None if token is None else SecretStr(token)
        async with RewardClient(urls, token=secret, settings=settings, tls=trust) as client:
            return await client.score(items)

    return run_anywhere(score)


def run_anywhere(work: Callable[[], Coroutine[object, object, T]]) -> T:
    """Runs a coroutine to its end, in a thread of its own where an event loop runs already. Blocks the caller."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work())
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(lambda: asyncio.run(work())).result()
