"""Which services are asked for which verifier, and the connections to them."""

import asyncio
from collections.abc import Collection, Iterable, Sequence
from contextlib import AsyncExitStack

from pydantic import SecretStr

from protocol.status import Readiness
from services.batching import Batches
from services.http.calls import Breakers
from services.http.client import HttpClient, ServiceError
from services.http.contacts import Contact
from services.http.endpoints import Endpoints
from services.http.tls import TlsContext
from services.http.waiting import Waiting
from services.rewards.exchange import Exchange
from services.rewards.items import Part, RewardMetrics
from services.rewards.rounds import Rounds
from services.rewards.settings import ClientSettings, Hedges, RewardService

_READY_S = 5.0


class Route:
    """Some services that are asked for the same verifiers. Requests that calls share are tasks of `tasks`."""

    def __init__(
        self, *, endpoints: Endpoints, rounds: Rounds, tasks: asyncio.TaskGroup, settings: ClientSettings
    ) -> None:
        self.endpoints = endpoints
        self._rounds = rounds
        self._batches = Batches(
            send=self._run,
            tasks=tasks,
            most=settings.batch_items,
            wait_s=settings.batch_wait_s,
            name="shared request to a reward service",
        )

    async def ask(self, part: Part, *, verifier: str, merge: bool, avoid: Collection[str]) -> None:
        """One round for a part, whose items are all for `verifier`; with `merge` together with those of other calls.

        Cancelling one who waits takes nothing from the others.
        """
        if not merge:
            await self._rounds.run([part], avoid=avoid)
            return
        self._batches.add(part, key=(verifier, frozenset(avoid)), size=len(part.awaited))
        try:
            await part.over
        finally:
            part.close()

    async def _run(self, parts: Sequence[Part]) -> None:
        """One round for the parts of several calls; it goes on while anybody waits for one of them."""
        for part in parts:
            part.is_shared = len(parts) > 1
        try:
            await self._rounds.run(parts)
        finally:
            for part in parts:
                part.close()

    async def watch(self, waits: Waiting) -> None:
        """Keep `waits` true to whether any of them answers and takes requests, until cancelled."""
        whom = f"the reward service at {' or '.join(self.endpoints.names)}"
        while True:
            await self.endpoints.until(at_hand=False)
            with waits.wait(whom, quiet_s=0.5):
                await self.endpoints.until(at_hand=True)

    def cancel(self) -> None:
        """End the requests that are shared; their parts are over."""
        for part in self._batches.close():
            part.close()


class Routes:
    """The routes to `services`, usable between `open` and `close`.

    `token` is shown to those that have none of their own.
    """

    def __init__(
        self,
        services: Iterable[RewardService],
        *,
        token: SecretStr | None,
        settings: ClientSettings,
        metrics: RewardMetrics,
        tls: TlsContext | None = None,
    ) -> None:
        self._settings = settings
        self._tls = tls
        self._metrics = metrics
        self._breakers = Breakers("reward service", settings=settings.rests)
        self._hedges = Hedges(settings.hedging) if settings.hedging is not None else None
        self._clients: dict[str, HttpClient] = {}
        self._http: dict[str, HttpClient] = {}
        self._general: list[str] = []
        self._claimed: dict[str, list[str]] = {}
        self._routes: dict[tuple[str, ...], Route] = {}
        self._stack = AsyncExitStack()
        for service in services:
            self._add(service, token=service.token or token)

    async def open(self, tasks: asyncio.TaskGroup) -> None:
        """Make the connections possible. `tasks` is for requests that calls share."""
        for client in self._clients.values():
            await self._stack.enter_async_context(client)
        for urls in [self._general, *self._claimed.values()]:
            if urls and tuple(urls) not in self._routes:
                self._routes[tuple(urls)] = self._route(urls, tasks)

    def cancel(self) -> None:
        """End the requests that calls share."""
        for route in self._routes.values():
            route.cancel()

    async def close(self) -> None:
        """End all connections."""
        await self._stack.aclose()

    def of(self, verifier: str) -> Route | None:
        """The route of a verifier; None if no service is set for it."""
        return self._routes.get(tuple(self._claimed.get(verifier, self._general)))

    def all(self) -> Collection[Route]:
        """All routes, that of the unclaimed verifiers first."""
        return self._routes.values()

    def contacts(self) -> tuple[Contact, ...]:
        """How calls to each service went."""
        return tuple(contact for client in self._clients.values() for contact in client.contacts())

    async def unready(self) -> tuple[Sequence[str], ...]:
        """The addresses of each route of which no service says that it is ready."""
        urls = list(self._http)
        said = await asyncio.gather(*map(self._is_ready, urls))
        ready = {url for url, is_ready in zip(urls, said, strict=True) if is_ready}
        return tuple(urls for urls in self._routes if ready.isdisjoint(urls))

    async def _is_ready(self, url: str) -> bool:
        try:
            return (await self._http[url].get(f"{url}/readyz", Readiness, deadline_s=_READY_S)).ready
        except ServiceError:
            return False

    def _add(self, service: RewardService, *, token: SecretStr | None) -> None:
        url = service.url.rstrip("/")
        secret = "" if token is None else token.get_secret_value()
        if secret not in self._clients:
            self._clients[secret] = HttpClient(token=token, tls=self._tls)
        self._http[url] = self._clients[secret]
        for urls in [self._claimed.setdefault(name, []) for name in service.verifiers] or [self._general]:
            if url not in urls:
                urls.append(url)

    def _route(self, urls: Sequence[str], tasks: asyncio.TaskGroup) -> Route:
        settings = self._settings
        endpoints = Endpoints(urls, breakers=self._breakers)
        rounds = Rounds(
            endpoints=endpoints,
            exchange=Exchange(http=self._http, deadline_s=settings.deadline_s, margin_s=settings.margin_s),
            requests=settings.requests,
            hedges=self._hedges,
            metrics=self._metrics,
        )
        return Route(endpoints=endpoints, rounds=rounds, tasks=tasks, settings=settings)
