"""Circuit breakers: a peer that fails again and again is not called for a while, then probed by one call.

    closed ──silence, or too many failures in a row──▶ open ──its pause is over──▶ half-open: one call is the probe
      ▲                                                 ▲                               │
      ├──────────────────── success ────────────────────┼───────────────────────────────┤
      │                                                 └── failure: a pause twice as long
      └── calls are admitted

A call that ends without a verdict, because it was cancelled, gives the place of the probe back.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from typing import Literal

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
        self._probe: GuardedCall | None = None
        self._heard_at = float("-inf")

    @property
    def state(self) -> State:
        if self._open_until is None:
            return "closed"
        return "open" if self._clock() < self._open_until else "half-open"

    @property
    def admits(self) -> bool:
        """True if a call may begin now."""
        return self.state == "closed" or (self.state == "half-open" and self._probe is None)

    def rested_at(self, *, since: float) -> float | None:
        """End of its rest, if that is later than `since`; None if it did not rest then."""
        return self._open_until if self._open_until is not None and self._open_until > since else None

    @contextmanager
    def call(self) -> Iterator["GuardedCall"]:
        """A call to the counterpart, which the body gives its verdict. To be begun only if the breaker admits it."""
        call = GuardedCall(self, is_probe=self.state != "closed", now=self._clock())
        if call.is_probe:
            self._probe = call
        try:
            yield call
        finally:
            if self._probe is call:
                self._probe = None
                self._on_change()

    def _heard(self, call: "GuardedCall") -> None:
        self._heard_at = call.heard_at = self._clock()
        if self._open_until is not None:
            logger.info("%s answers again", self._name)
            self._open_until, self._rest_s = None, 0.0
            self._on_change()
        self._failures = 0

    def _failed(self, call: "GuardedCall", *, why: str, silent: bool) -> None:
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
        logger.log(level, "circuit open for %s, next probe in %g s: %s", self._name, self._rest_s, why)
        self._on_change()


class GuardedCall:
    """A call under way. The first verdicts may come early: the first part of a stream is a sign of life."""

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
