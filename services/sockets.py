"""Typed, bounded ZeroMQ sockets: whole messages of `protocol` in and out, nothing else.

One ROUTER talks to many DEALERs. A frame that is no message is counted, told to `on_garbage` and, by a router, answered
with `Refused`; it never reaches the caller and never stops the socket. Every send has a deadline.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import zmq
import zmq.asyncio

from protocol.codec import DEFAULT_LIMITS, Frame, Limits, decode, encode
from protocol.errors import ProtocolError
from protocol.messages import Message, Refused
from services.network import is_loopback

logger = logging.getLogger(__name__)

_RETRY_SEND_S = 0.005
_COMPLAIN_EVERY_S = 10.0

GarbageCallback = Callable[[str, ProtocolError], None]
"""Called with the peer's name and what is wrong with its message."""


class SocketError(Exception):
    """A message could not be sent."""


class PeerGone(SocketError):
    """The peer that the message is for is not connected."""


class SendTimeout(SocketError):
    """The peer takes no messages: its queue stayed full until the deadline."""


@dataclass(frozen=True)
class SocketLimits:
    """Bounds of one socket: messages queued for each peer in each direction, and what one message may hold."""

    queued_messages: int = 256
    message: Limits = DEFAULT_LIMITS


DEFAULT_SOCKET_LIMITS = SocketLimits()


class RouterSocket:
    """The side that many peers connect to. An async context manager, made by `bind`."""

    def __init__(
        self, *, limits: SocketLimits = DEFAULT_SOCKET_LIMITS, on_garbage: GarbageCallback | None = None
    ) -> None:
        self._context, self._socket = _open(zmq.ROUTER, limits)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._limits = limits
        self._garbage = _Garbage(on_garbage)
        self.address = ""

    @classmethod
    def bind(
        cls,
        address: str,
        *,
        limits: SocketLimits = DEFAULT_SOCKET_LIMITS,
        on_garbage: GarbageCallback | None = None,
    ) -> Self:
        """Listen on `tcp://127.0.0.1:<port>`; port `*` lets the system choose, and `address` then tells it.

        Raises ValueError for an address that other machines can reach, OSError for one that is taken.
        """
        _refuse_reachable(address)
        router = cls(limits=limits, on_garbage=on_garbage)
        try:
            router._socket.bind(address)
        except zmq.ZMQError as error:
            router.close()
            raise OSError(error.errno, f"cannot listen on {address}: {error.strerror}") from error
        router.address = str(router._socket.getsockopt_string(zmq.LAST_ENDPOINT))
        return router

    async def send(self, peer: str, message: Message, *, deadline_s: float = 5.0) -> None:
        """Queue a message for a peer. Raises PeerGone, or SendTimeout if its queue stays full.

        Array memory is not copied: it must not change afterwards.
        """
        frames: list[Frame] = [peer.encode("latin-1"), *encode(message)]
        ends_at = time.monotonic() + deadline_s
        while not await self._try_send(peer, frames):
            if time.monotonic() >= ends_at:
                raise SendTimeout(f"{peer} took no message for {deadline_s:g} s")
            await asyncio.sleep(_RETRY_SEND_S)

    async def receive(self) -> tuple[str, Message]:
        """The next message and the name of the peer that sent it. Cancelling may lose a message that just arrived."""
        while True:
            frames = await self._socket.recv_multipart(copy=False)
            peer = bytes(frames[0].buffer).decode("latin-1")
            try:
                return peer, decode([frame.buffer for frame in frames[1:]], limits=self._limits.message)
            except ProtocolError as error:
                self._garbage.report(peer, error)
                await self._refuse(peer, error)

    def close(self) -> None:
        """Drop what is queued and free the port."""
        _close(self._context, self._socket)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def garbage_count(self) -> int:
        """Messages refused so far."""
        return self._garbage.count

    async def _try_send(self, peer: str, frames: Sequence[Frame]) -> bool:
        """False if the peer's queue is full; does not wait, since one full queue must not hold up the others."""
        try:
            await self._socket.send_multipart(frames, flags=zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            raise PeerGone(f"{peer} is not connected") from error
        return True

    async def _refuse(self, peer: str, error: ProtocolError) -> None:
        """Tell the peer, if it listens; one that does not is not waited for."""
        refused = Refused(reason=error.reason, message=str(error)[:4096])
        try:
            await self._try_send(peer, [peer.encode("latin-1"), *encode(refused)])
        except PeerGone:
            logger.debug("%s is gone before it could be told of its refused message", peer)


class DealerSocket:
    """The side that connects to one router, and again after each break. An async context manager."""

    def __init__(
        self, *, limits: SocketLimits = DEFAULT_SOCKET_LIMITS, on_garbage: GarbageCallback | None = None
    ) -> None:
        self._context, self._socket = _open(zmq.DEALER, limits)
        self._limits = limits
        self._garbage = _Garbage(on_garbage)
        self._address = ""

    @classmethod
    def connect(
        cls,
        address: str,
        *,
        identity: str,
        limits: SocketLimits = DEFAULT_SOCKET_LIMITS,
        on_garbage: GarbageCallback | None = None,
    ) -> Self:
        """Connect as `identity`, 1 to 255 characters, in the background: the router need not be there yet.

        Raises ValueError for an address on another machine.
        """
        _refuse_reachable(address)
        dealer = cls(limits=limits, on_garbage=on_garbage)
        dealer._socket.setsockopt(zmq.IDENTITY, identity.encode("latin-1"))
        dealer._socket.connect(address)
        dealer._address = address
        return dealer

    async def send(self, message: Message, *, deadline_s: float = 5.0) -> None:
        """Queue a message for the router, also while it is away. Raises SendTimeout if the queue stays full.

        Array memory is not copied: it must not change afterwards.
        """
        try:
            async with asyncio.timeout(deadline_s):
                await self._socket.send_multipart(encode(message), copy=False)
        except TimeoutError as error:
            raise SendTimeout(f"{self._address} took no message for {deadline_s:g} s") from error

    async def receive(self) -> Message:
        """The next message of the router. Cancelling may lose a message that just arrived."""
        while True:
            frames = await self._socket.recv_multipart(copy=False)
            try:
                return decode([frame.buffer for frame in frames], limits=self._limits.message)
            except ProtocolError as error:
                self._garbage.report(self._address, error)

    def close(self) -> None:
        """Drop what is queued and disconnect."""
        _close(self._context, self._socket)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def garbage_count(self) -> int:
        """Messages refused so far."""
        return self._garbage.count


class _Garbage:
    """Counts refused messages, and logs them, though not so often that a broken peer fills the disk."""

    def __init__(self, callback: GarbageCallback | None) -> None:
        self._callback = callback
        self._quiet_until = 0.0
        self.count = 0

    def report(self, peer: str, error: ProtocolError) -> None:
        self.count += 1
        now = time.monotonic()
        if now >= self._quiet_until:
            self._quiet_until = now + _COMPLAIN_EVERY_S
            logger.warning("refused a message from %r (%d so far): %s", peer, self.count, error)
        if self._callback is not None:
            self._callback(peer, error)


def _open(kind: int, limits: SocketLimits) -> tuple[zmq.asyncio.Context, zmq.asyncio.Socket]:
    """A socket in a context of its own, so that nothing is shared between owners."""
    context = zmq.asyncio.Context()
    socket = context.socket(kind)
    largest = max(limits.message.header_bytes, limits.message.total_bytes)
    for option, value in (
        (zmq.LINGER, 0),
        (zmq.SNDHWM, limits.queued_messages),
        (zmq.RCVHWM, limits.queued_messages),
        (zmq.MAXMSGSIZE, largest),
        (zmq.RECONNECT_IVL, 100),
        (zmq.RECONNECT_IVL_MAX, 2000),
        (zmq.HEARTBEAT_IVL, 2000),
        (zmq.HEARTBEAT_TIMEOUT, 10000),
    ):
        socket.setsockopt(option, value)
    return context, socket


def _close(context: zmq.asyncio.Context, socket: zmq.asyncio.Socket) -> None:
    socket.close(linger=0)
    context.term()


def _refuse_reachable(address: str) -> None:
    scheme, _, rest = address.partition("://")
    host = rest.rpartition(":")[0]
    if scheme == "ipc":
        return
    if scheme != "tcp" or not host:
        raise ValueError(f"{address!r} is no address; expected tcp://127.0.0.1:<port> or ipc://<path>")
    if not is_loopback(host):
        raise ValueError(
            f"{address} can be reached from other machines, and messages between machines are refused until keys are "
            "supported; use tcp://127.0.0.1:<port>"
        )
