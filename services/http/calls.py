"""Calls to counterparts: which of several is next, when one that failed is called again, whose fault a failure is.

choose ─▶ call ─▶ its answer, or a ServiceError
  ▲                 ├─ busy: left alone for as long as it says, and asked for no more at once than it took
  │                 └─ silent, or failing again and again: left alone by its breaker
  └──── a call ends, a rest is over, a counterpart comes

A breaker:

    closed ──silence, or too many failures in a row──▶ open ──its rest is over──▶ half-open: one call is the probe
      ▲                                                 ▲                               │
      ├──────────────────── success ────────────────────┼───────────────────────────────┤
      │                                                 └── failure: a rest twice as long
      └── calls are admitted

A call that ends without a verdict, because it was cancelled, gives the place of the probe back.
"""

import asyncio
import contextlib
import logging
import random
import time
from bisect import insort
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from math import inf
from typing import Literal

from protocol.status import Readiness
from services.http.client import (
    HttpClient,
    ServiceError,
    ServiceFailed,
    ServiceRefused,
    ServiceTimeout,
    ServiceUnreachable,
)

logger = logging.getLogger(__name__)

State = Literal["closed", "open", "half-open"]


@dataclass(frozen=True, kw_only=True)
class BreakerSettings:
    """`failures` in a row open a breaker; it rests `rest_s` seconds at first, at most `rest_max_s`."""

    failures: int = 3
    rest_s: float = 0.5
    rest_max_s: float = 10.0


class Breaker:
    """The breaker of the counterpart `name`. `clock` is in seconds; `on_change` is called after each verdict."""

    def __init__(
        self,
        name: str,
        *,
        settings: BreakerSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._name = name
        self._settings = settings or BreakerSettings()
        self._clock = clock
        self._on_change = on_change
        self._failures = 0
        self._rest_s = 0.0
        self._open_until: float | None = None
        self._probe: Call | None = None
        self._heard_at = float("-inf")

    @property
    def state(self) -> State:
        if self._open_until is None:
            return "closed"
        return "open" if self._clock() < self._open_until else "half-open"

    @property
    def admits(self) -> bool:
        """Whether a call may begin now."""
        return self.state == "closed" or (self.state == "half-open" and self._probe is None)

    def rested_at(self, *, since: float) -> float | None:
        """When its rest is over, or was if that is later than `since`; None if it did not rest then."""
        return self._open_until if self._open_until is not None and self._open_until > since else None

    @contextmanager
    def call(self) -> Iterator["Call"]:
        """A call to the counterpart, which the body gives its verdict. To be begun only if the breaker admits it."""
        call = Call(self, is_probe=self.state != "closed", now=self._clock())
        if call.is_probe:
            self._probe = call
        try:
            yield call
        finally:
            if self._probe is call:
                self._probe = None
                self._on_change()

    def _heard(self, call: "Call") -> None:
        self._heard_at = call.heard_at = self._clock()
        if self._open_until is not None:
            logger.info("%s answers again", self._name)
            self._open_until, self._rest_s = None, 0.0
            self._on_change()
        self._failures = 0

    def _failed(self, call: "Call", *, why: str, silent: bool) -> None:
        if self._open_until is not None:
            # A call from before the opening says nothing new.
            if self._probe is call:
                self._probe = None
                self._open(why)
            return
        self._failures += 1
        # One whom others have heard meanwhile is not silent, only slow with this call.
        if (silent and self._heard_at <= call.heard_at) or self._failures >= self._settings.failures:
            self._open(why)

    def _open(self, why: str) -> None:
        level = logging.DEBUG if self._rest_s else logging.WARNING
        self._rest_s = min(self._settings.rest_max_s, 2 * self._rest_s or self._settings.rest_s)
        self._open_until = self._clock() + self._rest_s
        logger.log(level, "%s is left alone for %g s: %s", self._name, self._rest_s, why)
        self._on_change()


class Call:
    """One call under way. The first verdicts may come early: the first part of a stream is a sign of life."""

    def __init__(self, breaker: Breaker, *, is_probe: bool, now: float) -> None:
        self._breaker = breaker
        self.is_probe = is_probe
        self.heard_at = now

    def succeeded(self) -> None:
        """The counterpart is alive and well."""
        self._breaker._heard(self)

    def failed(self, why: str, *, silent: bool) -> None:
        """It failed; `silent` if it did not answer, or takes nothing at present: that opens the breaker at once."""
        self._breaker._failed(self, why=why, silent=silent)


class Breakers:
    """The breakers of several counterparts of one kind, and the wait until one of them is admitted."""

    def __init__(
        self, kind: str, *, settings: BreakerSettings | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._kind = kind
        self._settings = settings
        self._clock = clock
        self._breakers: dict[str, Breaker] = {}
        self._changed = asyncio.Event()

    def __getitem__(self, name: str) -> Breaker:
        """The breaker of a counterpart; one that was never heard of has a closed one."""
        if name not in self._breakers:
            self._breakers[name] = Breaker(
                f"{self._kind} {name}", settings=self._settings, clock=self._clock, on_change=self.stir
            )
        return self._breakers[name]

    def keep(self, names: Collection[str]) -> None:
        """Forget all others: one that leaves and comes again starts closed."""
        self._breakers = {name: breaker for name, breaker in self._breakers.items() if name in names}
        self.stir()

    def any_closed(self, names: Collection[str]) -> bool:
        """Whether one of them is believed to work."""
        return any(self[name].state == "closed" for name in names)

    def stir(self) -> None:
        """Wake all who wait for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    def now(self) -> float:
        """Seconds, by the clock of the breakers."""
        return self._clock()

    async def change(self, names: Collection[str], *, since: float, until: float = inf) -> None:
        """Return after the next verdict, or `stir`, or when the first rest among `names` is over, or at `until`.

        The caller looked at the breakers after `since`: a rest that ended between then and now is a change as well,
        which nothing else would tell.
        """
        ends = [until, *(end for name in names if (end := self[name].rested_at(since=since)) is not None)]
        left = min(ends) - self._clock()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, left) if left < inf else None):
                await self._changed.wait()


@dataclass(frozen=True)
class Backoff:
    """Doubling pauses with jitter, from `first_s` to at most `max_s` seconds."""

    first_s: float
    max_s: float
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep

    async def pause(self, failures: int) -> None:
        """Wait after the `failures`-th failure in a row, counted from 1."""
        await self.sleep(self.pause_s(failures))

    def pause_s(self, failures: int) -> float:
        """A pause after so many failures: between half and all of the nominal one."""
        return self.nominal_s(failures) * random.uniform(0.5, 1.0)

    def nominal_s(self, failures: int) -> float:
        """Twice as long each time, up to the longest, however long a counterpart is away."""
        return min(self.max_s, self.first_s * 2.0 ** min(failures - 1, 30))


Fault = Literal["request", "unavailable", "counterpart"]
"""`request`: it would be refused again. `unavailable`: nobody took it up, or nobody answers, which says nothing about
it. `counterpart`: it was taken up, and the counterpart broke over it or answered nonsense.
"""

_REQUEST_IS_WRONG = frozenset({400, 413, 422})
"""The statuses that another attempt at the same request would get again. A wrong token (401) is not its fault."""

_NOT_NOW = frozenset({408, 429, 503})
"""Sent too slowly; busy; draining, starting or without weights: the request itself was not looked at."""

_SIGN_OF_LIFE_S = 2.0


def fault_of(error: ServiceError) -> Fault:
    """Whose fault it is that a call failed."""
    match error:
        case ServiceRefused(status=status) if status in _REQUEST_IS_WRONG:
            return "request"
        case ServiceRefused(status=status) | ServiceFailed(status=status) if status in _NOT_NOW:
            return "unavailable"
        case ServiceTimeout() | ServiceUnreachable(sent=False):
            return "unavailable"
        case _:
            return "counterpart"


def is_busy(error: ServiceError) -> bool:
    """Whether the counterpart has more to do than it can take, and says so (status 429)."""
    return isinstance(error, ServiceRefused) and error.status == 429


def is_too_large(error: ServiceError) -> bool:
    """Whether the request was refused for its size (status 413)."""
    return isinstance(error, ServiceRefused) and error.status == 413


async def see_alive(http: HttpClient, url: str) -> None:
    """Before a probe: a process that hangs costs two seconds, and not the deadline of a whole request.

    Raises ServiceTimeout, ServiceUnreachable. Any answer will do: the request itself shows the rest.
    """
    try:
        await http.get(f"{url.rstrip('/')}/readyz", Readiness, deadline_s=_SIGN_OF_LIFE_S)
    except (ServiceFailed, ServiceRefused):
        return


_BUSY_S = 1.0
"""How long a counterpart is left alone that is busy and does not say for how long."""

_GROWTH_S = 10.0
"""After so many seconds without being told that it is busy, a counterpart is asked for twice as much at once."""

_MUCH_BUSIER = 2.0
_SLACK = 8
"""A call stays with whom it prefers up to so many times the work of the least burdened, and so much more."""


@dataclass
class _Load:
    """Work `under_way` at a counterpart, which takes no more of it than `most`, nor any before `busy_until`;
    `allowed` is the caller's own bound.
    """

    under_way: int = 0
    most: float = inf
    allowed: float = inf
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
        return now >= self.busy_until and self.under_way < min(self.most, self.allowed)


class Endpoints:
    """Counterparts by name, taken in turn, the least burdened first; one that fails again and again is left alone.

    One that is not there yet, or not any more, costs no more than a refused connection now and then. The clock is that
    of the `breakers`.
    """

    def __init__(self, names: Iterable[str] = (), *, breakers: Breakers) -> None:
        self._names = list(names)
        self._breakers = breakers
        self._loads: defaultdict[str, _Load] = defaultdict(_Load)
        self._line: list[tuple[tuple[int, ...], int]] = []
        self._arrivals = count()

    def __len__(self) -> int:
        return len(self._names)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._names))

    @property
    def under_way(self) -> Mapping[str, int]:
        """Work under way by name, also at those that have left."""
        return {name: load.under_way for name, load in self._loads.items() if load.under_way}

    @property
    def at_hand(self) -> bool:
        """Whether one of them is believed to answer, and is not busy."""
        now = self._breakers.now()
        return any(self._is_well(name) and now >= self._loads[name].busy_until for name in self._names)

    def replace(self, names: Collection[str]) -> None:
        """From now on it is these; one that leaves and comes again starts without a past."""
        self._names = [name for name in self._names if name in names]
        self._names += [name for name in names if name not in self._names]
        for name in [name for name, load in self._loads.items() if name not in names and not load.under_way]:
            del self._loads[name]
        self._breakers.keep(names)

    async def choose(self, *, avoid: Collection[str] = (), prefer: str = "", rank: tuple[int, ...] = ()) -> str:
        """The name for the next call; waits, without end, until there is one that is not left alone.

        One in `avoid` only if there is no other; the one to `prefer`, unless it is much busier than others. Of calls
        that wait, the one of the lowest `rank` goes first. To be followed by `call` without an await between them.
        """
        me = (rank, next(self._arrivals))
        insort(self._line, me)
        try:
            while True:
                looked_at = self._breakers.now()
                if self._line[0] == me and (admitted := self._admitted()):
                    return self._take(admitted, avoid=avoid, prefer=prefer)
                await self._change(since=looked_at)
        finally:
            self._line.remove(me)
            if self._line:
                self._breakers.stir()

    def allow(self, name: str, most: float) -> None:
        """From now on no more work than that is put under way at a counterpart, if it is one."""
        if name in self._names and self._loads[name].allowed != most:
            self._loads[name].allowed = most
            self._breakers.stir()

    def another(self, *, than: Collection[str]) -> str | None:
        """One that is believed to work, is not busy, and is not among `than`; None if there is none."""
        admitted = [name for name in self._admitted() if name not in than and self._is_well(name)]
        return self._take(admitted, avoid=()) if admitted else None

    @contextmanager
    def call(self, name: str, *, weight: int = 1) -> Iterator[Call]:
        """A call to one of them, which puts `weight` of work under way while the body runs.

        It went well, unless the body raises a ServiceError; a body that was cancelled or raises another error says
        nothing.
        """
        load = self._loads[name]
        load.under_way += weight
        busy: ServiceRefused | None = None
        try:
            with self._breakers[name].call() as call:
                try:
                    yield call
                except ServiceError as error:
                    busy = _told(call, error)
                    raise
                call.succeeded()
        finally:
            load.under_way -= weight
            if busy is not None:
                self.busy(name, for_s=busy.retry_after_s)
            elif load.under_way < min(load.most, load.allowed) < inf:
                self._breakers.stir()

    def busy(self, name: str, *, for_s: float | None) -> None:
        """It takes nothing for so long. A little longer, by chance: not all clients come back at the same moment."""
        now = self._breakers.now()
        rest_s = (_BUSY_S if for_s is None else for_s) * random.uniform(1.0, 1.25)
        self._loads[name].refused(until=now + rest_s, now=now)
        self._breakers.stir()

    async def until(self, *, at_hand: bool) -> None:
        """Return when `at_hand` is so."""
        while True:
            looked_at = self._breakers.now()
            if self.at_hand == at_hand:
                return
            await self._change(since=looked_at)

    def _is_well(self, name: str) -> bool:
        return self._breakers[name].state == "closed"

    def _take(self, admitted: Collection[str], *, avoid: Collection[str], prefer: str = "") -> str:
        chosen = min(admitted, key=lambda name: (name in avoid, self._loads[name].under_way))
        if prefer in admitted and prefer not in avoid:
            bearable = _MUCH_BUSIER * self._loads[chosen].under_way + _SLACK
            chosen = prefer if self._loads[prefer].under_way <= bearable else chosen
        self._names.remove(chosen)
        self._names.append(chosen)
        return chosen

    def _admitted(self) -> list[str]:
        now = self._breakers.now()
        return [name for name in self._names if self._breakers[name].admits and self._loads[name].has_room(now)]

    async def _change(self, *, since: float) -> None:
        """Return after the next verdict, or when a rest is over that was not at `since`."""
        ends = (load.busy_until for load in self._loads.values() if load.busy_until > since)
        await self._breakers.change(self._names, since=since, until=min(ends, default=inf))


def _told(call: Call, error: ServiceError) -> ServiceRefused | None:
    """Tells the breaker how a call failed; returns the error if it says that the counterpart is busy.

    One that refuses the request, or is busy, is well.
    """
    fault = fault_of(error)
    if fault == "request" or is_busy(error):
        call.succeeded()
    else:
        call.failed(str(error), silent=fault == "unavailable")
    return error if isinstance(error, ServiceRefused) and is_busy(error) else None
