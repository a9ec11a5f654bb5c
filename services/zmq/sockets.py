"""Typed, bounded ZeroMQ sockets: whole messages of `protocol` in and out, nothing else.

One ROUTER talks to many DEALERs. A frame that is no message is counted, told to `on_garbage` and, by a router, answered
with `PeerRefusal`; it never reaches the caller, never stops the socket. Every send has a deadline; a receive has none,
since silence is no fault: a peer whose connection died silently is noticed by heartbeats of ZeroMQ's own, whereupon a
router forgets it and a dealer connects again.

With keys both sides prove who they are, and all is encrypted (CURVE); whether a client's key may connect is ZeroMQ's
question at each handshake (ZAP, RFC 27), answered here. Without keys, addresses of other machines are refused.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import ClassVar, Self

import zmq
import zmq.asyncio

from protocol.codec import (
    DEFAULT_LIMITS,
    ConnectionRefused,
    Frame,
    MessageLimits,
    MessageTooLarge,
    ProtocolError,
    decode,
    encode,
)
from protocol.messages import Message, PeerRefusal
from services.logs import Occasionally
from services.network import BACKLOG, leaves_this_machine, refuse_without_keys
from services.zmq.keys import ClientKeys, ServerKeys, shown
from services.zmq.watch import ConnectingWatch, InflowWatch, KeyHandler, ListeningWatch

logger = logging.getLogger(__name__)

DOMAIN = b"headway"
_RETRY_SEND_S = 0.005
_COPIED_BYTES = 1 << 14
"""A smaller message is copied at sending: to hand its memory over and be told when it is free costs more."""
_SENT_IN_A_ROW = 32
_COMPLAIN_EVERY_S = 10.0
_CONNECT_TIMEOUT_MS = 10_000
_STRANGER = "a stranger"

GarbageCallback = Callable[[str, ProtocolError], None]
"""Called with the peer's name, or the address of one that never got as far as a name, and what is wrong."""


class SocketError(Exception):
    """A message could not be sent."""


class PeerGone(SocketError):
    """The peer that the message is for is not connected."""


class SendTimeout(SocketError):
    """The peer takes no messages: its queue stayed full until the deadline."""


@dataclass(frozen=True)
class SocketLimits:
    """Bounds of one socket: messages queued for each peer in each direction, what one message may hold, and how often
    a peer is asked for a sign of life and how long it may take to give one, in seconds.
    """

    queued_messages: int = 256
    message: MessageLimits = DEFAULT_LIMITS
    heartbeat_every_s: float = 2.0
    heartbeat_timeout_s: float = 10.0


DEFAULT_SOCKET_LIMITS = SocketLimits()


@dataclass(frozen=True)
class ReceivedMessage:
    """A message, the name of the peer that sent it, and the frames that it came in."""

    peer: str
    message: Message
    frames: Sequence[Frame]


class _MessageSocket:
    """Base of both sides: an async context manager around one socket, in a context of its own."""

    _kind: ClassVar[int]

    def __init__(
        self, *, limits: SocketLimits = DEFAULT_SOCKET_LIMITS, on_garbage: GarbageCallback | None = None
    ) -> None:
        self._context, self._socket = _open(self._kind, limits)
        self._limits = limits
        self._garbage = _Garbage(on_garbage)

    @property
    def garbage_count(self) -> int:
        """Messages and connections refused so far."""
        return self._garbage.count

    def close(self) -> None:
        """Drop what is queued, and disconnect."""
        _close(self._context, self._socket)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class RouterSocket(_MessageSocket):
    """The side that many peers connect to, made by `bind`."""

    _kind = zmq.ROUTER

    def __init__(
        self, *, limits: SocketLimits = DEFAULT_SOCKET_LIMITS, on_garbage: GarbageCallback | None = None
    ) -> None:
        super().__init__(limits=limits, on_garbage=on_garbage)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._key_handler: KeyHandler | None = None
        self._inflow = InflowWatch(
            self._socket, limit_bytes=limits.message.header_bytes + limits.message.total_bytes, cut=self._refuse_flood
        )
        self._watch = ListeningWatch(
            self._context,
            self._socket,
            failed=lambda what: self._garbage.report(_STRANGER, ConnectionRefused(what)),
            inflow=self._inflow,
        )
        self.address = ""

    @classmethod
    def bind(
        cls,
        address: str,
        *,
        keys: ServerKeys | None = None,
        insecure: bool = False,
        limits: SocketLimits = DEFAULT_SOCKET_LIMITS,
        on_garbage: GarbageCallback | None = None,
    ) -> Self:
        """Listen on `tcp://127.0.0.1:<port>`; port `*` lets the system choose, and `address` then tells it.

        With `keys`, only clients with an authorized key get through. Without them, raises ValueError for an address
        that other machines can reach, unless `insecure` allows it. Raises OSError for an address that is taken.
        """
        _check_keys(address, has_keys=keys is not None, insecure=insecure)
        router = cls(limits=limits, on_garbage=on_garbage)
        try:
            router._use_keys(keys)
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
        frames = encode(message)
        ends_at = time.monotonic() + deadline_s
        while not await self._try_send(peer, frames):
            if time.monotonic() >= ends_at:
                raise SendTimeout(f"{peer} took no message for {deadline_s:g} s")
            await asyncio.sleep(_RETRY_SEND_S)

    async def send_to_all(self, peers: Iterable[str], message: Message, *, deadline_s: float = 5.0) -> list[str]:
        """As `send`, to all who take it: encoded once, and with one deadline for those whose queues are full. Returns
        those whose queues still are.
        """
        frames, left, ends_at = encode(message), list(peers), time.monotonic() + deadline_s
        full: list[str] = []
        while left:
            full = []
            for number, peer in enumerate(left, start=1):
                with contextlib.suppress(PeerGone):
                    if not await self._try_send(peer, frames):
                        full.append(peer)
                if number % _SENT_IN_A_ROW == 0:
                    await asyncio.sleep(0)
            left = full if time.monotonic() < ends_at else []
            await asyncio.sleep(_RETRY_SEND_S if left else 0)
        return full

    async def receive(self) -> tuple[str, Message]:
        """The next message and the name of the peer that sent it. Cancelling may lose a message that just arrived."""
        received = await self.receive_whole()
        return received.peer, received.message

    async def receive_whole(self) -> ReceivedMessage:
        """As `receive`, with the frames that the message came in."""
        while True:
            received = await self._read(await self._socket.recv_multipart(copy=False))
            if received is not None:
                return received

    async def receive_now(self) -> ReceivedMessage | None:
        """As `receive_whole`, of a message that has arrived already; None if there is none."""
        while True:
            try:
                parts = await self._socket.recv_multipart(flags=zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return None
            received = await self._read(parts)
            if received is not None:
                return received

    async def _read(self, parts: Sequence[zmq.Frame]) -> ReceivedMessage | None:
        """None for what is refused."""
        self._inflow.delivered(_source_of(parts[0]))
        peer = bytes(parts[0].buffer).decode("latin-1")
        frames = [part.buffer for part in parts[1:]]
        try:
            return ReceivedMessage(peer=peer, message=decode(frames, limits=self._limits.message), frames=frames)
        except ProtocolError as error:
            self._garbage.report(peer, error)
            await self._refuse(peer, error)
        return None

    def close(self) -> None:
        """Drop what is queued and free the port."""
        if self._key_handler is not None:
            self._key_handler.close()
        self._inflow.close()
        self._watch.close()
        super().close()

    def _use_keys(self, keys: ServerKeys | None) -> None:
        if keys is None:
            return
        self._key_handler = KeyHandler(self._context, authorized=keys.authorized, refused=self._refuse_key)
        self._socket.setsockopt(zmq.CURVE_SERVER, 1)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, keys.own.secret.encode("ascii"))
        self._socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
        self._socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without somebody to ask about keys, nobody gets in

    def _refuse_key(self, address: str, key: str) -> None:
        self._garbage.report(address, ConnectionRefused(f"its key {shown(key)} is not among the authorized keys"))

    def _refuse_flood(self, address: str, size: int) -> None:
        text = f"it has sent {size >> 20} MiB of a message that has not ended, and is cut off"
        self._garbage.report(address, MessageTooLarge(text))

    async def _try_send(self, peer: str, frames: Sequence[Frame]) -> bool:
        """False if the peer's queue is full; does not wait, since one full queue must not hold up the others."""
        try:
            small = sum(map(len, frames)) < _COPIED_BYTES
            await self._socket.send_multipart([peer.encode("latin-1"), *frames], flags=zmq.NOBLOCK, copy=small)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            raise PeerGone(f"{peer} is not connected") from error
        return True

    async def _refuse(self, peer: str, error: ProtocolError) -> None:
        """Tell the peer, if it listens; one that does not is not waited for."""
        refused = PeerRefusal(reason=error.reason, message=str(error)[:4096])
        try:
            await self._try_send(peer, encode(refused))
        except PeerGone:
            logger.debug("%s is gone before it could be told of its refused message", peer)


class DealerSocket(_MessageSocket):
    """The side that connects to one router, and again after each break; made by `connect`."""

    _kind = zmq.DEALER

    def __init__(
        self, *, limits: SocketLimits = DEFAULT_SOCKET_LIMITS, on_garbage: GarbageCallback | None = None
    ) -> None:
        super().__init__(limits=limits, on_garbage=on_garbage)
        self._watch: ConnectingWatch | None = None
        self._address = ""

    @classmethod
    def connect(
        cls,
        address: str,
        *,
        identity: str,
        keys: ClientKeys | None = None,
        insecure: bool = False,
        limits: SocketLimits = DEFAULT_SOCKET_LIMITS,
        on_garbage: GarbageCallback | None = None,
    ) -> Self:
        """Connect as `identity`, 1 to 255 characters, in the background: the router need not be there yet.

        With `keys`, only to a router whose public key is the one in them. Without them, raises ValueError for an
        address on another machine, unless `insecure` allows it.
        """
        _check_keys(address, has_keys=keys is not None, insecure=insecure)
        dealer = cls(limits=limits, on_garbage=on_garbage)
        socket = dealer._socket
        socket.setsockopt(zmq.IDENTITY, identity.encode("latin-1"))
        if keys is not None:
            socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.own.public.encode("ascii"))
            socket.setsockopt(zmq.CURVE_SECRETKEY, keys.own.secret.encode("ascii"))
            socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server.encode("ascii"))
        dealer._watch = ConnectingWatch(dealer._context, socket, address=address, keys=keys)
        socket.connect(address)
        dealer._address = address
        return dealer

    @property
    def trouble(self) -> str | None:
        """Reason for the last handshake's failure, in words for a user; None if it succeeded."""
        return None if self._watch is None else self._watch.trouble

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
        if self._watch is not None:
            self._watch.close()
        super().close()


class _Garbage:
    """Counts what is refused, and logs it, though not so often that a broken peer fills the disk."""

    def __init__(self, callback: GarbageCallback | None) -> None:
        self._callback = callback
        self._may_complain = Occasionally(every_s=_COMPLAIN_EVERY_S)
        self.count = 0

    def report(self, peer: str, error: ProtocolError) -> None:
        self.count += 1
        if self._may_complain():
            what = "connection" if isinstance(error, ConnectionRefused) else "message"
            logger.warning("refused a %s from %r (%d refusals so far): %s", what, peer, self.count, error)
        if self._callback is not None:
            self._callback(peer, error)


def _source_of(part: zmq.Frame) -> int:
    """The descriptor of the connection that a frame came over; -1 if it is not known."""
    try:
        return int(part.get(zmq.SRCFD))
    except (zmq.ZMQError, ValueError, TypeError):
        return -1


def _open(kind: int, limits: SocketLimits) -> tuple[zmq.asyncio.Context, zmq.asyncio.Socket]:
    """A socket in a context of its own, so that nothing is shared between owners."""
    context = zmq.asyncio.Context()
    socket = context.socket(kind)
    largest = max(limits.message.header_bytes, limits.message.total_bytes)
    for option, value in (
        (zmq.LINGER, 0),
        (zmq.BACKLOG, BACKLOG),
        (zmq.SNDHWM, limits.queued_messages),
        (zmq.RCVHWM, limits.queued_messages),
        (zmq.MAXMSGSIZE, largest),
        (zmq.RECONNECT_IVL, 100),
        (zmq.RECONNECT_IVL_MAX, 2000),
        (zmq.HEARTBEAT_IVL, round(1000 * limits.heartbeat_every_s)),
        (zmq.HEARTBEAT_TIMEOUT, round(1000 * limits.heartbeat_timeout_s)),
        (zmq.CONNECT_TIMEOUT, _CONNECT_TIMEOUT_MS),
        (zmq.HANDSHAKE_IVL, _CONNECT_TIMEOUT_MS),
    ):
        socket.setsockopt(option, value)
    return context, socket


def _close(context: zmq.asyncio.Context, socket: zmq.asyncio.Socket) -> None:
    socket.close(linger=0)
    context.term()


def _check_keys(address: str, *, has_keys: bool, insecure: bool) -> None:
    """Warns of what is allowed and should not be. Raises ValueError for an address that needs keys."""
    if has_keys or not leaves_this_machine(address):
        return
    refuse_without_keys(address, insecure=insecure)
    logger.warning("%s is open to other machines, without keys: anybody who reaches it can take part", address)
