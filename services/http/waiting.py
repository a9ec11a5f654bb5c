"""Whom a process waits for, and since when: said in the log, shown by /readyz, counted in seconds."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from protocol.status import Readiness, WaitStatus

logger = logging.getLogger(__name__)

QUIET_S = 10.0
"""Processes that are started together wait for each other at first: so long that is no news."""
_RAREST_S = 300.0
_MOST_DOUBLINGS = 30  # beyond any limit; a float ends at 1023
_START = "its own start"


@dataclass(eq=False)
class Wait:
    """A wait in progress. `whom` and `remedy` may be set anew while it lasts, as what is missing becomes less.

    `remedy`: why it may last, and what to do. `said` counts its lines.
    """

    whom: str
    since: float
    blocks_readiness: bool
    next_line_at: float
    remedy: str = ""
    said: int = field(default=0)


class Waiting:
    """The waits of one process that are in progress.

    `clock` is in seconds. `on_waited` is told whom and how many seconds at the end of each wait.
    Made not ready; `started()` is to be called when the process serves. `start`: what it does until then, and what to
    do if that does not end; with it a long start is said, where it is made in a running event loop.
    """

    def __init__(
        self,
        *,
        start: str = "",
        remind_every_s: float = 20.0,
        clock: Callable[[], float] = time.monotonic,
        on_waited: Callable[[str, float], None] | None = None,
    ) -> None:
        self._remind_every_s = remind_every_s
        self._clock = clock
        self._on_waited = on_waited
        self._waits: list[Wait] = []
        now = clock()
        self._startup: Wait | None = Wait(_START, now, True, now + QUIET_S, start)
        self._starting = self._start_timer(self._startup) if start else _Timer(None)

    def started(self) -> None:
        """The process is up; from here on only waits make it not ready."""
        self._starting.cancel()
        self._startup = None

    @contextmanager
    def wait(
        self, whom: str, *, quiet_s: float = 0.0, remedy: str = "", blocks_readiness: bool = True
    ) -> Iterator[Wait]:
        """Mark that the body waits for `whom`, a text that names the kind of the process that is waited for.

        A wait of more than `quiet_s` seconds is said in the log with its `remedy`, and at its end, where one that an
        error or a stop has ended is told from one that was not in vain; in between again
        after `remind_every_s` seconds, then ever more rarely: each time after twice as long, 5 minutes at most.
        A wait that is part of normal work passes `blocks_readiness=False`. Lines come by themselves in a running event
        loop; a thread without one calls `remind`.
        """
        now = self._clock()
        current = Wait(whom, now, blocks_readiness, now + quiet_s, remedy)
        self._waits.append(current)
        self._speak(current)
        timer = self._start_timer(current)
        came = False
        try:
            yield current
            came = True
        finally:
            timer.cancel()
            self._waits.remove(current)
            self._end(current, came=came)

    def remind(self) -> None:
        """Say the waits whose next line is due."""
        for current in tuple(self._waits):
            self._speak(current)

    def readiness(self) -> Readiness:
        """The answer of /readyz: the waits that block readiness, and how long the oldest lasts."""
        blocking = [current for current in (*self._waits, self._startup) if current and current.blocks_readiness]
        if not blocking:
            return Readiness(ready=True)
        waited_s = self._clock() - min(current.since for current in blocking)
        return Readiness(
            ready=False, waiting_for=tuple(current.whom for current in blocking), waiting_s=max(0.0, waited_s)
        )

    def status(self) -> tuple[WaitStatus, ...]:
        """All waits in progress, those of normal work too, the oldest first."""
        now = self._clock()
        waits = sorted(filter(None, (self._startup, *self._waits)), key=lambda wait: wait.since)
        return tuple(
            WaitStatus(whom=wait.whom, since_s=max(0.0, now - wait.since), blocks_readiness=wait.blocks_readiness)
            for wait in waits
        )

    def _speak(self, current: Wait) -> None:
        now = self._clock()
        if now < current.next_line_at:
            return
        what = "starting" if current is self._startup else f"waiting for {current.whom}"
        waited = f" since {now - current.since:.0f} s" if now > current.since else ""
        logger.info("%s%s%s", what, waited, f": {current.remedy}" if current.remedy else "")
        current.next_line_at = now + min(_RAREST_S, self._remind_every_s * 2.0 ** min(current.said, _MOST_DOUBLINGS))
        current.said += 1

    def _end(self, current: Wait, *, came: bool) -> None:
        waited_s = self._clock() - current.since
        if current.said:
            whom = current.whom.partition(": ")[0]  # the rest is of the time in which it was not there
            how = "waited %.1f s for %s: going on" if came else "no longer waiting, after %.1f s, for %s"
            logger.info(how, waited_s, whom)
        if self._on_waited is not None:
            self._on_waited(current.whom, waited_s)

    def _start_timer(self, current: Wait) -> "_Timer":
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return _Timer(None)
        timer = _Timer(loop)

        def tick() -> None:
            self._speak(current)
            timer.schedule(max(0.0, current.next_line_at - self._clock()), tick)

        timer.schedule(max(0.0, current.next_line_at - self._clock()), tick)
        return timer


class _Timer:
    """A callback that can be scheduled again and again, or, without an event loop, never runs."""

    def __init__(self, loop: asyncio.AbstractEventLoop | None) -> None:
        self._loop = loop
        self._handle: asyncio.TimerHandle | None = None

    def schedule(self, delay_s: float, callback: Callable[[], None]) -> None:
        if self._loop is not None:
            self._handle = self._loop.call_later(delay_s, callback)

    def cancel(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
