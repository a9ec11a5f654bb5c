"""What ZeroMQ tells about connections below the messages: handshakes that fail, and connections that it gives up.

A socket's monitor is another socket, in the same context; it is read in the event loop, whenever there is something.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from services.keys import ClientKeys, shown
from services.logs import Occasionally

logger = logging.getLogger(__name__)

_MECHANISM_MISMATCH = zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH
_NEW_ATTEMPTS = (zmq.EVENT_CONNECTED, zmq.EVENT_CONNECT_DELAYED, zmq.EVENT_CONNECT_RETRIED)
_FAILED_HANDSHAKES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
)
_MONITOR = "inproc://monitor"
_COMPLAIN_EVERY_S = 10.0
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


class ListeningWatch:
    """Tells `failed` of each connection that breaks the rules before its first message, and which rule."""

    def __init__(self, context: Context, socket: AnySocket, *, failed: Callable[[str], None]) -> None:
        self._failed = failed
        self._drain = _monitored(context, socket, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, self._on_event)

    def close(self) -> None:
        """Watch no longer; to be called before the socket is closed."""
        self._drain.close()

    def _on_event(self, event: int, value: int) -> None:
        if value == _MECHANISM_MISMATCH:
            self._failed("one side speaks CURVE and the other has no keys")
        elif value == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:
            self._failed("it has another public key for this process, or its messages were changed on the way")
        else:
            self._failed(f"it does not speak ZeroMQ's protocol (error {value:#x})")


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
