"""Admission of work: items and bytes are bounded, and the rest is told when to come again.

Places are counted from a request's arrival to its answer. One verifier can take only a part of them, so that a slow one
leaves room for others. What comes in the same moment, and was not looked into yet, counts as the items that so many
bytes had of late: in an overload requests are turned away at the door, before anything is spent on reading them.
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count

from prometheus_client import Gauge

from services.http.refusals import RequestRefused

# What has not been read after so long comes slowly, and must not hold up others until it is here. Of a large body, only
# as much can arrive in one look at the network.
_ARRIVES_S = 0.1
_ARRIVING_BYTES = 64 << 10

# By so much the newest request moves the mean size of an item.
_NEWEST = 0.05

# The pace is judged by what ended in windows of this length, the later ones counting more.
_WINDOW_S = 1.0
_MAX_RETRY_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Room:
    """Most items and bytes at once; `verifier_share` is the part of the items that may be one verifier's."""

    items: int
    bytes: int
    verifier_share: float

    @property
    def verifier_items(self) -> int:
        """Most items of one verifier."""
        return math.ceil(self.items * self.verifier_share)


class ScoringPace:
    """Items that end in a second of work, of late: time without any item does not count. `clock` is in seconds."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began: float | None = None
        self._busy_s = 0.0
        self._ended = 0
        self._per_s = 0.0

    def ended(self, items: int, *, left: int) -> None:
        """Count items that have a result; so many are left."""
        now = self._clock()
        self._busy_s += 0.0 if self._began is None else now - self._began
        self._began = now if left else None
        self._ended += items
        if self._busy_s >= _WINDOW_S:
            latest = self._ended / self._busy_s
            self._per_s = latest if self._per_s == 0 else (self._per_s + latest) / 2
            self._busy_s, self._ended = 0.0, 0

    def began(self) -> None:
        """There is an item."""
        if self._began is None:
            self._began = self._clock()

    def seconds_for(self, items: int) -> float:
        """Time that so many items take, between 1 s and a minute."""
        if self._per_s == 0:
            return 1.0
        return min(_MAX_RETRY_S, max(1.0, items / self._per_s))


class Arrivals:
    """The bytes of requests that were announced a moment ago and have not been read yet. `clock` is in seconds."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._numbers = count()
        self._under_way: dict[int, tuple[float, int]] = {}
        self._bytes = 0

    @property
    def bytes(self) -> int:
        """Of all that are to be counted."""
        before = self._clock() - _ARRIVES_S
        while self._under_way:
            number, (announced_at, _) = next(iter(self._under_way.items()))
            if announced_at >= before:
                break
            self._end(number)
        return self._bytes

    @contextmanager
    def counted(self, body_bytes: int) -> Iterator[None]:
        """Count a request until it has been read, or comes too slowly to be counted."""
        number, counted = next(self._numbers), min(body_bytes, _ARRIVING_BYTES)
        self._under_way[number] = self._clock(), counted
        self._bytes += counted
        try:
            yield
        finally:
            self._end(number)

    def _end(self, number: int) -> None:
        _, counted = self._under_way.pop(number, (0.0, 0))
        self._bytes -= counted


class Admission:
    """Counts what is in the service. `pending` and `waiting` are the gauges of all items, and of each verifier's.

    `label` makes a name for metrics of a verifier's. `is_shared`, asked with it: whether the verifier is held to its
    share; one whose items are judged at once keeps nobody waiting but itself.
    """

    def __init__(
        self,
        *,
        room: Room,
        pending: Gauge,
        waiting: Gauge,
        label: Callable[[str], str],
        is_shared: Callable[[str], bool] = lambda _: True,
    ) -> None:
        self._room = room
        self._pending_gauge = pending
        self._waiting_gauge = waiting
        self._label = label
        self._is_shared = is_shared
        self._pace = ScoringPace()
        self._items = 0
        self._bytes = 0
        self._arrivals = Arrivals()
        self._item_bytes = math.inf
        self._by_verifier: Counter[str] = Counter()
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def items(self) -> int:
        """Items that have arrived and have no result yet."""
        return self._items

    async def drain(self, *, timeout_s: float) -> bool:
        """Take nothing new, and wait for what is here. Whether all of it has ended in time."""
        self._draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def check(self, *, body_bytes: int) -> None:
        """Refuse a request as soon as its size is known, before it is read. Raises RequestRefused."""
        self._check_door()
        # A body larger than all of the room is taken alone: whether bodies are too large is the server's to say.
        if self._bytes and self._bytes + body_bytes > self._room.bytes:
            what = f"{self._bytes} bytes are here, of at most {self._room.bytes}, and the request has {body_bytes}"
            raise self._busy(excess=max(1, self._items // 2), what=what)

    def _check_door(self) -> None:
        if self._draining:
            raise RequestRefused(503, "draining", "this reward service is stopping: try another one")
        here = self._items + int(self._arrivals.bytes / self._item_bytes)
        if here >= self._room.items:
            raise self._busy(excess=1, what=f"{here} items are here, of at most {self._room.items}")

    @contextmanager
    def arriving(self, *, body_bytes: int) -> Iterator[None]:
        """Let in a request that has announced so many bytes, until it has been read. Raises RequestRefused."""
        self.check(body_bytes=body_bytes)
        with self._arrivals.counted(body_bytes):
            yield

    @contextmanager
    def held(self, *, body_bytes: int, items: int) -> Iterator[None]:
        """Count the bytes of a request that has been read. Raises RequestRefused."""
        self.check(body_bytes=body_bytes)
        mean = max(1.0, body_bytes / max(1, items))
        known = self._item_bytes
        self._item_bytes = mean if known == math.inf else known + _NEWEST * (mean - known)
        self._bytes += body_bytes
        try:
            yield
        finally:
            self._bytes -= body_bytes

    @contextmanager
    def admitted(self, verifiers: Iterable[str]) -> Iterator[None]:
        """Places for items of these verifiers, one for each, for as long as it takes. Raises RequestRefused.

        Their bytes were looked at as they were `held`, and count by now.
        """
        counts = Counter(map(self._label, verifiers))
        self._check_door()
        self._check_items(counts)
        self._pace.began()
        self._change(counts, sign=1)
        try:
            yield
        finally:
            self._change(counts, sign=-1)
            self._pace.ended(counts.total(), left=self._items)

    def _check_items(self, counts: Counter[str]) -> None:
        limits = [("all verifiers", self._items, counts.total(), self._room.items)]
        for name, items in counts.items():
            if not self._is_shared(name):
                continue
            limits.append((f"the verifier {name}", self._by_verifier[name], items, self._room.verifier_items))
        for whose, _, more, most in limits:
            if more > most:
                message = f"{more} items for {whose} in one request: send at most {most}"
                raise RequestRefused(413, "too_many_items", message, expected=most, got=more)
        for whose, here, more, most in limits:
            if here + more > most:
                what = f"{here} items for {whose} are here, of at most {most}, and the request has {more}"
                raise self._busy(excess=here + more - most, what=what)

    def _busy(self, *, excess: int, what: str) -> RequestRefused:
        after_s = self._pace.seconds_for(excess)
        return RequestRefused(429, "busy", f"{what}: try again later, or another one", retry_after_s=after_s)

    def _change(self, counts: Counter[str], *, sign: int) -> None:
        self._items += sign * counts.total()
        for name, items in counts.items():
            self._by_verifier[name] += sign * items
            self._waiting_gauge.labels(name).set(self._by_verifier[name])
        self._pending_gauge.set(self._items)
        if self._items == 0:
            self._idle.set()
        else:
            self._idle.clear()
