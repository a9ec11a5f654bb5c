"""The world: virtual time, processes that live, are stopped or dead, and the history of what happened.

    world.run ─▶ a process that has something to do, chosen by the seed ─▶ one callback of its event loop
              └▶ nobody has: the clock jumps to the next timer, message or fault

Nothing waits for real time. The same seed gives the same order of callbacks, and so the same history.
"""

import asyncio
import asyncio.events
import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Protocol, TypeVar, cast

T = TypeVar("T")

_MAX_CALLBACKS_IN_AN_INSTANT = 200_000


class ProcessKilled(BaseException):
    """Raised in a thread of a process that is dead, and by whatever such a process still touches."""


class Stuck(AssertionError):
    """Time does not pass any more, or nothing will ever happen again."""


class Runnable(Protocol):
    """Somebody whose callbacks the world runs, one at a time."""

    name: str

    def run_one(self) -> bool:
        """Runs the next callback; whether there are more to run now."""


@dataclass(frozen=True)
class Event:
    """A line of the history: at `when` virtual seconds `who` did or met `what`."""

    when: float
    who: str
    what: str

    def __str__(self) -> str:
        return f"{self.when:10.3f}  {self.who:<14} {self.what}"


class World:
    """Owns the clock and the queue of what is to come. `observe` is called after every `observe_every` callbacks."""

    active: "World | None" = None

    def __init__(self, *, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.now = 0.0
        self.history: list[Event] = []
        self.jumps: dict[str, float] = {}
        """By host: seconds by which its clock on the wall is ahead."""
        self.masked: dict[str, str] = {}
        """Texts that a history does not tell, with their substitutes."""
        self.callbacks = 0
        self.over = False
        self.current: Runnable | None = None
        self.observe: Callable[[], object] = lambda: None
        self.observe_every = 1
        self._parts: dict[type, object] = {}
        self._runnable: dict[Runnable, None] = {}
        self._queue: list[tuple[float, int, Callable[[], object]]] = []
        self._order = count()
        self._serials = count(1)
        self._in_this_instant = 0
        self.running_loop: asyncio.AbstractEventLoop | None = None
        """The one that asyncio takes for running: it stays so until another one's callback runs."""

    def add(self, part: object) -> None:
        """Makes something known to whoever asks for its type."""
        self._parts[type(part)] = part

    def part(self, kind: type[T]) -> T:
        """The part that was added of this type: the network, the disk, a script."""
        return cast("T", self._parts[kind])

    def has(self, kind: type) -> bool:
        """True if there is one of this type."""
        return kind in self._parts

    def serial(self) -> int:
        """A number that no other object of this world has: what is hashed by it has the same order in every run."""
        return next(self._serials)

    def hexadecimal(self, digits: int) -> str:
        """Random digits from the seed."""
        return f"{self.random.getrandbits(4 * digits):0{digits}x}"

    def note(self, who: str, what: str) -> None:
        """Adds a line to the history."""
        for shown, instead in self.masked.items():
            what = what.replace(shown, instead)
        self.history.append(Event(self.now, who, what))

    def at(self, when: float, action: Callable[[], object]) -> None:
        """Has `action` called at a time, or now if that has passed."""
        heapq.heappush(self._queue, (when, next(self._order), action))

    def after(self, delay_s: float, action: Callable[[], object]) -> None:
        """Has `action` called in so many seconds."""
        self.at(self.now + delay_s, action)

    def end(self) -> None:
        """Nothing that is done from now on counts, and what was due is forgotten."""
        self.over = True
        self._queue.clear()

    def wake(self, somebody: Runnable) -> None:
        """Somebody has a callback to run."""
        self._runnable[somebody] = None

    def rest(self, somebody: Runnable) -> None:
        """Somebody runs nothing, until woken."""
        self._runnable.pop(somebody, None)

    def run(self, *, until: Callable[[], bool]) -> None:
        """Lets time pass until the condition holds. Raises Stuck, and whatever `observe` raises."""
        runnable = self._runnable
        try:
            while not until():
                if runnable:
                    self._run_somebody()
                    if not self.callbacks % self.observe_every:
                        self.observe()
                else:
                    self._jump()
        finally:
            self.running_loop = None
            asyncio.events._set_running_loop(None)

    def _run_somebody(self) -> None:
        self._in_this_instant += 1
        if self._in_this_instant > _MAX_CALLBACKS_IN_AN_INSTANT:
            busy = ", ".join(each.name for each in self._runnable)
            raise Stuck(f"{_MAX_CALLBACKS_IN_AN_INSTANT} callbacks ran and no time passed: {busy} spins")
        runnable = self._runnable
        if len(runnable) == 1:
            (chosen,) = runnable
        else:
            chosen = list(runnable)[self._below(len(runnable))]
        self.current = chosen
        self.callbacks += 1
        if not chosen.run_one():
            runnable.pop(chosen, None)
        self.current = None

    def _below(self, count: int) -> int:
        """A draw as of `randrange(count)`, without its checks."""
        bits, draw = count.bit_length(), self.random.getrandbits
        drawn = draw(bits)
        while drawn >= count:
            drawn = draw(bits)
        return drawn

    def _jump(self) -> None:
        if not self._queue:
            raise Stuck("nothing is due any more: everybody waits for somebody else, without a deadline")
        when, _, action = heapq.heappop(self._queue)
        if when > self.now:
            self.now = when
            self._in_this_instant = 0
        action()


def active() -> World:
    """The world that runs now."""
    assert World.active is not None, "no simulation is running"
    return World.active


class SerialTask(asyncio.Task):  # type: ignore[type-arg]
    """A task whose place in a set does not depend on its address: asyncio asks for its hash when it is made."""

    _serial = 0

    def __hash__(self) -> int:
        if not self._serial:
            self._serial = active().serial()
        return self._serial


class SerialFuture(asyncio.Future):  # type: ignore[type-arg]
    """A future whose place in a set does not depend on its address. Who makes it gives it its serial number."""

    __slots__ = ("_serial",)
    _serial: int

    def __hash__(self) -> int:
        return self._serial
