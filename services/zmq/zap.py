"""Answers ZeroMQ's question, asked at each CURVE handshake, whether a client's key may connect (ZAP, RFC 27)."""

import logging
from collections.abc import Callable
from typing import Any

import zmq
from zmq.utils import z85

from services.zmq.keys import AuthorizedKeys
from services.zmq.watch import Context, Drain

logger = logging.getLogger(__name__)

DOMAIN = b"headway"
_ENDPOINT = "inproc://zeromq.zap.01"


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
