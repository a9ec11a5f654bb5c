"""Cores of one machine that all processes share: threads that compute at the same time get equal parts of them.

Two threads on two cores have one each; three have two thirds of one each, and take half as long again. What each busy
thread has had since the beginning is one number for all of them, so a wait for computed seconds is a wait until that
number has risen by them.
"""

import asyncio
import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from functools import partial
from itertools import count

from simulation.world.clock import World
from simulation.world.process import Process, settle
from simulation.world.threads import SimulatedThread

_CLOSE_S = 1e-9


class Cores:
    """So many cores. A thread is a name; one that computes several things at once (`hold`) is one thread all the same,
    and what it is asked for by `compute` it does one after the other.
    """

    def __init__(self, world: World, number: float) -> None:
        self._world = world
        self._number = number
        self._busy: Counter[str] = Counter()
        self._had_s, self._at = 0.0, world.now
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._order = count()
        self._alarm = 0
        self._lines: defaultdict[str, deque[asyncio.Future[None]]] = defaultdict(deque)
        self._taken: set[str] = set()

    def hold(self, thread: str) -> None:
        """The thread computes from now on, until each hold is let go of."""
        self._catch_up()
        self._busy[thread] += 1
        self._set_alarm()

    def let_go(self, thread: str) -> None:
        """The reverse of a `hold`."""
        self._catch_up()
        self._busy[thread] -= 1
        if not self._busy[thread]:
            del self._busy[thread]
        self._set_alarm()

    def after(self, seconds: float, action: Callable[[], object]) -> None:
        """Has `action` called when each busy thread has computed for so long."""
        self._catch_up()
        heapq.heappush(self._due, (self._had_s + seconds, next(self._order), action))
        self._set_alarm()

    async def computed(self, seconds: float) -> None:
        """Returns when a thread that is held has computed for so long."""
        process = self._world.current
        assert isinstance(process, Process)
        future = process.loop.create_future()
        self.after(seconds, lambda: process.loop.call_soon(settle, future, None))
        await future

    async def compute(self, thread: str, seconds: float) -> None:
        """Returns when a thread has computed for so long, after all that it was asked for before."""
        if seconds <= 0:
            return
        process = self._world.current
        assert isinstance(process, Process)
        while thread in self._taken:
            turn = process.loop.create_future()
            self._lines[thread].append(turn)
            await turn
        self._taken.add(thread)
        self.hold(thread)
        try:
            await self.computed(seconds)
        finally:
            self.let_go(thread)
            self._taken.discard(thread)
            self._wake_next(thread)

    def block(self, thread: SimulatedThread, seconds: float) -> None:
        """Called in a thread, which computes for so long."""
        self.hold(thread.name)
        try:
            self.after(seconds, thread.wake)
            thread.block()
        finally:
            self.let_go(thread.name)

    def _wake_next(self, thread: str) -> None:
        waiting = self._lines[thread]
        while waiting:
            turn = waiting.popleft()
            if not turn.done():
                turn.get_loop().call_soon(settle, turn, None)
                return

    def _rate(self) -> float:
        return min(1.0, self._number / max(1, len(self._busy)))

    def _catch_up(self) -> None:
        self._had_s += self._rate() * (self._world.now - self._at)
        self._at = self._world.now

    def _set_alarm(self) -> None:
        self._alarm += 1
        if self._due:
            left_s = max(0.0, self._due[0][0] - self._had_s) / self._rate()
            self._world.after(left_s, partial(self._ring, self._alarm))

    def _ring(self, alarm: int) -> None:
        if alarm != self._alarm:
            return
        self._catch_up()
        while self._due and self._due[0][0] <= self._had_s + _CLOSE_S:
            heapq.heappop(self._due)[2]()
        self._set_alarm()
