"""An event loop in a thread beside the process's, for coroutines of users: what they block is each other alone.

    await run(step, limit_s=60) ──▶ the loop's thread: the coroutine ──▶ its result, or what it raises
                                        │ watched: does the loop answer? whose task is it in?
                                        └─ blocked for longer than that one may: left to itself, a new thread goes on

Time in which somebody else blocks the loop counts for nobody but him. What runs in a loop that is left may end there,
if it ever comes back; else it ends with HeldUp, which is not its own fault. With a `block_s` it is told so at once, and
no later than its limit: what can be begun again need not hope for a loop that is left.
"""

import asyncio
import logging
import math
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from functools import lru_cache
from inspect import iscoroutine
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from services.user_code import LetOut, place_of

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LOOK_S = 0.2
"""Between two looks at a loop: one that does not answer for so long is blocked."""
_CANCEL_S = 5.0
"""Longest wait for a coroutine that is cancelled, which may have to clean up."""
_UNLIMITED_S = 60.0
"""Of code without a limit of its own: longest time for which it may block the loop."""
_HELD_UP = "others' code blocks its event loop"


class TookTooLong(Exception):
    """A coroutine was not done within its limit, in a loop that nobody else blocked. Of one that blocked the loop
    itself the text says where.
    """


class HeldUp(Exception):
    """Others' code blocked the loop in which a coroutine runs, for so long that it was given up; it is not at fault."""


class UserLoop:
    """Runs coroutines of users in one thread, started with the first of them; it ends with the process."""

    def __init__(self) -> None:
        self._thread: _LoopThread | None = None

    async def run(
        self, make: Callable[[], Awaitable[T]], *, limit_s: float | None = None, block_s: float | None = None
    ) -> T:
        """The result of `make`, called in the loop. Raises what it raises, LetOut where it wants to end more
        than itself, TookTooLong, and HeldUp. Cancelled with the caller.

        `block_s`: longest time for which it may block the loop, if not its limit; it ends by its limit, come what may.
        """
        stay = _STAY.get()
        thread = stay.thread if stay is not None and stay.thread is not None else self._free_thread()
        if stay is not None:
            stay.thread = thread
        call = _Call(make, asyncio.get_running_loop(), limit_s, block_s)
        thread.begin(call)
        try:
            return await _ended(call)
        except HeldUp:
            if stay is not None:
                stay.thread = None
            raise
        finally:
            try:
                await _given_up(call, thread)
            finally:
                thread.forget(call)

    def _free_thread(self) -> "_LoopThread":
        if self._thread is None or self._thread.left:
            self._thread = _LoopThread()
        return self._thread


@lru_cache(maxsize=1)
def user_loop() -> UserLoop:
    """The loop of the process: clients that a user's module makes at import belong to one loop alone."""
    return UserLoop()


@contextmanager
def one_thread() -> Iterator[None]:
    """Within it all coroutines of a caller run in the same thread: what they keep may belong to its loop."""
    token = _STAY.set(_Stay())
    try:
        yield
    finally:
        _STAY.reset(token)


async def at_home(home: asyncio.AbstractEventLoop, make: Callable[[], Awaitable[T]]) -> T:
    """The result of `make`, called in the loop `home`, from whichever loop this is awaited in."""
    if asyncio.get_running_loop() is home:
        return await make()

    async def there() -> T:
        return await make()

    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(there(), home))


class _Call(Generic[T]):
    """A coroutine. `due` is moved while others block its loop; `held_up`: they do so for longer than they may.

    `last`: when it ends at the latest. `blocks_at`: where it blocks the loop, once that is left for its sake.
    """

    def __init__(
        self,
        make: Callable[[], Awaitable[T]],
        home: asyncio.AbstractEventLoop,
        limit_s: float | None,
        block_s: float | None,
    ) -> None:
        self.limit_s = limit_s
        self.due = math.inf if limit_s is None else _now() + limit_s
        self.begins_again = block_s is not None
        self.last = self.due if self.begins_again else math.inf
        self.may_block_s = block_s or limit_s or _UNLIMITED_S
        self.blocks_at: str | None = None
        self.held_up = False
        self.outcome: asyncio.Future[T] = home.create_future()
        # Nobody need hear of it: its caller may be gone by then.
        self.outcome.add_done_callback(lambda outcome: outcome.cancelled() or outcome.exception())
        self._make, self._home = make, home
        self._task: asyncio.Task[None] | None = None
        self._begun = self._unwanted = False

    def begin(self) -> None:
        """In its loop."""
        _CALL.set(self)
        self._task = asyncio.get_running_loop().create_task(self._run())

    def cancel(self) -> None:
        """In its loop."""
        self._unwanted = True
        if self._task is not None and self._begun:
            self._task.cancel()

    async def _run(self) -> None:
        self._begun = True
        try:
            made = self._make()
            if self._unwanted and iscoroutine(made):
                made.close()
                self._fail(asyncio.CancelledError())
                return
            result = await made
        except BaseException as error:  # noqa: BLE001 - code of others: it is for the caller, and must not end the thread
            self._fail(error)
        else:
            self._tell(lambda: self.outcome.set_result(result))

    def _fail(self, error: BaseException) -> None:
        """Tell the caller, as a future takes it."""
        fault: Exception = error if isinstance(error, Exception) else LetOut(error)
        if isinstance(fault, StopIteration):
            fault = RuntimeError(repr(fault))
        self._tell(lambda: self.outcome.set_exception(fault))

    def _tell(self, say: Callable[[], None]) -> None:
        def said() -> None:
            if not self.outcome.done():
                say()

        try:
            self._home.call_soon_threadsafe(said)
        except RuntimeError:  # the caller's loop has ended, and nobody waits
            logger.debug("a coroutine of a user's ended after its caller's event loop")


class _LoopThread:
    """The loop, its thread, and another one that looks after it while anything runs there."""

    def __init__(self) -> None:
        self.left = self.blocked = False
        self._holder: _Call[Any] | None = None
        self._held_since = 0.0
        self._loop = asyncio.new_event_loop()
        self._owners: WeakKeyDictionary[asyncio.Task[Any], _Call[Any]] = WeakKeyDictionary()
        self._calls: set[_Call[Any]] = set()
        self._any = threading.Condition()
        self._loop.set_task_factory(self._owned)
        self._thread = threading.Thread(target=self._turn, name="users' coroutines", daemon=True)
        self._thread.start()
        threading.Thread(target=self._watch, name="watch over users' coroutines", daemon=True).start()

    def begin(self, call: _Call[Any]) -> None:
        """From any thread."""
        with self._any:
            self._calls.add(call)
            self._any.notify()
        self._loop.call_soon_threadsafe(call.begin, context=copy_context())

    def forget(self, call: _Call[Any]) -> None:
        """From any thread: nobody waits for it any more, though it may run on."""
        with self._any:
            self._calls.discard(call)

    def cancel(self, call: _Call[Any]) -> None:
        """From any thread."""
        self._loop.call_soon_threadsafe(call.cancel)

    def _turn(self) -> None:
        asyncio.set_event_loop(self._loop)
        while True:
            try:
                self._loop.run_forever()
            except BaseException:  # a SystemExit of a task or callback of the user's ends its own run of the loop
                logger.exception("code of a user's tried to end the process; its event loop goes on")

    def _owned(self, loop: asyncio.AbstractEventLoop, work: Any, **how: Any) -> "asyncio.Task[Any]":
        """A task, of which is known whose it is: tasks of a call's tasks are its own, too."""
        task: asyncio.Task[Any] = asyncio.Task(work, loop=loop, **how)
        owner = _CALL.get()
        if owner is not None:
            self._owners[task] = owner
        return task

    def _watch(self) -> None:
        while True:
            with self._any:
                self._any.wait_for(lambda: bool(self._calls))
            answer = threading.Event()
            self._loop.call_soon_threadsafe(answer.set)
            last = _now()
            while not answer.wait(_LOOK_S):
                now = _now()
                self._account(since_s=now - last)
                last = now
            self._recovered()
            time.sleep(_LOOK_S)

    def _account(self, *, since_s: float) -> None:
        """The loop does not answer: whose is the time?"""
        task = asyncio.current_task(self._loop)
        holder = None if task is None else self._owners.get(task)
        # Several may block it one after the other, each for less than it may.
        if not self.blocked or holder is not self._holder:
            self._holder, self._held_since = holder, _now() - since_s
        blocked_s = _now() - self._held_since
        self.blocked = True
        with self._any:
            others = [call for call in self._calls if call is not holder]
            if not self.left and self._is_over(holder, others, blocked_s):
                self.left = True
                place = self._place()
                logger.warning(
                    "code of a user's blocks its event loop%s: the thread is left to itself, a new one goes on", place
                )
                if holder is not None:
                    holder.blocks_at = place
            for call in others:
                if not self.left:
                    call.due += since_s
                elif not call.held_up:
                    call.held_up, call.due = True, _now() + (call.limit_s or _UNLIMITED_S)

    def _is_over(self, holder: _Call[Any] | None, others: "list[_Call[Any]]", blocked_s: float) -> bool:
        """True if whoever holds the loop has done so for as long as he may; of a callback nobody knows whose it is."""
        if holder is not None:
            return _now() >= holder.due or blocked_s >= holder.may_block_s
        return blocked_s >= min((call.may_block_s for call in others), default=_UNLIMITED_S)

    def _place(self) -> str:
        """Place of the thread in the user's code."""
        frame = None if self._thread.ident is None else sys._current_frames().get(self._thread.ident)
        return "" if frame is None else place_of(frame)

    def _recovered(self) -> None:
        self.blocked, self._holder = False, None
        with self._any:
            for call in self._calls:
                if call.held_up:
                    call.held_up = False
                    call.due = math.inf if call.limit_s is None else _now() + call.limit_s


@dataclass
class _Stay:
    """Thread of the coroutines of one caller."""

    thread: _LoopThread | None = None


_STAY: ContextVar[_Stay | None] = ContextVar("stay", default=None)
_CALL: ContextVar[_Call[Any] | None] = ContextVar("call", default=None)


async def _ended(call: _Call[T]) -> T:
    while not call.outcome.done():
        left_s = min(call.due, call.last) - _now()
        await asyncio.wait([call.outcome], timeout=min(1.0, max(0.01, left_s)))
        if not call.outcome.done():
            _look_at(call)
    return call.outcome.result()


def _look_at(call: _Call[Any]) -> None:
    """Raises TookTooLong or HeldUp if one that has not ended is to be waited for no longer."""
    now = _now()
    if call.begins_again:
        if call.blocks_at is not None:
            raise TookTooLong(f"it blocked its event loop{call.blocks_at}")
        if call.held_up or call.last <= now < call.due:
            raise HeldUp(_HELD_UP)
    if now >= call.due:
        raise HeldUp(_HELD_UP) if call.held_up else TookTooLong


async def _given_up(call: _Call[T], thread: _LoopThread) -> None:
    """Cancel it if it has not ended, and let it clean up, unless it could not."""
    if not call.outcome.done():
        thread.cancel(call)
        if not thread.blocked:
            await asyncio.wait([call.outcome], timeout=_CANCEL_S)


def _now() -> float:
    return time.monotonic()
