"""Threads of a simulated process: real ones, of which one at a time runs, while the world waits for it.

A thread has the baton from the moment at which the world hands it over until it blocks, sleeps or ends. So nothing in
it races with the event loop, and the order of everything is the world's.
"""

import asyncio
import concurrent.futures
import threading
import types
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from simulation.world.clock import ProcessKilled, World, active
from simulation.world.process import Process, settle

T = TypeVar("T")
_RealThread = threading.Thread
_RealLock = threading.Lock
_here = threading.local()
_RARELY = 0.03
"""Share of pauses that are ten times as long."""


def current_thread() -> "SimulatedThread | None":
    """The simulated thread that runs this code; None in an event loop."""
    return getattr(_here, "thread", None)


class SimulatedThread:
    """Stands for threading.Thread. Its target runs in the process that makes it."""

    def __init__(
        self,
        group: None = None,
        target: Callable[..., object] | None = None,
        name: str | None = None,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        world = active()
        assert isinstance(world.current, Process), "a thread is begun by a process"
        assert target is not None
        self.name = name or "thread"
        self.daemon = bool(daemon)
        self._world = world
        self._process = world.current
        self._work: Callable[[], object] = lambda: target(*args, **(kwargs or {}))
        self._mine, self._worlds = _RealLock(), _RealLock()
        self._mine.acquire()  # whoever waits for a turn acquires; the other side gives the turn by a release
        self._worlds.acquire()
        self._ended = False
        self._joining: list[asyncio.Future[None]] = []
        self._joined_by: list[SimulatedThread] = []
        self._sleeps_until: float | None = None
        self._real = _RealThread(target=self._live, name=f"{self._process.name} {self.name}", daemon=True)

    def start(self) -> None:
        """Has it begin soon."""
        self._process.deaths.append(self._hand_over)
        self._real.start()
        self._process.run_thread(self._hand_over)

    def is_alive(self) -> bool:
        """True if it has not ended."""
        return not self._ended

    def join(self, timeout: float | None = None) -> "asyncio.Future[None] | None":
        """In a thread it blocks. In a loop, where work for `to_thread` is done: a future in place of the wait."""
        if self._ended:
            return None
        caller = current_thread()
        if caller is not None:
            self._joined_by.append(caller)
            if timeout is not None:
                self._world.after(timeout, lambda: self._give_up(caller))
            caller.block()
            return None
        future: asyncio.Future[None] = self._process.loop.create_future()
        self._joining.append(future)
        if timeout is not None:
            self._process.loop.call_later(timeout, lambda: settle(future, None))
        return future

    def _give_up(self, caller: "SimulatedThread") -> None:
        if caller in self._joined_by:
            self._joined_by.remove(caller)
            caller.wake()

    def block(self) -> None:
        """Called in the thread: gives the baton back until `wake`. Raises Killed."""
        self._worlds.release()
        self._mine.acquire()
        self.check()

    def wake(self) -> None:
        """Has a blocked thread go on soon."""
        self._process.run_thread(self._hand_over)

    def sleep(self, seconds: float) -> None:
        """Called in the thread. Raises Killed."""
        ends_at = self._sleeps_until = self._world.now + seconds
        self._world.at(ends_at, lambda: self._wake_at(ends_at))
        self.block()

    def _wake_at(self, ends_at: float) -> None:
        if self._sleeps_until == ends_at:
            self._sleeps_until = None
            self.wake()

    def hurry(self) -> float:
        """Has a thread that sleeps go on at once, for somebody who cannot wait; returns when it would have woken."""
        assert self._sleeps_until is not None, f"{self.name} is waited for, and waits for somebody else"
        ends_at, self._sleeps_until = self._sleeps_until, None
        self._hand_over()
        return ends_at

    def check(self) -> None:
        """Raises Killed if its process is dead."""
        if not self._process.alive or self._world.over:
            raise ProcessKilled

    def _hand_over(self) -> None:
        if self._ended:
            return
        before, self._world.current = self._world.current, self._process
        self._mine.release()
        self._worlds.acquire()
        self._world.current = before

    def _live(self) -> None:
        _here.thread = self
        self._mine.acquire()
        try:
            self.check()
            self._work()
        except ProcessKilled:
            pass
        finally:
            self._ended = True
            if self._process.alive:
                self._process.deaths.remove(self._hand_over)
                for future in self._joining:
                    self._process.loop.call_soon(settle, future, None)
                for thread in self._joined_by:
                    thread.wake()
                self._joined_by.clear()
            self._worlds.release()


class Thread(_RealThread):
    """In place of threading.Thread: a simulated one inside of a world, a real one elsewhere and for subclasses."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        world = World.active
        if cls is Thread and world is not None and isinstance(world.current, Process):
            return SimulatedThread(*args, **kwargs)
        return super().__new__(cls)


class SimulatedLock:
    """Stands for threading.Lock. A loop that wants what a thread holds stands still until the thread has let go of it:
    the thread goes on at once, and the loop as late as if it had waited.
    """

    def __init__(self) -> None:
        self._holder: SimulatedThread | None = None
        self._locked = False
        self._waiting: deque[SimulatedThread] = deque()

    def locked(self) -> bool:
        """See threading.Lock."""
        return self._locked

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """See threading.Lock."""
        thread = current_thread()
        while self._locked:
            if not blocking:
                return False
            if thread is not None:
                self._waiting.append(thread)
                thread.block()
            else:
                assert self._holder is not None, "an event loop waits for a lock that it holds"
                process = self._holder._process
                process.block_until(self._holder.hurry())
        self._locked, self._holder = True, thread
        return True

    def release(self) -> None:
        """See threading.Lock."""
        self._locked, self._holder = False, None
        if self._waiting:
            self._waiting.popleft().wake()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class SimulatedEvent:
    """Stands for threading.Event."""

    def __init__(self) -> None:
        self._set = False
        self._waiting: list[SimulatedThread] = []

    def is_set(self) -> bool:
        """See threading.Event."""
        return self._set

    def set(self) -> None:
        """See threading.Event."""
        self._set = True
        waiting, self._waiting = self._waiting, []
        for thread in waiting:
            thread.wake()

    def clear(self) -> None:
        """See threading.Event."""
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        """Blocks the thread."""
        thread = current_thread()
        if thread is None or self._set:
            return self._set
        self._waiting.append(thread)
        if timeout is not None:
            thread._world.after(timeout, lambda: self._time_out(thread))
        thread.block()
        return self._set

    def _time_out(self, thread: SimulatedThread) -> None:
        if thread in self._waiting:
            self._waiting.remove(thread)
            thread.wake()


class SimulatedQueue:
    """Stands for queue.SimpleQueue."""

    def __init__(self) -> None:
        self._items: deque[object] = deque()
        self._waiting: deque[SimulatedThread] = deque()

    __class_getitem__: Any = classmethod(types.GenericAlias)

    def put(self, item: object) -> None:
        """Adds an item."""
        self._items.append(item)
        if self._waiting:
            self._waiting.popleft().wake()

    def get(self) -> object:
        """The next item; blocks the thread until there is one."""
        while not self._items:
            thread = current_thread()
            assert thread is not None, "only a thread may block"
            thread.check()
            self._waiting.append(thread)
            try:
                thread.block()
            except ProcessKilled:
                self._waiting.clear()  # a queue that outlives its process would keep a whole world with its threads
                raise
        return self._items.popleft()


class ThreadFuture(concurrent.futures.Future[T]):
    """A future whose `result` gives the baton back while it is awaited."""

    def result(self, timeout: float | None = None) -> T:
        """See concurrent.futures.Future."""
        thread = current_thread()
        if thread is not None and not self.done():
            self.add_done_callback(lambda _: thread.wake())
            if timeout is not None:
                thread._process.loop.call_later(timeout, thread.wake)
            thread.block()
            if not self.done():
                raise TimeoutError
        return super().result(0)


@dataclass(frozen=True)
class Workers:
    """Threads for work beside the loop of a process: each piece waits for its turn, and is heard of a while after it
    is done, for `mean_s` each on average and now and then for much longer.
    """

    process: Process
    mean_s: float

    def __call__(self, future: "asyncio.Future[Any]", work: Callable[[], object]) -> None:
        """Has the work done; work whose future is given up before its turn is not."""
        world = self.process.world
        world.after(self._pause_s(), lambda: self.process.run_thread(lambda: self._begin(future, work)))

    def _pause_s(self) -> float:
        random = self.process.world.random
        return random.expovariate(1 / self.mean_s) * (10.0 if random.random() < _RARELY else 1.0)

    def _begin(self, future: "asyncio.Future[Any]", work: Callable[[], object]) -> None:
        if not future.cancelled() and self.process.alive:
            SimulatedThread(target=lambda: self._do(future, work), name="worker").start()

    def _do(self, future: "asyncio.Future[Any]", work: Callable[[], object]) -> None:
        thread = current_thread()
        assert thread is not None
        error: Exception | None = None
        result: object = None
        try:
            result = work()
        except Exception as raised:  # noqa: BLE001 - it crosses to the awaiting task, which raises it
            error = raised
        thread.sleep(self._pause_s())
        self.process.loop.call_soon_threadsafe(_settle, future, result, error)


def _settle(future: "asyncio.Future[Any]", result: object, error: Exception | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)


def run_coroutine_threadsafe(work: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop) -> ThreadFuture[T]:
    """Stands for asyncio's."""
    future: ThreadFuture[T] = ThreadFuture()

    def begin() -> None:
        asyncio.futures._chain_future(asyncio.ensure_future(work, loop=loop), future)  # type: ignore[attr-defined]

    loop.call_soon_threadsafe(begin)
    return future


def sleep(seconds: float) -> None:
    """Stands for time.sleep."""
    thread = current_thread()
    assert thread is not None, "an event loop does not sleep"
    thread.sleep(seconds)
