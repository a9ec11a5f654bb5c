"""The way from inside of a task's computer to one session, and to nothing else.

    a program inside ─▶ the runtime's own loopback ─▶ a socket that this process accepts from ─▶ the session's address

Whoever is inside can ask the policy, by the addresses in ROUTES, and that is all: no other address of the service is
behind the door, and no other session's. The session's key is added here and never goes inside; nobody inside can give a
reward or see another's work. Each connection is one request, read only as far as it is bounded. A flood waits at the
door: connections in a queue of the kernel's, requests and their bytes for their turn, and bodies for room.
"""

import asyncio
import io
import json
import logging
import socket
import struct
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace

import aiohttp

from env_service.environments.interface import AgentClient
from env_service.harnesses.door_bounds import ByteAllowance, ByteRoom

logger = logging.getLogger(__name__)

ROUTES = frozenset(
    {
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/responses"),
        ("POST", "/v1/messages"),
        ("POST", "/v1/messages/count_tokens"),
        ("GET", "/v1/models"),
    }
)
MAX_CONNECTIONS = 32
MAX_BODY = 4 << 20
MAX_BODIES = 8 << 20
"""Bytes of all bodies at once that have come and are not answered; the next one waits until there is room."""
_MAX_HEAD = 16 << 10
_REQUEST_S = 60.0
_CONNECT_S = 30.0
_REST_S = 0.1
# So long a client that was refused may go on sending.
_REFUSED_S = 5.0
# `tcpi_state` of a connection that is no more.
_TCP_CLOSE = 7
_PASSED_ON = ("content-type", "x-stainless-retry-count")
# Requests cost the event loop that all trajectories share: 32 a second at most, or two of the largest in four seconds.
_BYTES_PER_S = 2 << 20
_BYTES_AT_ONCE = 16 << 20
_CONNECTION_BYTES = 64 << 10


@asynccontextmanager
async def session_door(listener: socket.socket, client: AgentClient) -> AsyncIterator[str]:
    """Within it, the session is behind the address that is yielded, for who can connect to the listener. It ends with
    all connections; the listener is closed.
    """
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S)
    connections = aiohttp.TCPConnector(limit=MAX_CONNECTIONS)
    with listener:
        listener.setblocking(False)
        async with aiohttp.ClientSession(connector=connections, timeout=timeout, auto_decompress=False) as http:
            serving = asyncio.create_task(_SessionDoor(client, http).serve(listener))
            try:
                yield f"http://127.0.0.1:{listener.getsockname()[1]}"
            finally:
                serving.cancel()
                await asyncio.gather(serving, return_exceptions=True)


class _DoorRefusal(Exception):
    """A request that does not go on; `status` and text are the answer."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True)
class _DoorRequest:
    method: str
    path: str
    version: str
    headers: Mapping[str, str]
    length: int = 0


class _SessionDoor:
    def __init__(self, client: AgentClient, http: aiohttp.ClientSession) -> None:
        self._client = client
        self._http = http
        self._room = asyncio.Semaphore(MAX_CONNECTIONS)
        self._bodies = ByteRoom(MAX_BODIES)
        self._allowance = ByteAllowance(per_s=_BYTES_PER_S, at_once=_BYTES_AT_ONCE)

    async def serve(self, listener: socket.socket) -> None:
        """Serve connections, so many at once. It does not return."""
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as tasks:
            while True:
                await self._room.acquire()
                await self._allowance.take(_CONNECTION_BYTES)
                try:
                    connection, _ = await loop.sock_accept(listener)
                except OSError:  # it has left already, or this process has no descriptor to spare
                    self._room.release()
                    await asyncio.sleep(_REST_S)
                    continue
                tasks.create_task(self._served(connection))

    async def _served(self, connection: socket.socket) -> None:
        try:
            reader, writer = await asyncio.open_connection(sock=connection, limit=_MAX_HEAD)
            try:
                await self._answer(_DoorConnection(reader, writer, connection))
            finally:
                writer.close()
        # Whoever is inside may send anything, and leave at any time: uvloop raises RuntimeError for a write after that.
        except (OSError, EOFError, RuntimeError, aiohttp.ClientError):
            logger.debug("a connection from inside of a computer came to nothing", exc_info=True)
        finally:
            self._room.release()

    async def _answer(self, connection: "_DoorConnection") -> None:
        writer = connection.writer
        try:
            async with asyncio.timeout(_REQUEST_S):
                asked = await _asked(connection.reader)
            async with self._bodies.held(asked.length):
                async with asyncio.timeout(_REQUEST_S):
                    body = await self._body(connection.reader, asked.length)
                await self._answered(asked, body, connection)
        except _DoorRefusal as refusal:
            writer.write(_refused(refusal))
            writer.write_eof()
            # Closed with bytes that were not read, the connection would be reset, and the refusal lost.
            with suppress(TimeoutError):
                async with asyncio.timeout(_REFUSED_S):
                    await self._drop_rest(connection.reader)
        with suppress(ConnectionError):
            await writer.drain()

    async def _answered(self, asked: "_DoorRequest", body: io.BytesIO, connection: "_DoorConnection") -> None:
        """Answer a request, unless its client leaves before. Raises _DoorRefusal, if nothing has been answered."""
        # A client that leaves is told apart from one that waits: its turn may be asked for again.
        answering = asyncio.ensure_future(self._passed_on(asked, body, connection))
        leaving = asyncio.ensure_future(self._left(connection))
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            if not answering.done():
                answering.cancel()
            await asyncio.gather(answering, leaving, return_exceptions=True)
        if not answering.cancelled():
            answering.result()

    async def _body(self, reader: asyncio.StreamReader, length: int) -> io.BytesIO:
        """Raises EOFError for one that ends before."""
        body = io.BytesIO()
        while body.tell() < length:
            part = await reader.read(min(_MAX_HEAD, length - body.tell()))
            if not part:
                raise EOFError
            body.write(part)
            await self._allowance.take(len(part))
        body.seek(0)
        return body

    async def _drop_rest(self, reader: asyncio.StreamReader) -> None:
        """Return when the client sends no more. More than its request is not looked at."""
        while part := await reader.read(_MAX_HEAD):
            await self._allowance.take(len(part))

    async def _left(self, connection: "_DoorConnection") -> None:
        """Return when the client has left."""
        await self._drop_rest(connection.reader)
        connection.probe()
        while not connection.is_closed:  # noqa: ASYNC110  nobody tells of it
            await asyncio.sleep(_REST_S)

    async def _passed_on(self, asked: "_DoorRequest", body: io.BytesIO, connection: "_DoorConnection") -> None:
        """Have the session answer. Raises _DoorRefusal, if nothing has been answered."""
        if connection.reader.at_eof():  # it may have left while it waited for room, and is found out meanwhile
            await asyncio.sleep(_REST_S)
        headers = {name: asked.headers[name] for name in _PASSED_ON if name in asked.headers}
        headers |= {"Authorization": f"Bearer {self._client.key}", "Accept-Encoding": "identity"}
        request = self._http.request(
            asked.method,
            self._client.anthropic_url + asked.path,
            data=body if asked.length else None,
            headers=headers,
            allow_redirects=False,
        )
        try:
            answer = await request
        except (aiohttp.ClientError, TimeoutError) as error:
            raise _DoorRefusal(502, f"the session cannot be reached: {type(error).__name__}") from error
        except ValueError as error:
            raise _DoorRefusal(400, f"a header cannot be passed on: {error}") from error
        length = answer.headers.get("Content-Length")
        chunked = length is None and asked.version != "HTTP/1.0"
        writer = connection.writer
        async with answer:
            kind = answer.headers.get("Content-Type", "application/json")
            writer.write(_answer_head(answer.status, kind, length=length, chunked=chunked))
            try:
                async for part in answer.content.iter_any():
                    writer.write(b"%x\r\n%b\r\n" % (len(part), part) if chunked else part)
                    await writer.drain()
            except aiohttp.ClientError:
                connection.break_off()
                raise
        if chunked:
            writer.write(b"0\r\n\r\n")


@dataclass(frozen=True)
class _DoorConnection:
    """A connection from inside, and the socket of it."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    socket: socket.socket

    def probe(self) -> None:
        """Have a client that has left be told from one that only sends no more: both look the same, until something is
        sent that the kernel of the one resets. A byte out of band is in no client's stream.
        """
        with suppress(OSError):
            self.socket.send(b"\0", socket.MSG_OOB)

    @property
    def is_closed(self) -> bool:
        """True once it was reset."""
        return self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_CLOSE

    def break_off(self) -> None:
        """Have its close be a reset, so that half an answer is not taken for a whole one whose end is the close."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


async def _asked(reader: asyncio.StreamReader) -> "_DoorRequest":
    """A request without its body. Raises _DoorRefusal, and EOFError for one that ends before."""
    asked = await _head(reader)
    if (asked.method, asked.path) not in ROUTES:
        known = ", ".join(f"{method} {path}" for method, path in sorted(ROUTES))
        raise _DoorRefusal(404, f"{asked.method} {asked.path} is not to be had in here; there are {known}")
    if "transfer-encoding" in asked.headers:
        raise _DoorRefusal(411, "the length of the body is wanted in advance, as Content-Length")
    length = asked.headers.get("content-length", "0")
    if not (length.isascii() and length.isdecimal() and len(length) < 12):
        raise _DoorRefusal(400, "Content-Length is no number")
    if int(length) > MAX_BODY:
        raise _DoorRefusal(413, f"the body has {length} bytes; expected at most {MAX_BODY}: send less at once")
    return replace(asked, length=int(length))


async def _head(reader: asyncio.StreamReader) -> _DoorRequest:
    """A request without its body. Raises _DoorRefusal for one that is none."""
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except asyncio.LimitOverrunError:
        raise _DoorRefusal(431, f"a request begins with at most {_MAX_HEAD} bytes of headers") from None
    first, *lines = head.removesuffix("\r\n\r\n").split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        raise _DoorRefusal(400, "this is no request of HTTP/1.1 or 1.0")
    parts = [line.partition(":") for line in lines]
    headers = {name.strip().lower(): value.strip() for name, _, value in parts}
    return _DoorRequest(words[0], words[1].partition("?")[0], words[2], headers)


def _answer_head(status: int, content_type: str, *, length: str | None, chunked: bool = False) -> bytes:
    """The beginning of an answer, which ends with the connection if it has neither a length nor chunks."""
    lines = [f"HTTP/1.1 {status} {'OK' if status < 400 else 'Refused'}", f"Content-Type: {content_type}"]
    lines += [f"Content-Length: {length}"] if length is not None else []
    lines += ["Transfer-Encoding: chunked"] if chunked else []
    return "\r\n".join([*lines, "Connection: close", "", ""]).encode("latin-1")


def _refused(refusal: _DoorRefusal) -> bytes:
    """A refusal, in a form that clients of either API read."""
    error = {"message": str(refusal), "type": "invalid_request_error", "code": "not_passed_on", "param": None}
    body = json.dumps({"type": "error", "error": error}).encode()
    return _answer_head(refusal.status, "application/json", length=str(len(body))) + body
