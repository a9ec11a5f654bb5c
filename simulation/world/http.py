"""HTTP in memory: what `services.http.client` asks of aiohttp, and the applications that real servers would serve.

session.request ─▶ connect (refused, or silence over a cut link) ─▶ the request ─▶ a task of the server's loop: the ASGI
application ─▶ head, parts of the body ─▶ the client. A server that dies breaks the connection; one that stands still
does not answer; a client that goes away is a disconnect to the server.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import aiohttp
from aiohttp.client_reqrep import ConnectionKey

from simulation.world.clock import active
from simulation.world.network import Network, Pipe
from simulation.world.process import Process

_BULK = b"application/octet-stream"
_END = b""

App = Callable[[Any, Any, Any], Any]


@dataclass(eq=False)
class Server:
    """An address that a process listens on; `app` is there once it serves."""

    host: str
    port: int
    process: Process
    app: App | None = None
    waiting: list["HttpExchange"] = field(default_factory=list)
    closed: bool = False

    @property
    def listens(self) -> bool:
        """True if a connection would be accepted."""
        return not self.closed and self.process.alive


class Directory:
    """All servers, by host and port."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.servers: dict[tuple[str, int], Server] = {}
        self.requests = 0

    def listen(self, host: str, port: int, process: Process) -> Server:
        """Raises OSError if somebody who is alive listens there."""
        taken = self.servers.get((host, port))
        if taken is not None and taken.listens:
            raise OSError(98, f"cannot listen on {host}:{port}: Address already in use")
        server = self.servers[host, port] = Server(host, port, process)
        process.deaths.append(lambda: self._die(server))
        return server

    def find(self, url: str) -> Server | None:
        """The server that listens at a URL's address."""
        parts = urlsplit(url)
        server = self.servers.get((parts.hostname or "", parts.port or 80))
        return server if server is not None and server.listens else None

    def _die(self, server: Server) -> None:
        server.closed = True


@dataclass(eq=False)
class HttpExchange:
    """A request and its answer, seen from both ends."""

    network: Network
    client: Process
    server: Server
    method: str
    url: str
    body: bytes
    headers: Mapping[str, str]
    there: Pipe = field(init=False)
    back: Pipe = field(init=False)
    head: "asyncio.Future[tuple[int, dict[str, str]]]" = field(init=False)
    chunks: "deque[bytes]" = field(default_factory=deque)
    ended: bool = False
    broken: bool = False
    left: bool = False
    task: "asyncio.Task[None] | None" = None
    _reader: "asyncio.Future[None] | None" = None
    _left: "asyncio.Event" = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        one, other = self.client.host, self.server.process.host
        self.there, self.back = Pipe(self.network, one, other), Pipe(self.network, other, one)
        self.head = self.client.loop.create_future()
        self.server.process.deaths.append(self._server_died)
        self.client.deaths.append(self.client_leaves)

    # The client's end

    def begin(self) -> None:
        """Sends the request."""
        self.there.send(self._arrive)

    def client_leaves(self) -> None:
        """Nobody reads on: the server hears of it."""
        if self.left or self.ended:
            return
        self.left = True
        self.there.send(lambda: self.server.process.loop.call_soon(self._left.set))
        self.back.close()

    def _settle(self, head: tuple[int, dict[str, str]]) -> None:
        if not self.head.done():
            self.head.set_result(head)

    def _take(self, chunk: bytes) -> None:
        if chunk:
            self.chunks.append(chunk)
        else:
            self.ended = True
            self._forget()
        self._tell()

    def _break(self) -> None:
        self.broken = True
        self._forget()
        if not self.head.done():
            self.head.set_exception(aiohttp.ServerDisconnectedError())
            self.head.exception()
        self._tell()

    def _forget(self) -> None:
        for deaths, death in (
            (self.server.process.deaths, self._server_died),
            (self.client.deaths, self.client_leaves),
        ):
            if death in deaths:
                deaths.remove(death)

    def _tell(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def read(self) -> bytes:
        """The next part of the body; empty at its end. Raises aiohttp.ClientPayloadError."""
        while not self.chunks:
            if self.ended:
                return _END
            if self.broken:
                raise aiohttp.ClientPayloadError("the connection broke in the middle of the answer")
            self._reader = self.client.loop.create_future()
            await self._reader
        return self.chunks.popleft()

    # The server's end

    def _arrive(self) -> None:
        process = self.server.process
        if not self.server.listens:
            self.back.send(self._break)
        elif self.server.app is None:
            self.server.waiting.append(self)
        else:
            process.loop.call_soon(self.serve)

    def serve(self) -> None:
        """Has the application answer. What is in a server's buffer is read, whoever has sent it."""
        stale = self.network.stale
        if not self.left or (stale and self.network.world.random.random() < stale):
            self.task = self.server.process.loop.create_task(self._answer(), name=f"{self.method} {self.url}")

    def _server_died(self) -> None:
        if not self.ended:
            self.back.send(self._break)

    async def _answer(self) -> None:
        app = self.server.app
        assert app is not None
        sender = _Sender(self)
        try:
            await app(self._scope(), _Receiver(self), sender)
        except Exception as error:  # noqa: BLE001 - a server logs it and breaks the connection
            if not self.left:
                self.network.world.note(self.server.process.name, f"a request failed: {self.url}: {error!r}")
            self.back.send(self._break)
            return
        if not sender.finished:
            self.back.send(self._break)

    def _scope(self) -> dict[str, object]:
        parts = urlsplit(self.url)
        headers = [(name.lower().encode(), value.encode()) for name, value in self.headers.items()]
        return {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": self.method, "scheme": "http",
            "path": parts.path, "raw_path": parts.path.encode(), "query_string": parts.query.encode(), "root_path": "",
            "headers": [*headers, (b"content-length", str(len(self.body)).encode())],
            "client": (self.client.host, 1), "server": (self.server.host, self.server.port),
        }  # fmt: skip


class _Receiver:
    def __init__(self, exchange: HttpExchange) -> None:
        self._exchange = exchange
        self._given = False

    async def __call__(self) -> dict[str, object]:
        if not self._given:
            self._given = True
            return {"type": "http.request", "body": self._exchange.body, "more_body": False}
        await self._exchange._left.wait()
        return {"type": "http.disconnect"}


class _Sender:
    def __init__(self, exchange: HttpExchange) -> None:
        self._exchange = exchange
        self._bulk = False
        self.finished = False

    async def __call__(self, message: dict[str, Any]) -> None:
        exchange = self._exchange
        if exchange.left:
            raise OSError("the client is gone")
        if message["type"] == "http.response.start":
            headers = {name.decode().title(): value.decode() for name, value in message["headers"]}
            self._bulk = any(value == _BULK for _, value in message["headers"])
            status = message["status"]
            exchange.back.send(lambda: exchange._settle((status, headers)))
            return
        body, more = message.get("body", b""), message.get("more_body", False)
        if body:
            host = exchange.server.process.host
            after_s = exchange.network.bulk_s(host, len(body)) if self._bulk else 0.0
            exchange.back.send(lambda: exchange._take(body), after_s=after_s)
        if not more:
            self.finished = True
            exchange.back.send(lambda: exchange._take(_END))


class Connector:
    """Stands for aiohttp.TCPConnector: `limit` connections at once, 0 for any number."""

    def __init__(self, *, limit: int = 100, **_: object) -> None:
        self.limit = limit


class StubClientSession:
    """Stands for aiohttp.ClientSession."""

    def __init__(
        self, *, connector: Connector, timeout: aiohttp.ClientTimeout, headers: Mapping[str, str], **_: object
    ) -> None:
        self._places = asyncio.Semaphore(connector.limit) if connector.limit else None
        self._connect_s = timeout.sock_connect or 30.0
        self._headers = dict(headers)
        self._world = active()
        assert isinstance(self._world.current, Process)
        self._process = self._world.current

    async def close(self) -> None:
        """Its connections are closed by those who wait for their answers."""

    def get(self, url: str, *, headers: Mapping[str, str] | None = None, **_: object) -> "Request":
        """See aiohttp."""
        return Request(self, "GET", url, b"", headers)

    def post(
        self, url: str, *, data: bytes | None = None, headers: Mapping[str, str] | None = None, **_: object
    ) -> "Request":
        """See aiohttp."""
        return Request(self, "POST", url, data or b"", headers)

    def request(
        self, method: str, url: str, *, data: bytes | None = None, headers: Mapping[str, str] | None = None, **_: object
    ) -> "Request":
        """See aiohttp."""
        return Request(self, method, url, data or b"", headers)

    async def send(self, method: str, url: str, body: bytes, headers: Mapping[str, str] | None) -> "StubResponse":
        """Connects, sends, and returns at the head of the answer."""
        if self._places is not None:
            await self._places.acquire()
        try:
            exchange = await self._connect(method, url, body, {**self._headers, **(headers or {})})
            try:
                status, answered = await exchange.head
            except BaseException:
                exchange.client_leaves()
                raise
        except BaseException:
            self._release()
            raise
        return StubResponse(exchange, status=status, headers=answered, release=self._release)

    def _release(self) -> None:
        if self._places is not None:
            self._places.release()

    async def _connect(self, method: str, url: str, body: bytes, headers: Mapping[str, str]) -> HttpExchange:
        directory = self._world.part(Directory)
        directory.requests += 1
        network, parts = directory.network, urlsplit(url)
        found = directory.servers.get((parts.hostname or "", parts.port or 80))
        host = found.process.host if found is not None else (parts.hostname or "")
        ends_at = self._process.loop.time() + self._connect_s
        while not network.connected(self._process.host, host):
            if self._process.loop.time() >= ends_at:
                raise aiohttp.ConnectionTimeoutError(f"no connection to {parts.netloc} in time")
            await asyncio.sleep(0.5)
        server = directory.find(url)
        if server is None:
            await asyncio.sleep(network.delay(self._process.host, host))
            raise _refused(parts.hostname or "", parts.port or 80)
        exchange = HttpExchange(network, self._process, server, method, url, body, headers)
        exchange.begin()
        return exchange


def _refused(host: str, port: int) -> aiohttp.ClientConnectorError:
    key = ConnectionKey(host, port, False, True, None, None, None)
    return aiohttp.ClientConnectorError(key, OSError(111, "Connection refused"))


class Request:
    """A request of session.request: to be awaited, or entered."""

    def __init__(
        self, session: StubClientSession, method: str, url: str, body: bytes, headers: Mapping[str, str] | None
    ) -> None:
        self._send: Callable[[], Coroutine[Any, Any, StubResponse]] = lambda: session.send(method, url, body, headers)
        self._answer: StubResponse | None = None

    def __await__(self) -> Any:
        return self._send().__await__()

    async def __aenter__(self) -> "StubResponse":
        self._answer = await self._send()
        return self._answer

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._answer is not None
        self._answer.close()


class StubResponse:
    """Stands for aiohttp.ClientResponse."""

    def __init__(
        self, exchange: HttpExchange, *, status: int, headers: dict[str, str], release: Callable[[], object]
    ) -> None:
        self._exchange = exchange
        self._release: Callable[[], object] | None = release
        self.status = status
        self.headers = headers

    @property
    def content(self) -> "StubResponse":
        """Where aiohttp has the parts of the body."""
        return self

    @property
    def content_type(self) -> str:
        """Without parameters."""
        return self.headers.get("Content-Type", "application/octet-stream").partition(";")[0].strip()

    async def iter_any(self) -> AsyncIterator[bytes]:
        """The body in parts."""
        while chunk := await self._exchange.read():
            yield chunk

    async def readany(self) -> bytes:
        """The next part."""
        return await self._exchange.read()

    def close(self) -> None:
        """Leaves the rest unread."""
        self._exchange.client_leaves()
        if self._release is not None:
            self._release()
            self._release = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class FakeListener:
    """Stands for services.http.server.Listener; `host` of a config names a host of the simulation."""

    def __init__(self, *, host: str, port: int, **_: object) -> None:
        world = active()
        assert isinstance(world.current, Process)
        self.host, self.port, self.tls = world.current.host, port, None
        directory = world.part(Directory)
        from services.http.server import AddressInUse

        try:
            self.server = directory.listen(self.host, port, world.current)
        except OSError as error:
            raise AddressInUse(error.errno, str(error.strerror)) from error

    @property
    def url(self) -> str:
        """The address for clients."""
        return f"http://{self.host}:{self.port}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.server.closed = True


async def serve_http(app: App, listener: FakeListener, *, finish_s: int = 2, **_: object) -> None:
    """Stands for services.http.server.serve_http."""
    server = listener.server
    server.app = app
    for exchange in server.waiting:
        exchange.serve()
    server.waiting.clear()
    try:
        await asyncio.Event().wait()
    finally:
        server.closed = True
