"""uvicorn as one of a process's loops: no signal handling of its own, a clean end when cancelled, and an acceptor that
takes all waiting connections at once.

In an overload a turn lasts tens of milliseconds. New clients would then wait for seconds before anybody could see them,
answer them, or turn them away (libuv's pull request 3696 has the reasons for one at a time).
"""

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self

import uvicorn
from starlette.types import ASGIApp

from services.http.connections import LimitedConnection
from services.http.tls import TlsContext, TlsFiles, server_tls
from services.logs import Occasionally
from services.network import BACKLOG, is_loopback, is_wildcard
from services.tracing import traced_app

logger = logging.getLogger(__name__)

_OUT_OF_RESOURCES = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}

_PAUSE_S = 1.0

_MAX_IN_A_TURN = 1024
_LOOK_S = 0.005

_HANDSHAKE_S = 10.0
_COMPLAIN_EVERY_S = 10.0


class Acceptor:
    """Gives a protocol of `make` to each connection at a listening, non-blocking socket, after the handshake of `tls`.

    Begins at once, in the running loop.
    """

    def __init__(
        self, listening: socket.socket, make: Callable[[], asyncio.Protocol], *, tls: TlsContext | None = None
    ) -> None:
        self._tls = tls
        self._may_complain = Occasionally(every_s=_COMPLAIN_EVERY_S)
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
        for _ in range(_MAX_IN_A_TURN):
            try:
                connection, caller = self._listening.accept()
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
            starting = self._loop.create_task(self._start(connection, caller))
            self._starting.add(starting)
            starting.add_done_callback(self._starting.discard)

    async def _start(self, connection: socket.socket, caller: tuple[object, ...]) -> None:
        try:
            if self._tls is None:
                await self._loop.connect_accepted_socket(self._make, connection)
            else:
                await self._loop.connect_accepted_socket(
                    self._make, connection, ssl=self._tls.current(), ssl_handshake_timeout=_HANDSHAKE_S
                )
        except OSError as error:
            level = logging.WARNING if isinstance(error, ssl.SSLError) and self._may_complain() else logging.DEBUG
            logger.log(
                level, "a connection from %s broke before its first request: %s", caller[0] if caller else "?", error
            )
            connection.close()


class AddressInUse(OSError):
    """Another process listens on the address already."""


class Listener:
    """A socket that listens from the start: a taken port is known at once, and early callers wait in the queue.

    With a certificate in `tls` what is served there is HTTPS. Raises AddressInUse, TlsFileError.
    """

    def __init__(self, *, host: str, port: int, tls: TlsFiles | None = None) -> None:
        self.tls = None if tls is None else server_tls(tls)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.socket = socket.socket(family, socket.SOCK_STREAM)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self.socket.bind((host, port))
            self.socket.listen(BACKLOG)
        except OSError as error:
            self.socket.close()
            remedy = "set another http.host or http.port, or stop what listens there"
            raise AddressInUse(error.errno, f"cannot listen on {host}:{port}: {error.strerror}: {remedy}") from error
        self.socket.setblocking(False)
        self.host = host
        self.port = int(self.socket.getsockname()[1])

    @property
    def url(self) -> str:
        """The address for clients; by this machine's name if it listens on all of its addresses."""
        host = socket.gethostname() if is_wildcard(self.host) else self.host
        return f"{'http' if self.tls is None else 'https'}://{f'[{host}]' if ':' in host else host}:{self.port}"

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
        tls=listener.tls,
        config=uvicorn.Config(
            traced_app(app),
            log_config=None,
            access_log=False,
            http=LimitedConnection,
            loop="none",
            ws="none",
            lifespan="off",
            timeout_keep_alive=75,
            timeout_graceful_shutdown=finish_s,
        ),
    )
    logger.info("listening at %s", listener.url)
    if listener.tls is None and not is_loopback(listener.host):
        logger.warning(
            "%s is plain HTTP: whoever sees the network reads its tokens; set http.tls_cert_file, or keep the network "
            "private",
            listener.url,
        )
    try:
        await server.serve(sockets=[listener.socket])
    except asyncio.CancelledError:
        if server.started:
            await server.shutdown(sockets=[listener.socket])
        raise
    raise RuntimeError("the HTTP server ended by itself")


class _Server(uvicorn.Server):
    """Accepts in its own way. Signals belong to the process, which cancels this server like its other loops."""

    def __init__(self, *, config: uvicorn.Config, tls: TlsContext | None) -> None:
        super().__init__(config)
        self._tls = tls
        self._acceptors: tuple[Acceptor, ...] = ()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        self._acceptors = tuple(Acceptor(each, self._protocol, tls=self._tls) for each in sockets or ())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, which waits for a tenth of a second first, and looks ten times a second from then on."""
        for acceptor in self._acceptors:
            acceptor.close()
        for listening in sockets or ():
            listening.close()
        state = self.server_state
        for connection in list(state.connections):
            connection.shutdown()
        try:
            async with asyncio.timeout(self.config.timeout_graceful_shutdown):
                while state.connections or state.tasks:  # noqa: ASYNC110 - sets of uvicorn's, which tell nobody
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError:
            logger.error("%d requests are not done in time, and are cancelled", len(state.tasks))
            for task in list(state.tasks):
                task.cancel()

    def _protocol(self) -> asyncio.Protocol:
        make = self.config.http_protocol_class
        return make(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)  # type: ignore[call-arg]

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
