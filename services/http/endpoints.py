"""The choice among several peers of one kind: the least burdened first; busy and failing ones are not asked.

choose ─▶ call ─▶ its answer, or a ServiceError
  ▲                 ├─ busy: not asked before its Retry-After, nor for more at once than it took
  │                 └─ silent, or failing again and again: its breaker opens
  └──── a call ends, a pause is over, a peer joins
"""

import random
from bisect import insort
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from math import inf

from services.http.breakers import Breakers, GuardedCall
from services.http.client import ServiceError, ServiceRefused
from services.http.faults import fault_of, is_busy

_BUSY_S = 1.0
"""Pause before the next call to a busy peer that sent no Retry-After."""

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
        """True if one of them is believed to answer, and is not busy."""
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
        """A name that is believed to work, is not busy, and is not among `than`; None if there is none."""
        admitted = [name for name in self._admitted() if name not in than and self._is_well(name)]
        return self._take(admitted, avoid=()) if admitted else None

    @contextmanager
    def call(self, name: str, *, weight: int = 1) -> Iterator[GuardedCall]:
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


def _told(call: GuardedCall, error: ServiceError) -> ServiceRefused | None:
    """Tells the breaker how a call failed; returns the error if it says that the counterpart is busy.

    One that refuses the request, or is busy, is well.
    """
    fault = fault_of(error)
    if fault == "request" or is_busy(error):
        call.succeeded()
    else:
        call.failed(str(error), silent=fault == "unavailable")
    return error if isinstance(error, ServiceRefused) and is_busy(error) else None
