"""One round: the items of some calls are asked of one service, and what it is slow with of a second one.

    parts ─▶ a place ─▶ choose an endpoint ─▶ request ───────────────────▶ answers ─▶ every part is over:
                                 └─ after a delay: what is open, elsewhere ─▶ ┘       what still runs is cancelled

It waits for a place (freed when another request ends), for an endpoint that is not left alone (without end: the caller
bounds it) and for the answer (bounded by the deadline of the request).

The reward services: which of them is asked next, and the wait when none answers.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from math import inf
from typing import NoReturn

from protocol.rewards import ScoreResult
from services.http.calls import Breakers, Call, is_busy, told
from services.http.client import ServiceError, ServiceFailed, ServiceRefused
from services.http.waiting import Waiting
from services.rewards.exchange import Exchange
from services.rewards.items import Entry, Part, RewardMetrics
from services.rewards.settings import Hedges

_BUSY_S = 1.0
"""How long a service is left alone that says it is busy, and not for how long."""

_GROWTH_S = 10.0
"""After so many seconds without being told that it is busy, a service is asked for twice as much at once."""


@dataclass
class _Load:
    """`under_way` requests at a service, of which it takes no more than `most` at once, nor any before `busy_until`."""

    under_way: int = 0
    most: float = inf
    busy_until: float = -inf
    grows_at: float = inf

    def refused(self, *, until: float, now: float) -> None:
        """It is busy with what is under way: no more than that fits in."""
        self.busy_until = max(self.busy_until, until)
        self.most = max(1, min(self.most, self.under_way))
        self.grows_at = max(self.busy_until, now) + _GROWTH_S

    def has_room(self, now: float) -> bool:
        if now >= self.grows_at:
            self.most, self.grows_at = 2 * self.most, now + _GROWTH_S
        return now >= self.busy_until and self.under_way < self.most


class RewardEndpoints:
    """The services at `urls`, taken in turn, the least busy first; one that fails again and again is left alone.

    One that is not there yet, or not any more, costs no more than a refused connection now and then. One that is busy
    is asked for no more at once than it took.
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
        self._loads = {url: _Load() for url in self._urls}

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
            looked_at = self._clock()
            if admitted := self._admitted():
                return self._take(admitted, avoid=avoid)
            await self._change(since=looked_at)

    def another(self, *, than: Collection[str]) -> str | None:
        """One that is believed to work, is not busy, and is not among `than`; None if there is none."""
        admitted = [url for url in self._admitted() if url not in than and self._breakers[url].state == "closed"]
        return self._take(admitted, avoid=()) if admitted else None

    @contextmanager
    def call(self, url: str) -> Iterator[Call]:
        """A request to one of them, under way while the body runs, which says how it went."""
        load = self._loads[url]
        load.under_way += 1
        try:
            with self._breakers[url].call() as call:
                yield call
        finally:
            load.under_way -= 1
            if load.under_way < load.most < inf:
                self._breakers.stir()

    def busy(self, url: str, *, for_s: float | None) -> None:
        """It takes nothing for so long. A little longer, by chance: not all clients come back at the same moment."""
        now = self._clock()
        rest_s = (_BUSY_S if for_s is None else for_s) * random.uniform(1.0, 1.25)
        self._loads[url].refused(until=now + rest_s, now=now)
        self._breakers.stir()

    async def watch(self, waits: Waiting) -> None:
        """Keep `waits` true to whether any of them answers and takes requests, until cancelled."""
        whom = f"the reward service at {' or '.join(self.urls)}"
        while True:
            await self._until(at_hand=False)
            with waits.wait(whom, quiet_s=0.5):
                await self._until(at_hand=True)

    def _take(self, admitted: Sequence[str], *, avoid: Collection[str]) -> str:
        chosen = min(admitted, key=lambda url: (url in avoid, self._loads[url].under_way))
        self._urls.remove(chosen)
        self._urls.append(chosen)
        return chosen

    def _admitted(self) -> list[str]:
        now = self._clock()
        return [url for url in self._urls if self._breakers[url].admits and self._loads[url].has_room(now)]

    def _at_hand(self) -> bool:
        now = self._clock()
        return any(self._breakers[url].state == "closed" and now >= self._loads[url].busy_until for url in self._urls)

    async def _until(self, *, at_hand: bool) -> None:
        while True:
            looked_at = self._clock()
            if self._at_hand() == at_hand:
                return
            await self._change(since=looked_at)

    async def _change(self, *, since: float) -> None:
        """Return after the next verdict, or when a rest is over that was not at `since`."""
        ends = (load.busy_until for load in self._loads.values() if load.busy_until > since)
        await self._breakers.change(self._urls, since=since, until=min(ends, default=inf))


logger = logging.getLogger(__name__)


class Rounds:
    """The rounds at one set of endpoints, `requests` of them at once. Without `hedges` nothing is asked twice."""

    def __init__(
        self,
        *,
        endpoints: RewardEndpoints,
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
            with self._endpoints.call(url) as call, told(call):
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
        if isinstance(error, ServiceRefused) and is_busy(error):
            self._metrics.busy.labels(endpoint=url).inc()
            self._endpoints.busy(url, for_s=error.retry_after_s)
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
