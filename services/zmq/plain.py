"""A ZeroMQ socket for servers of other people, whose messages are not those of `protocol`."""

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import zmq
import zmq.asyncio

from services.zmq.sockets import SendTimeout


class PlainDealer:
    """A dealer for a server of other people: frames in and out as they are, no messages of ours; a context manager.

    The server need not be there yet.
    """

    def __init__(self, address: str, *, most_bytes: int = 64 << 20) -> None:
        self._address = address
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, most_bytes)
        self._socket.connect(address)

    async def send(self, *frames: bytes, deadline_s: float = 5.0) -> None:
        """Queue frames as one message. Raises SendTimeout if the queue stays full."""
        try:
            async with asyncio.timeout(deadline_s):
                await self._socket.send_multipart(frames)
        except TimeoutError as error:
            raise SendTimeout(f"{self._address} took no message for {deadline_s:g} s") from error

    async def receive(self) -> Sequence[bytes]:
        """The frames of the next message."""
        frames: list[bytes] = await self._socket.recv_multipart()
        return frames

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._socket.close(linger=0)
        self._context.term()
