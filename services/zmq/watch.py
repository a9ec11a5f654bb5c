"""Watches over connections below the messages: whose key may connect, handshakes that fail, and connections that
ZeroMQ gives up.

A socket's monitor is another socket, in the same context; it is read in the event loop, whenever there is something.
"""

import asyncio
import contextlib
import logging
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from services.logs import Occasionally
from services.zmq.keys import AuthorizedKeys, ClientKeys, shown

logger = logging.getLogger(__name__)

_MECHANISM_MISMATCH = zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH
_NEW_ATTEMPTS = (zmq.EVENT_CONNECTED, zmq.EVENT_CONNECT_DELAYED, zmq.EVENT_CONNECT_RETRIED)
_FAILED_HANDSHAKES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
)
_MONITOR = "inproc://monitor"
_ENDPOINT = "inproc://zeromq.zap.01"
_COMPLAIN_EVERY_S = 10.0
_LOOK_EVERY_S = 0.1
_TCP_INFO_BYTES, _BYTES_RECEIVED_AT = 256, 128
"""Size and offset of tcpi_bytes_received in Linux's `struct tcp_info` (since 4.1)."""
_AGAIN_AFTER_S = 2.0
"""A connection that ZeroMQ has given up is made again after so long."""

AnySocket = zmq.Socket[Any]
Context = zmq.Context[Any]


class Drain:
    """Hands each message of a socket, which it owns, to `handle`, in the event loop that it is made in."""

    def __init__(self, socket: AnySocket, handle: Callable[[list[bytes]], None]) -> None:
        self._socket = socket
        self._handle = handle
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(socket.FD, self._drain)
        self._loop.call_soon(self._drain)  # the descriptor tells of changes only, and may have changed before

    def close(self) -> None:
        """Close the socket."""
        self._loop.remove_reader(self._socket.FD)
        self._socket.close(linger=0)

    def _drain(self) -> None:
        while not self._socket.closed:
            try:
                frames = self._socket.recv_multipart(flags=zmq.NOBLOCK)
            except zmq.Again:
                return
            self._handle(frames)


class KeyHandler:
    """Lets the authorized keys of one context's sockets in; tells `refused` of others, with address and key.

    Its questions come only from inside the context, so their form is not checked.
    """

    def __init__(self, context: Context, *, authorized: AuthorizedKeys, refused: Callable[[str, str], None]) -> None:
        self._authorized = authorized
        self._refused = refused
        self._socket: zmq.Socket[Any] = context.socket(zmq.REP, socket_class=zmq.Socket)
        self._socket.bind(_ENDPOINT)
        self._drain = Drain(self._socket, self._answer)

    def close(self) -> None:
        """Answer no longer: nobody gets in then."""
        self._drain.close()

    def _answer(self, question: list[bytes]) -> None:
        version, request, _, address, _, mechanism, *credentials = question
        key = z85.encode(credentials[0]).decode("ascii") if mechanism == b"CURVE" else ""
        name = self._authorized.name_of(key)
        if name is None:
            status, text = b"400", b"this key is not authorized"
            self._refused(address.decode("ascii"), key)
        else:
            status, text = b"200", b""
            logger.debug("the key of %s connects from %s", name, address.decode("ascii"))
        self._socket.send_multipart([version, request, status, text, (name or "").encode()[:255], b""])


class ListeningWatch:
    """Tells `failed` of each connection that breaks the rules before its first message, and which rule; and `inflow` of
    each connection that comes and goes.
    """

    def __init__(
        self, context: Context, socket: AnySocket, *, failed: Callable[[str], None], inflow: "InflowWatch"
    ) -> None:
        self._failed = failed
        self._inflow = inflow
        events = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
        self._drain = _monitored(context, socket, events, self._on_event)

    def close(self) -> None:
        """Watch no longer; to be called before the socket is closed."""
        self._drain.close()

    def _on_event(self, event: int, value: int) -> None:
        if event == zmq.EVENT_ACCEPTED:
            self._inflow.accepted(value)
        elif event == zmq.EVENT_DISCONNECTED:
            self._inflow.gone(value)
        elif value == _MECHANISM_MISMATCH:
            self._failed("one side speaks CURVE and the other has no keys")
        elif value == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:
            self._failed("it has another public key for this process, or its messages were changed on the way")
        else:
            self._failed(f"it does not speak ZeroMQ's protocol (error {value:#x})")


@dataclass
class _Inflow:
    """Bytes that a connection had sent when its newest message was handed out; and how many messages all others had
    sent when it was first found to have sent too much since.
    """

    at_last_message: int = 0
    over_since: int | None = None


class InflowWatch:
    """Cuts connections that send more of one message than a message may hold.

    ZeroMQ keeps the frames of a message until the last one has come; it bounds each of them, but neither their number
    nor their sum. The kernel counts what a connection has sent: what came since its newest message, while none waits to
    be read, is part of one that has not ended. `cut` is told of the address and of the bytes. Linux only.
    """

    def __init__(self, socket: AnySocket, *, limit_bytes: int, cut: Callable[[str, int], None]) -> None:
        self._socket = socket
        self._limit_bytes = limit_bytes
        self._cut = cut
        self._inflows: dict[int, _Inflow] = {}
        self._messages = 0
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def close(self) -> None:
        """Watch no longer; to be called before the socket is closed."""
        if self._timer is not None:
            self._timer.cancel()

    def accepted(self, descriptor: int) -> None:
        """A connection has come."""
        self._inflows[descriptor] = _Inflow()
        if self._timer is None and sys.platform == "linux":
            self._timer = self._loop.call_later(_LOOK_EVERY_S, self._look)

    def gone(self, descriptor: int) -> None:
        """A connection has ended."""
        self._inflows.pop(descriptor, None)

    def delivered(self, descriptor: int) -> None:
        """A whole message of this connection was read."""
        self._messages += 1
        inflow = self._inflows.get(descriptor)
        sent = None if inflow is None else _bytes_received(descriptor)
        if inflow is not None and sent is not None:
            inflow.at_last_message, inflow.over_since = sent, None

    def _look(self) -> None:
        self._timer = None
        # Whoever asks for this takes the sign that a message has come, which is given once: `get` hands it on to a
        # receiver that waits, and `getsockopt`, which is another method here, leaves it waiting for ever.
        nothing_waits = not int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN
        for descriptor, inflow in list(self._inflows.items()):
            sent = _bytes_received(descriptor)
            if sent is None:
                self.gone(descriptor)
            elif sent - inflow.at_last_message > self._limit_bytes:
                self._judge(descriptor, inflow, sent, nothing_waits=nothing_waits)
        if self._inflows:
            self._timer = self._loop.call_later(max(_LOOK_EVERY_S, len(self._inflows) / 5000), self._look)

    def _judge(self, descriptor: int, inflow: _Inflow, sent: int, *, nothing_waits: bool) -> None:
        """Connections are read in turn: one that had its turn, and gave nothing, has no whole message either."""
        if inflow.over_since is None:
            inflow.over_since = self._messages
        had_its_turn = self._messages - inflow.over_since > 2 * len(self._inflows)
        if nothing_waits or had_its_turn:
            address = _shut(descriptor)
            self.gone(descriptor)
            self._cut(address, sent - inflow.at_last_message)


def _bytes_received(descriptor: int) -> int | None:
    """Of a TCP connection of ZeroMQ's; None of any other descriptor."""
    try:
        borrowed = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, fileno=descriptor)
    except OSError:  # closed meanwhile, or something else by now: ZeroMQ's word of it comes later
        return None
    try:
        told = borrowed.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    except OSError:
        return None
    finally:
        borrowed.detach()
    if len(told) < _BYTES_RECEIVED_AT + 8:
        return None
    return int.from_bytes(told[_BYTES_RECEIVED_AT : _BYTES_RECEIVED_AT + 8], sys.byteorder)


def _shut(descriptor: int) -> str:
    """Ends a connection, whose descriptor stays ZeroMQ's to close. Returns the address at its other end."""
    with contextlib.suppress(OSError):
        borrowed = socket.socket(fileno=descriptor)
        try:
            address = borrowed.getpeername()
            borrowed.shutdown(socket.SHUT_RDWR)
            return str(address[0])
        finally:
            borrowed.detach()
    return "a stranger"


class ConnectingWatch:
    """Says in the log why a connection does not come about, and makes it again where ZeroMQ has given it up.

    ZeroMQ never comes back to a peer that refused a key, wants keys, or sent what does not fit its protocol. But keys
    are added, peers are started anew, and bytes are damaged.
    """

    def __init__(self, context: Context, socket: AnySocket, *, address: str, keys: ClientKeys | None) -> None:
        self._socket = socket
        self._address = address
        self._keys = keys
        self._may_complain = Occasionally(every_s=_COMPLAIN_EVERY_S)
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self.trouble: str | None = None
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        for kind in (*_FAILED_HANDSHAKES, *_NEW_ATTEMPTS):
            events |= kind
        self._drain = _monitored(context, socket, events, self._on_event)

    def close(self) -> None:
        """Watch no longer; to be called before the socket is closed."""
        self._cancel_timer()
        self._drain.close()

    def _on_event(self, event: int, value: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._on_success()
        elif event in _FAILED_HANDSHAKES:
            self._on_failure(self._explained(event, value))
        elif event in _NEW_ATTEMPTS:
            self._cancel_timer()
        elif event == zmq.EVENT_DISCONNECTED and self._timer is None:
            self._timer = self._loop.call_later(_AGAIN_AFTER_S, self._connect_again)

    def _on_success(self) -> None:
        if self.trouble is not None:
            logger.info("connected to the learner at %s after all", self._address)
        self.trouble = None
        self._may_complain = Occasionally(every_s=_COMPLAIN_EVERY_S)

    def _on_failure(self, trouble: str) -> None:
        self.trouble = trouble
        if self._may_complain():
            logger.warning("%s", trouble)

    def _explained(self, event: int, value: int) -> str:
        learner, keys = f"the learner at {self._address}", self._keys
        if keys is None:
            return (
                f"{learner} breaks off the handshake: it speaks CURVE, it seems, and this process has no keys; make "
                "them with `headway keys` and set secret_key_file and learner_key_file"
            )
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return (
                f"{learner} refuses this process's key {shown(keys.own.public)}: add that public key to the learner's "
                "leases.authorized_keys"
            )
        if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value == _MECHANISM_MISMATCH:
            return f"{learner} speaks without keys, and this process only with them: give both sides keys, or neither"
        return (
            f"{learner} breaks off the handshake: {shown(keys.server)}, which learner_key_file holds, is not its "
            "public key, or it has no keys"
        )

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _connect_again(self) -> None:
        self._timer = None
        with contextlib.suppress(zmq.ZMQError):  # there may be nothing left of the old connection
            self._socket.disconnect(self._address)
        self._socket.connect(self._address)


def _monitored(context: Context, socket: AnySocket, events: int, handle: Callable[[int, int], None]) -> Drain:
    socket.monitor(_MONITOR, events)
    monitor = context.socket(zmq.PAIR, socket_class=zmq.Socket)
    monitor.connect(_MONITOR)

    def parsed(frames: list[bytes]) -> None:
        message = parse_monitor_message(frames)
        handle(int(message["event"]), int(message["value"]))

    return Drain(monitor, parsed)
