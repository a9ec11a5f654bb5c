"""Accepts all waiting connections at once, which uvloop does not: its libuv accepts one in each turn of the loop.

In an overload a turn lasts tens of milliseconds. New clients would then wait for seconds before anybody could see them,
answer them, or turn them away (libuv's pull request 3696 has the reasons for one at a time).
"""

import asyncio
import errno
import logging
import socket
from collections.abc import Callable

logger = logging.getLogger(__name__)

_OUT_OF_RESOURCES = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}

_PAUSE_S = 1.0

_MOST_IN_A_TURN = 1024


class Acceptor:
    """Gives a protocol of `make` to each connection at a listening, non-blocking socket.

    Begins at once, in the running loop.
    """

    def __init__(self, listening: socket.socket, make: Callable[[], asyncio.Protocol]) -> None:
        self._loop = asyncio.get_running_loop()
        self._listening = listening
        self._make = make
        self._starting: set[asyncio.Task[None]] = set()
        self._resuming: asyncio.TimerHandle | None = None
        self._resume()

    def close(self) -> None:
        """Accept no more. The socket stays open."""
        if self._resuming is not None:
            self._resuming.cancel()
        self._loop.remove_reader(self._listening)

    def _resume(self) -> None:
        self._resuming = None
        self._loop.add_reader(self._listening, self._accept)

    def _accept(self) -> None:
        for _ in range(_MOST_IN_A_TURN):
            try:
                connection, _ = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _OUT_OF_RESOURCES:
                    raise
                # The socket stays readable: without a pause the loop would do nothing else.
                logger.warning("no connection can be accepted for %g s: %s", _PAUSE_S, error)
                self._loop.remove_reader(self._listening)
                self._resuming = self._loop.call_later(_PAUSE_S, self._resume)
                return
            connection.setblocking(False)
            starting = self._loop.create_task(self._start(connection))
            self._starting.add(starting)
            starting.add_done_callback(self._starting.discard)

    async def _start(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._make, connection)
        except OSError as error:
            logger.debug("a connection broke before it began: %s", error)
            connection.close()
