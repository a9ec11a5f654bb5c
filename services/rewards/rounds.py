"""One round: the items of some calls are asked of one service, and what it is slow with of a second one.

    parts ─▶ a place ─▶ choose an endpoint ─▶ request ───────────────────▶ answers ─▶ every part is over:
                                 └─ after a delay: what is open, elsewhere ─▶ ┘       what still runs is cancelled

It waits for a place (freed when another request ends), for an endpoint that is not left alone (without end: the caller
bounds it) and for the answer (bounded by the deadline of the request).
"""

import asyncio
import logging
from collections.abc import Collection, Iterable, Sequence
from contextlib import aclosing
from typing import NoReturn

from protocol.rewards import ScoreResult
from services.http.calls import is_busy
from services.http.client import ServiceError, ServiceFailed
from services.http.endpoints import Endpoints
from services.rewards.exchange import Exchange
from services.rewards.items import Entry, Part, RewardMetrics
from services.rewards.settings import Hedges

logger = logging.getLogger(__name__)


class Rounds:
    """The rounds at one set of endpoints, `requests` of them at once. Without `hedges` nothing is asked twice."""

    def __init__(
        self,
        *,
        endpoints: Endpoints,
        exchange: Exchange,
        requests: int,
        hedges: Hedges | None,
        metrics: RewardMetrics,
    ) -> None:
        self._endpoints = endpoints
        self._exchange = exchange
        self._places = asyncio.Semaphore(requests)
        self._hedges = hedges
        self._metrics = metrics

    async def run(self, parts: Sequence[Part], *, avoid: Collection[str] = ()) -> None:
        """Returns when all parts are over; those in `avoid` are asked only if there is no other."""
        round = _Round(parts, is_hedged=self._hedges is not None)
        async with asyncio.TaskGroup() as tasks:
            requests = [tasks.create_task(self._first(round, avoid))]
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
        afforded = hedges.afford(len(round.open)) if url is not None else 0
        if url is not None and afforded:
            self._metrics.hedged.inc(afforded)
            await self._request(round, url, round.open[:afforded])

    async def _request(self, round: "_Round", url: str, entries: Sequence[Entry]) -> None:
        """Asks `url`, and notes how it went. There must be no await between the choice of the address and this."""
        request = _Request(round, url, entries, now=asyncio.get_running_loop().time())
        round.begin(url, entries)
        try:
            with self._endpoints.call(url) as call:
                if call.is_probe:
                    await self._exchange.see_alive(url)
                self._metrics.request_items.observe(len(entries))
                asked = [entry.item for entry in entries]
                async with aclosing(self._exchange.ask(url, asked, streamed=round.is_streamed)) as answers:
                    async for service_id, result in answers:
                        call.succeeded()
                        self._take(request, result, service_id=service_id)
                request.check_complete()
        except ServiceError as error:
            self._note(url, error)
            round.failed(request.owed.values(), error)
        finally:
            round.answered(request.owed.values())

    def _take(self, request: "_Request", result: ScoreResult, *, service_id: str) -> None:
        entry = request.answered(result.id)
        waited_s = asyncio.get_running_loop().time() - request.began
        if self._hedges is not None and result.reward is not None:
            self._hedges.answered(result.verifier, waited_s)
        if entry.take(result, service_id=service_id, endpoint=request.url) and request.is_second:
            self._metrics.hedges_won.inc()
        request.round.answered([entry])

    def _note(self, url: str, error: ServiceError) -> None:
        logger.debug("request to the reward service at %s failed: %s", url, error)
        if is_busy(error):
            self._metrics.busy.labels(endpoint=url).inc()
        else:
            self._metrics.failures.labels(endpoint=url).inc()


class _Round:
    """The entries of some parts, the addresses asked for them, and the requests that only read to their end.

    Answers are streamed where one that comes early is of use: to the first of several parts, or to a second request.
    """

    def __init__(self, parts: Sequence[Part], *, is_hedged: bool) -> None:
        self._part_of = {entry: part for part in parts for entry in part.awaited}
        self.is_streamed = len(parts) > 1 or (is_hedged and len(self._part_of) > 1)
        self.begun = asyncio.Event()
        self.asked: list[str] = []
        self.finishing: set[asyncio.Task[None]] = set()

    @property
    def open(self) -> list[Entry]:
        """Those for which an answer is awaited."""
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

    def failed(self, entries: Iterable[Entry], error: ServiceError) -> None:
        """A request failed that owes an answer for these."""
        for entry in entries:
            self._part_of[entry].failure = error

    def answered(self, entries: Iterable[Entry]) -> None:
        """A request has answered for these, or never will."""
        for entry in entries:
            self._part_of[entry].answered(entry)


class _Request:
    """One request of a round; `owed` are the entries that it has not answered, by the id of their items."""

    def __init__(self, round: _Round, url: str, entries: Sequence[Entry], *, now: float) -> None:
        self.round = round
        self.url = url
        self.began = now
        self.is_second = bool(round.asked)
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
