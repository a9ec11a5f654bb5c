"""An event loop in a thread beside the process's, for functions of users: what they block is other agents alone."""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from typing import TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")

_CANCEL_S = 5.0


class FunctionLoop:
    """Started with the first call, ended with the process; one that is stuck is left to itself, and a new one made."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(self, function: Callable[[], Awaitable[T]]) -> T:
        """What the function's coroutine returns. Raises what it raises; cancelled with the caller."""
        loop = self._loop = self._loop or _started()
        ended = threading.Event()

        async def whole() -> T:
            try:
                return await function()
            finally:
                ended.set()

        future = asyncio.run_coroutine_threadsafe(whole(), loop)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            future.cancel()
            if not await asyncio.to_thread(ended.wait, _CANCEL_S) and self._loop is loop:
                logger.warning("an agent's function blocks its thread, which is left to itself: a new one goes on")
                self._loop = None
            raise


def _started() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="agents", daemon=True).start()
    return loop
