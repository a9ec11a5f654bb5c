"""Scores items by reward services: everything that can go wrong on the way there, and what is done about it.

score(items) ─▶ by verifier ─▶ route ─▶ pieces ─▶ round of requests ─▶ settled ─▶ results in order
                                          ▲         └─ not settled: those again, elsewhere first
                                          └─────────────┘

async with RewardClient(urls=["http://rewards-0:7320", "http://rewards-1:7320"], token=token) as client:
    results = await client.score(items)

Scoring from a script, without an event loop of one's own.
"""

import asyncio
from collections.abc import Sequence
from itertools import count
from types import TracebackType
from typing import Self

from pydantic import SecretStr

from protocol.rewards import ScoreItem
from services.http.contacts import Contact
from services.http.metrics import Metrics
from services.http.tls import TlsContext, TlsFiles, client_tls
from services.http.waiting import Waiting
from services.rewards.items import Entry, RewardMetrics, Scored
from services.rewards.routes import Routes
from services.rewards.settings import ClientSettings, RewardService
from services.rewards.settling import Settling


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

    async def score(self, items: Sequence[ScoreItem]) -> list[Scored]:
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
        """How calls to each service went."""
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
) -> list[Scored]:
    """A reward or an error for each item, in order, by the services at `urls`; see `RewardClient.score`.

    `tls` names the CA of services at https:// addresses, and a certificate to show. Connections last for one call: one
    with many items is cheaper than many calls. Not from within an event loop.
    """

    async def score() -> list[Scored]:
        trust = None if tls is None else client_tls(tls)
        secret = None if token is None else SecretStr(token)
        async with RewardClient(urls, token=secret, settings=settings, tls=trust) as client:
            return await client.score(items)

    return asyncio.run(score())
