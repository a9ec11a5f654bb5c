"""A process: an event loop of its own, threads, and a life that can end or stand still between any two callbacks."""

import asyncio
import asyncio.events
import math
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import Context, copy_context
from functools import partial
from typing import Any, TypeVar

from services.process import Stop, describe_error
from simulation.world.clock import SerialFuture, SerialTask, World

T = TypeVar("T")
Main = Callable[[Stop], Awaitable[None]]

_WORK_IN_A_THREAD_S = 0.001
_CLEAN_UP_S = 8.0
_PRUNE_EVERY = 256


class LoopHandle(asyncio.TimerHandle):
    """A callback, due now or at `when`. It is made and cancelled without asking for a debug mode that no loop has here:
    there are tens of thousands in a run.
    """

    __slots__ = ()

    def __init__(
        self, when: float, callback: Any, args: tuple[Any, ...], loop: "ProcessLoop", context: Context | None
    ) -> None:
        self._when, self._scheduled = when, False
        self._callback, self._args, self._loop = callback, args, loop
        self._context = copy_context() if context is None else context
        self._cancelled, self._repr, self._source_traceback = False, None, None

    def cancel(self) -> None:
        """See asyncio. The world passes over it."""
        self._cancelled, self._callback, self._args = True, None, ()


class ProcessLoop(asyncio.BaseEventLoop):
    """asyncio's event loop with the world's clock; the world runs its callbacks one by one."""

    def __init__(self, world: World, process: "Process") -> None:
        self._world = world
        self._process = process
        super().__init__()
        self.tasks: list[SerialTask] = []
        self.set_task_factory(self._task)  # type: ignore[arg-type]

    def __del__(self) -> None:
        """It holds nothing that has to be closed."""

    def time(self) -> float:
        return self._world.now

    def is_running(self) -> bool:
        return True

    def set_debug(self, enabled: bool) -> None:
        """There is no such mode here."""
        self._debug = False

    def call_soon(self, callback: Any, *args: Any, context: Context | None = None) -> asyncio.Handle:  # type: ignore[override]
        handle = LoopHandle(self._world.now, callback, args, self, context)
        self._process.put(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        timer = LoopHandle(when, callback, args, self, context)
        self._world.at(when, partial(self._process.put, timer))
        return timer

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._world.now + delay, callback, *args, context=context)

    def create_future(self) -> asyncio.Future[Any]:
        future = SerialFuture(loop=self)
        future._serial = self._world.serial()
        return future

    def run_in_executor(self, executor: object, func: Callable[..., T], *args: object) -> asyncio.Future[T]:
        """The work is done at once, a moment later, or in a thread of its own if the world has any for it."""
        future: asyncio.Future[T] = self.create_future()
        if self._process.workers is not None:
            self._process.workers(future, partial(func, *args))
            return future
        self.call_later(_WORK_IN_A_THREAD_S, _work, future, partial(func, *args))
        return future

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        told = describe_error(error) if isinstance(error, BaseException) else ""
        self._process.unhandled(f"{context.get('message')} {told}".strip())

    def _task(
        self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], context: Context | None = None
    ) -> SerialTask:
        task = SerialTask(work, loop=loop, context=context)
        self.tasks.append(task)
        if len(self.tasks) % _PRUNE_EVERY == 0:
            self.tasks = [each for each in self.tasks if not each.done()]
        return task

    def _asyncgen_finalizer_hook(self, agen: Any) -> None:
        if not self._world.over and self._process.alive:
            self.call_soon(self.create_task, agen.aclose())


def settle(future: "asyncio.Future[T]", result: T) -> None:
    """Sets the result of a future that nobody has settled or given up yet."""
    if not future.done():
        future.set_result(result)


def _work(future: "asyncio.Future[T]", work: Callable[[], "T | asyncio.Future[T]"]) -> None:
    try:
        result = work()
    except Exception as error:  # noqa: BLE001 - it crosses to the awaiting task, which raises it
        if not future.done():
            future.set_exception(error)
        return
    if isinstance(result, asyncio.Future):  # a wait that was turned into one of the loop
        result.add_done_callback(lambda done: settle(future, done.result()))
    elif not future.done():
        future.set_result(result)


class Process:
    """A life of a process. `ended` is told its exit code, None if it was killed."""

    def __init__(self, world: World, *, name: str, host: str, ended: Callable[["Process", int | None], None]) -> None:
        self.world = world
        self.name = name
        self.host = host
        self.number = world.serial()
        self.alive = True
        self.stopped = False
        self.awake_since = -math.inf
        """Time at which it last went on after it had stood still."""
        self.leaving = False
        self.workers: Callable[[asyncio.Future[Any], Callable[[], object]], object] | None = None
        """Does work beside the loop, and settles its future; without it such work takes a moment."""
        self._blocked_until = 0.0
        self.loop = ProcessLoop(world, self)
        self._ready: deque[asyncio.Handle] = self.loop._ready  # type: ignore[attr-defined]
        self.started_at = world.now
        self.deaths: list[Callable[[], object]] = []
        """Calls for the rest of the world when this process dies: connections break, locks are released."""
        self.failed: Callable[[BaseException], None] = lambda error: None
        self._ended = ended
        self._stop: Stop | None = None
        self._main: asyncio.Task[None] | None = None

    def start(self, main: Main) -> None:
        """Begins its life."""
        self.loop.call_soon(self._begin, main)

    def put(self, handle: asyncio.Handle) -> None:
        """A callback is due."""
        if not self.alive:
            return
        self._ready.append(handle)
        world = self.world
        if not self.stopped and world.now >= self._blocked_until:
            world.wake(self)

    def run_one(self) -> bool:
        """See Runnable."""
        ready, world = self._ready, self.world
        while ready:
            handle = ready.popleft()
            if handle._cancelled:
                continue
            if world.running_loop is not self.loop:
                world.running_loop = self.loop
                asyncio.events._set_running_loop(self.loop)
            handle._run()
            break
        return bool(ready) and self.alive and not self.stopped and world.now >= self._blocked_until

    def kill(self) -> None:
        """It is gone between two callbacks: no clean-up of its own runs."""
        if self.alive:
            self._die()
            self._ended(self, None)

    def terminate(self) -> None:
        """SIGTERM."""
        if self.alive and self._stop is not None:
            self.loop.call_soon(self._request_stop)

    def stand_still(self) -> None:
        """SIGSTOP: its callbacks wait, its connections stay."""
        self.stopped = True
        self.world.rest(self)

    def go_on(self) -> None:
        """SIGCONT."""
        self.stopped, self.awake_since = False, self.world.now
        self._wake()

    @property
    def blocked(self) -> bool:
        """True if its event loop is busy with one callback."""
        return self.world.now < self._blocked_until

    def block_until(self, when: float) -> None:
        """Its event loop is in the middle of a callback that takes so long; threads and connections go on."""
        self._blocked_until = max(self._blocked_until, when)
        self.world.rest(self)
        self.world.at(when, self._wake)

    def run_thread(self, hand_over: Callable[[], object]) -> None:
        """Gives one of its threads a turn, which does not depend on the loop's having time."""
        if self.alive and self.blocked and not self.stopped:
            self.world.at(self.world.now, partial(self.run_thread_now, hand_over))
        else:
            self.loop.call_soon(hand_over)

    def run_thread_now(self, hand_over: Callable[[], object]) -> None:
        """The same between two callbacks of the world; a process that stands still keeps it for later."""
        if self.alive and self.stopped:
            self.loop.call_soon(hand_over)
            return
        before, self.world.current = self.world.current, self
        hand_over()
        self.world.current = before

    def _wake(self) -> None:
        if self.alive and self._ready and not self.stopped and not self.blocked:
            self.world.wake(self)

    def unhandled(self, what: str) -> None:
        """asyncio complains."""
        self.world.note(self.name, f"unhandled: {what}")

    def _begin(self, main: Main) -> None:
        self._stop = Stop()
        self._main = self.loop.create_task(_guarded(main, self._stop))
        self._main.add_done_callback(self._returned)

    def _request_stop(self) -> None:
        assert self._stop is not None
        assert self._main is not None
        self.leaving = True
        self._stop.request("SIGTERM")
        self.loop.call_soon(self._main.cancel)
        self.loop.call_later(_CLEAN_UP_S, self._cut_off)

    def _cut_off(self) -> None:
        self.world.note(self.name, f"clean-up took more than {_CLEAN_UP_S:g} s and is cut off")
        self._exit(1)

    def _returned(self, main: "asyncio.Task[None]") -> None:
        if main.cancelled():
            self._exit(0 if self.leaving else 1)
            return
        error = main.exception()
        if error is not None:
            self.world.note(self.name, f"stopped by an error: {describe_error(error)[:400]}")
            self.failed(error)
        self._exit(0 if error is None else 1)

    def _exit(self, code: int) -> None:
        if self.alive:
            self._die()
            self._ended(self, code)

    def _die(self) -> None:
        self.alive = False
        self._ready.clear()
        self.world.rest(self)
        for death in self.deaths:
            death()


async def _guarded(main: Main, stop: Stop) -> None:
    await main(stop)
