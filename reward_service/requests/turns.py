"""Turns of requests that compute on one event loop."""

import asyncio
from collections import deque
from collections.abc import Callable

_TURN_S = 0.01
_MAX_TURN_S = 0.1


class Turns:
    """Turns of requests to compute: one after the other, with a look at the network in between.

    Without that, what arrives in an overload would wait unseen, where nobody can turn it away. Between two looks there
    is work for `_TURN_S`, or for a quarter of the time that the last look took if that is longer: however many are
    turned away, a part of the time is left for work. Not for more: looks take longer the more there is to answer, and
    who is to be turned away waits for both.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[tuple[Callable[[], None], asyncio.Future[None]]] = deque()
        self._last_end = self._loop.time()

    async def take(self, work: Callable[[], None]) -> None:
        """Do the work when it is its turn. Raises what it raises."""
        done: asyncio.Future[None] = self._loop.create_future()
        self._waiting.append((work, done))
        if len(self._waiting) == 1:
            self._loop.call_soon(self._turn)
        await done

    def _turn(self) -> None:
        began = self._loop.time()
        until = began + min(max(_TURN_S, (began - self._last_end) / 4), _MAX_TURN_S)
        while self._waiting:
            work, done = self._waiting[0]
            if not done.cancelled():
                _do(work, done)
            self._waiting.popleft()
            if self._loop.time() >= until:
                break
        self._last_end = self._loop.time()
        if self._waiting:
            self._loop.call_soon(self._turn)


def _do(work: Callable[[], None], done: asyncio.Future[None]) -> None:
    try:
        work()
    except Exception as error:  # noqa: BLE001  it belongs to the request, and others have their turns all the same
        done.set_exception(error)
    else:
        done.set_result(None)
