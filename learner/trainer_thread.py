"""The trainer's thread, as the event loop sees it: work goes in, results are awaited, a stop interrupts it."""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from typing import Self, TypeVar

log = logging.getLogger(__name__)
T = TypeVar("T")

_STOP_S = 5.0
"""How long a stop waits for the thread to reach a point at which it notices."""


class TrainerThread:
    """One thread for all that touches torch's models, so that thread-bound settings hold; an async context manager.

    It is a daemon: a thread in the middle of a long kernel does not keep a stopped process alive.
    """

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._interrupts: list[Callable[[], None]] = []
        self._thread = threading.Thread(target=self._serve, name="trainer", daemon=True)

    async def __aenter__(self) -> Self:
        self._thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stopping.set()
        for interrupt in self._interrupts:
            interrupt()
        self._work.put(None)
        await asyncio.to_thread(self._thread.join, _STOP_S)
        if self._thread.is_alive():
            log.warning("the trainer is in the middle of a step and is cut off; the journal holds its batch")

    def stopping(self) -> bool:
        """Whether the thread should leave what it does; asked from the thread."""
        return self._stopping.is_set()

    def on_stop(self, interrupt: Callable[[], None]) -> None:
        """Called in the event loop at a stop, to wake the thread from a wait."""
        self._interrupts.append(interrupt)

    async def run(self, work: Callable[[], T]) -> T:
        """Runs `work` in the thread and returns its result, or raises what it raises."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def call() -> None:
            try:
                result = work()
            except BaseException as error:  # noqa: BLE001 - it crosses to the awaiting task, which raises it
                _hand_over(loop, done, None, error)
            else:
                _hand_over(loop, done, result, None)

        self._work.put(call)
        return await done

    def _serve(self) -> None:
        while (call := self._work.get()) is not None:
            call()


def _hand_over(
    loop: asyncio.AbstractEventLoop, done: "asyncio.Future[T]", result: T | None, error: BaseException | None
) -> None:
    try:
        loop.call_soon_threadsafe(_settle, done, result, error)
    except RuntimeError:
        log.debug("the trainer ended after the event loop: nobody waits for it")


def _settle(done: "asyncio.Future[T]", result: T | None, error: BaseException | None) -> None:
    if done.done():  # the awaiting task was cancelled
        return
    if error is not None:
        done.set_exception(error if isinstance(error, Exception) else RuntimeError(f"the trainer ended: {error!r}"))
    else:
        done.set_result(result)  # type: ignore[arg-type]
