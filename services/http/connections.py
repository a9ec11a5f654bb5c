"""The HTTP connection of a server: the head of a request ends, and one peer holds only so many that have none yet.

httptools keeps all that it is sent until a head is complete, and nobody has shown a token before that.
"""

import asyncio
import logging
import time
from collections import defaultdict
from typing import ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

logger = logging.getLogger(__name__)

HEAD_BYTES = 64 << 10
HEAD_S = 10.0
MAX_HEADS_OF_A_PEER = 1024
CROWDED_S = 1.0
"""Time for the head on a connection of a peer over that number, in seconds: a burst of clients needs less."""


class LimitedConnection(HttpToolsProtocol):
    """Ends a connection whose request has a head over a limit, or one that is not there in time."""

    _waiting: ClassVar[dict[str, dict["LimitedConnection", float]]] = defaultdict(dict)
    """Connections of each peer whose head is not complete, the oldest first, with the time since when."""

    _in_head = True
    _head_bytes = 0
    _head_timer: asyncio.TimerHandle | None = None
    _peer = ""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._peer = self.client[0] if self.client else ""
        self._begin_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        was_in_head = self._in_head
        super().data_received(data)
        if was_in_head and self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES and not self.transport.is_closing():
                self.send_400_response(f"The head of a request has more than {HEAD_BYTES} bytes; send fewer.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._begin_head()

    def on_headers_complete(self) -> None:
        self._end_head()
        if sum(len(name) + len(value) for name, value in self.headers) + len(self.url) > HEAD_BYTES:
            raise ValueError("the head of a request is too long")
        super().on_headers_complete()

    def _begin_head(self) -> None:
        self._in_head, self._head_bytes = True, 0
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_S, self._give_up, HEAD_S)
            waiting = self._waiting[self._peer]
            waiting[self] = time.monotonic()
            if len(waiting) > MAX_HEADS_OF_A_PEER:
                oldest = next(iter(waiting))
                if waiting[oldest] < time.monotonic() - CROWDED_S:
                    oldest._give_up(CROWDED_S)

    def _end_head(self) -> None:
        self._in_head = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        waiting = self._waiting[self._peer]
        waiting.pop(self, None)
        if not waiting:
            del self._waiting[self._peer]

    def _give_up(self, limit_s: float) -> None:
        logger.debug("a connection from %s sent no complete request header in %g s", self.client, limit_s)
        self._end_head()
        self.transport.close()
