"""The trainer's thread, as the event loop sees it: it takes work, and can be interrupted."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from typing import Self, TypeVar

logger = logging.getLogger(__name__)

_STOP_S = 5.0
"""Longest that a stop waits for the thread to reach a point at which it notices."""

T = TypeVar("T")


class TrainerThread:
    """A thread for all that touches torch's models, so that thread-bound settings hold; an async context manager.

    It is a daemon: a thread in the middle of a long kernel does not keep a stopped process alive.
    """

    def __init__(self) -> None:
        self._at, self._kept = "a step", ""
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._interrupts: list[Callable[[], None]] = []
        self._thread = threading.Thread(target=self._serve, name="trainer", daemon=True)

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def start(self) -> None:
        """Takes work from here on."""
        self._thread.start()

    async def close(self) -> None:
        """Interrupts the work under way, and returns when it has ended, or after 5 s without it."""
        self._stopping.set()
        for interrupt in self._interrupts:
            interrupt()
        self._work.put(None)
        await asyncio.to_thread(self._thread.join, _STOP_S)
        if self._thread.is_alive():
            held = f"; the journal holds {self._kept}" if self._kept else ""
            logger.warning("the trainer is in the middle of %s and is cut off%s", self._at, held)

    def stopping(self) -> bool:
        """True if the thread should leave what it does; asked from the thread."""
        return self._stopping.is_set()

    def on_stop(self, interrupt: Callable[[], None]) -> None:
        """Called in the event loop at a stop, to wake the thread from a wait."""
        self._interrupts.append(interrupt)

    async def run(self, work: Callable[[], T], *, named: str = "a step", kept: str = "") -> T:
        """Runs `work` in the thread and returns its result, or raises what it raises. A stop that cuts it off says its
        name, and what the journal still holds of it. Raises RuntimeError after `close`.
        """
        if self._stopping.is_set():
            raise RuntimeError(f"the trainer's thread was closed, and does {named} no more: begin it before the stop")
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def call() -> None:
            self._at, self._kept = named, kept
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
    loop: asyncio.AbstractEventLoop, done: asyncio.Future[T], result: T | None, error: BaseException | None
) -> None:
    try:
        loop.call_soon_threadsafe(_settle, done, result, error)
    except RuntimeError:
        logger.debug("the trainer ended after the event loop: nobody waits for it")


def _settle(done: asyncio.Future[T], result: T | None, error: BaseException | None) -> None:
    if done.done():  # the awaiting task was cancelled
        return
    if error is not None:
        done.set_exception(error if isinstance(error, Exception) else RuntimeError(f"the trainer ended: {error!r}"))
    else:
        done.set_result(result)  # type: ignore[arg-type]
