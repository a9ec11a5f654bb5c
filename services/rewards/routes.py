"""Routes: the reward services that are asked for a verifier, the connections to them, and rounds of requests.

In a round the items of some calls are asked of one service, and what it is slow with of a second one:

    parts ─▶ a place ─▶ choose an endpoint ─▶ request ───────────────────▶ answers ─▶ every part is over:
                                 └─ after a delay: what is open, elsewhere ─▶ ┘       what still runs is cancelled

It waits for a place (freed when another request ends), for an endpoint that is not left alone (without end: the caller
bounds it) and for the answer (bounded by the deadline of the request).
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Collection, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import NoReturn

from pydantic import SecretStr

from protocol.rewards import ScoreItem, ScoreRequest, ScoreResponse, ScoreResult
from protocol.status import Readiness
from services.batching import Batches
from services.http.breakers import Breakers
from services.http.client import Contact, HttpClient, ServiceError, ServiceFailed, ServiceTimeout, ServiceUnreachable
from services.http.endpoints import Endpoints
from services.http.faults import is_busy, see_alive
from services.http.tls import TlsContext
from services.http.waiting import Waiting
from services.rewards.groups import affordable
from services.rewards.items import CallPart, Entry, RewardMetrics
from services.rewards.settings import ClientSettings, Hedges, RewardService
from services.rotating_secrets import RotatingSecret

logger = logging.getLogger(__name__)

_LINES = "application/x-ndjson"
_VERIFIERS_KNOWN = 64
_NONE_ANSWERS = "what is to be judged waits meanwhile: start it, or see its log"

Answers = AsyncGenerator[tuple[str, ScoreResult], None]
"""Results, each with the id of the service that made it."""
_READY_S = 5.0


class RewardExchange:
    """A request to one reward service, over HTTP: `http` has a client for each address.

    `deadline_s` is for the scoring, whose answer may take `margin_s` seconds longer.
    """

    def __init__(self, *, http: Mapping[str, HttpClient], deadline_s: float, margin_s: float) -> None:
        self._http = http
        self._deadline_s = deadline_s
        self._margin_s = margin_s

    async def see_alive(self, url: str) -> None:
        """Raises ServiceError if it does not answer at all, within seconds."""
        await see_alive(self._http[url], url)

    async def ask(self, url: str, items: Sequence[ScoreItem], *, streamed: bool) -> Answers:
        """The results, all at once, or as they come if `streamed`. Raises ServiceError.

        A whole answer that is lost on the way is asked for once more under the same idempotency key: nothing is judged,
        or paid for, twice. Of a streamed one nothing that came is lost.
        """
        body = ScoreRequest(items=tuple(items), deadline_s=self._deadline_s)
        if streamed:
            async with aclosing(self._lines(url, body)) as lines:
                async for line in lines:
                    yield line
            return
        for each in self._checked(url, body, await self._whole(url, body)):
            yield each

    async def _lines(self, url: str, body: ScoreRequest) -> Answers:
        limit_s = self._deadline_s + self._margin_s
        headers = {"Accept": _LINES}
        asked = self._http[url].stream(
            f"{url}/v1/score", body, ScoreResult, deadline_s=limit_s, idle_timeout_s=limit_s, headers=headers
        )
        async with asked as results:
            if results.content_type == _LINES:
                async for result in results:
                    yield result.service_id, result
                return
            # A service that knows no other way.
            response = await results.whole(ScoreResponse)
        for each in self._checked(url, body, response):
            yield each

    async def _whole(self, url: str, body: ScoreRequest) -> ScoreResponse:
        headers = {"Idempotency-Key": secrets.token_hex(16)}
        try:
            return await self._post(url, body, headers)
        except ServiceUnreachable as error:
            if not error.sent:
                raise
            return await self._post(url, body, headers)

    async def _post(self, url: str, body: ScoreRequest, headers: Mapping[str, str]) -> ScoreResponse:
        limit_s = self._deadline_s + self._margin_s
        return await self._http[url].post(f"{url}/v1/score", body, ScoreResponse, deadline_s=limit_s, headers=headers)

    def _checked(self, url: str, body: ScoreRequest, response: ScoreResponse) -> list[tuple[str, ScoreResult]]:
        if sorted(result.id for result in response.results) != sorted(item.id for item in body.items):
            text = f"it answered with {len(response.results)} results that are not those of the request"
            raise ServiceFailed(f"{url}/v1/score", status=200, kind="bad_answer", message=text)
        return [(response.service_id, result) for result in response.results]


class ScoreRounds:
    """The rounds at one set of endpoints, `requests` of them at once. Without `hedges` nothing is asked twice for being
    slow.

    An item that went alone and has no answer in time may have found a service that answers nobody. One that has
    answered others meanwhile is well; if nothing else was asked of it, it is asked for what was answered before.
    """

    def __init__(
        self,
        *,
        endpoints: Endpoints,
        exchange: RewardExchange,
        requests: int,
        hedges: Hedges | None,
        metrics: RewardMetrics,
    ) -> None:
        self._endpoints = endpoints
        self._exchange = exchange
        self._places = asyncio.Semaphore(requests)
        self._hedges = hedges
        self._metrics = metrics
        self._answered_at: dict[str, float] = {}
        self._answered: dict[str, ScoreItem] = {}

    async def run(self, parts: Sequence[CallPart]) -> None:
        """Returns when all parts, which avoid the same addresses, are over."""
        round = _Round(parts, is_hedged=self._hedges is not None)
        async with asyncio.TaskGroup() as tasks:
            requests = [tasks.create_task(self._first(round, parts[0].avoid))]
            if self._hedges is not None and len(self._endpoints) > 1:
                requests.append(tasks.create_task(self._second(round, self._hedges)))
            await asyncio.wait([part.over for part in parts])
            # One that has answered all it was asked is let read to the end: its connection is used again.
            for request in set(requests) - round.finishing:
                request.cancel()

    async def _first(self, round: "_Round", avoid: Collection[str]) -> None:
        async with self._places:
            url = await self._endpoints.choose(avoid=avoid)
            if entries := round.open:  # none if all who waited have left meanwhile
                if self._hedges is not None:
                    self._hedges.sent(len(entries))
                await self._request(round, url, entries)

    async def _second(self, round: "_Round", hedges: Hedges) -> None:
        await round.begun.wait()
        delay_s = hedges.delay_s(round.verifier)
        if delay_s is None:
            return
        await asyncio.sleep(delay_s)
        url = self._endpoints.another(than=round.asked)
        entries = affordable(round.open, most=hedges.left) if url is not None else ()
        if url is not None and entries:
            self._metrics.hedged.inc(hedges.afford(len(entries)))
            await self._request(round, url, entries)

    async def _request(self, round: "_Round", url: str, entries: Sequence[Entry]) -> None:
        """Asks `url`, and notes how it went. There must be no await between the choice of the address and this."""
        request = _Request(round, url, entries, now=asyncio.get_running_loop().time())
        round.begin(url, entries)
        try:
            with self._endpoints.call(url) as call:
                if call.is_probe:
                    await self._exchange.see_alive(url)
                request.is_sent = True
                self._metrics.request_items.observe(len(entries))
                asked = [entry.item for entry in entries]
                async with aclosing(self._exchange.ask(url, asked, streamed=round.is_streamed)) as answers:
                    async for service_id, result in answers:
                        call.succeeded()
                        self._take(request, result, service_id=service_id)
                request.check_complete()
        except ServiceError as error:
            self._note(url, error)
            alone = request.is_sent and len(entries) == 1 and isinstance(error, ServiceTimeout)
            hung = alone and await self._is_well(url, round.verifier, since=request.began)
            round.failed(request.owed.values(), error, hung=hung, sent=request.is_sent)
        finally:
            round.answered(request.owed.values())

    async def _is_well(self, url: str, verifier: str, *, since: float) -> bool:
        """Tells whether a service has answered anything since then, or answers now what was answered before. Nothing is
        known of a verifier that has answered nothing yet.
        """
        if self._answered_at.get(url, 0.0) > since:
            return True
        known = self._answered.get(verifier)
        if known is None:
            return False
        try:
            async with aclosing(self._exchange.ask(url, [known], streamed=False)) as answers:
                async for _, result in answers:
                    return result.reward is not None
        except ServiceError as error:
            self._note(url, error)
        return self._answered_at.get(url, 0.0) > since

    def _remember(self, item: ScoreItem) -> None:
        """The last one that a verifier judged; of many verifiers, those that did so last."""
        self._answered.pop(item.verifier, None)
        self._answered[item.verifier] = item.model_copy(update={"group": "", "group_size": 1})
        if len(self._answered) > _VERIFIERS_KNOWN:
            del self._answered[next(iter(self._answered))]

    def _take(self, request: "_Request", result: ScoreResult, *, service_id: str) -> None:
        entry = request.answered(result.id)
        self._answered_at[request.url] = now = asyncio.get_running_loop().time()
        waited_s = now - request.began
        if result.reward is not None:
            self._remember(entry.item)
        if self._hedges is not None and result.reward is not None:
            self._hedges.answered(result.verifier, waited_s)
        if entry.take(result, service_id=service_id, endpoint=request.url) and request.is_second:
            self._metrics.hedges_won.inc()
        request.round.answered([entry])

    def _note(self, url: str, error: ServiceError) -> None:
        logger.debug("request to the reward service at %s failed: %s", url, error)
        if is_busy(error):
            self._metrics.busy.inc(url)
        else:
            self._metrics.failures.inc(url)


class _Round:
    """The entries of some parts, the addresses asked for them, and the requests that only read to their end.

    Answers are streamed where one that comes early is of use: to the first of several parts, or to a second request.
    """

    def __init__(self, parts: Sequence[CallPart], *, is_hedged: bool) -> None:
        self._part_of = {entry: part for part in parts for entry in part.awaited}
        self.is_streamed = len(parts) > 1 or (is_hedged and len(self._part_of) > 1)
        self.begun = asyncio.Event()
        self.asked: list[str] = []
        self.finishing: set[asyncio.Task[None]] = set()

    @property
    def open(self) -> list[Entry]:
        """The entries for which an answer is awaited."""
        return [entry for entry, part in self._part_of.items() if entry in part.awaited]

    @property
    def verifier(self) -> str:
        return next(iter(self._part_of)).item.verifier

    def begin(self, url: str, entries: Sequence[Entry]) -> None:
        """A request to `url` holds these entries."""
        self.asked.append(url)
        for entry in entries:
            self._part_of[entry].expect(entry, url)
        self.begun.set()

    def failed(self, entries: Iterable[Entry], error: ServiceError, *, hung: bool, sent: bool) -> None:
        """A request failed that owes an answer for these, `sent` or not; `hung` if its service answered others
        meanwhile.
        """
        for entry in entries:
            part = self._part_of[entry]
            part.failure, part.hung, part.was_sent = error, hung, sent

    def answered(self, entries: Iterable[Entry]) -> None:
        """A request has answered for these, or never will."""
        for entry in entries:
            self._part_of[entry].answered(entry)


class _Request:
    """A request of a round; `owed` are the entries that it has not answered, by the id of their items."""

    def __init__(self, round: _Round, url: str, entries: Sequence[Entry], *, now: float) -> None:
        self.round = round
        self.url = url
        self.began = now
        self.is_second = bool(round.asked)
        self.is_sent = False
        self.owed = {entry.item.id: entry for entry in entries}

    def answered(self, item_id: str) -> Entry:
        """The entry of an answer. Raises ServiceFailed for an id that was not asked for, or answered before."""
        entry = self.owed.pop(item_id, None)
        if entry is None:
            self._bad(f"it answered for an item {item_id!r} that it was not asked for, or for one twice")
        if not self.owed:
            task = asyncio.current_task()
            assert task is not None
            self.round.finishing.add(task)
        return entry

    def check_complete(self) -> None:
        """Raises ServiceFailed unless all has been answered."""
        if self.owed:
            self._bad(f"its answer ended without {len(self.owed)} of the results")

    def _bad(self, text: str) -> NoReturn:
        raise ServiceFailed(self.url, status=200, kind="bad_answer", message=text)


class Route:
    """Some services that are asked for the same verifiers. Requests that calls share are tasks of `tasks`."""

    def __init__(
        self, *, endpoints: Endpoints, rounds: ScoreRounds, tasks: asyncio.TaskGroup, settings: ClientSettings
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

    async def ask(self, part: CallPart, *, verifier: str, merge: bool) -> None:
        """Asks one round for a part, whose items are all for `verifier`; with `merge` together with those of other
        calls.

        Cancelling one who waits takes nothing from the others.
        """
        if not merge:
            await self._rounds.run([part])
            return
        self._batches.add(part, key=(verifier, part.avoid), size=len(part.awaited))
        try:
            await part.over
        finally:
            part.close()

    async def _run(self, parts: Sequence[CallPart]) -> None:
        """Runs one round for the parts of several calls; it goes on while anybody waits for one of them."""
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
            with waits.wait(whom, quiet_s=0.5, remedy=_NONE_ANSWERS):
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
        self._clients: dict[SecretStr | Path | None, HttpClient] = {}
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
        """Records of calls to each service."""
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
        secret = token.path if isinstance(token, RotatingSecret) else token
        if secret not in self._clients:
            self._clients[secret] = HttpClient(token=token, tls=self._tls)
        self._http[url] = self._clients[secret]
        for urls in [self._claimed.setdefault(name, []) for name in service.verifiers] or [self._general]:
            if url not in urls:
                urls.append(url)

    def _route(self, urls: Sequence[str], tasks: asyncio.TaskGroup) -> Route:
        settings = self._settings
        endpoints = Endpoints(urls, breakers=self._breakers)
        rounds = ScoreRounds(
            endpoints=endpoints,
            exchange=RewardExchange(http=self._http, deadline_s=settings.deadline_s, margin_s=settings.margin_s),
            requests=settings.requests,
            hedges=self._hedges,
            metrics=self._metrics,
        )
        return Route(endpoints=endpoints, rounds=rounds, tasks=tasks, settings=settings)
