"""uvicorn as one of a process's loops: no signal handling of its own, and a clean end when it is cancelled."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator
from types import TracebackType
from typing import Self

import uvicorn
from starlette.types import ASGIApp

from services.acceptor import Acceptor
from services.network import is_loopback

logger = logging.getLogger(__name__)


class AddressInUse(OSError):
    """Another process listens on the address already."""


class Listener:
    """A socket that listens from the start: a taken port is known at once, and early callers wait in the queue."""

    def __init__(self, *, host: str, port: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.socket = socket.socket(family, socket.SOCK_STREAM)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self.socket.bind((host, port))
            self.socket.listen(1024)
        except OSError as error:
            self.socket.close()
            raise AddressInUse(error.errno, f"cannot listen on {host}:{port}: {error.strerror}") from error
        self.socket.setblocking(False)
        self.host = host
        self.port = int(self.socket.getsockname()[1])

    @property
    def url(self) -> str:
        """The address for clients on this machine."""
        host = self.host if is_loopback(self.host) else socket.gethostname()
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.socket.close()


async def serve_http(app: ASGIApp, listener: Listener, *, finish_s: int = 2) -> None:
    """Serve until cancelled; then requests in progress have `finish_s` seconds to end.

    Raises RuntimeError if the server ends by itself.
    """
    server = _Server(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            http="httptools",
            loop="none",
            ws="none",
            lifespan="off",
            timeout_keep_alive=75,
            timeout_graceful_shutdown=finish_s,
        )
    )
    logger.info("serving HTTP at %s", listener.url)
    try:
        await server.serve(sockets=[listener.socket])
    except asyncio.CancelledError:
        if server.started:
            await server.shutdown(sockets=[listener.socket])
        raise
    raise RuntimeError("the HTTP server ended by itself")


class _Server(uvicorn.Server):
    """Accepts in its own way. Signals belong to the process, which cancels this server like its other loops."""

    _acceptors: tuple[Acceptor, ...] = ()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        self._acceptors = tuple(Acceptor(each, self._protocol) for each in sockets or ())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for acceptor in self._acceptors:
            acceptor.close()
        await super().shutdown(sockets=sockets)

    def _protocol(self) -> asyncio.Protocol:
        make = self.config.http_protocol_class
        return make(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)  # type: ignore[call-arg]

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
