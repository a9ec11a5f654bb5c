"""The way from inside of a task's computer to one session, and to nothing else.

    a program inside ─▶ the runtime's own loopback ─▶ a socket that this process accepts from ─▶ the session's address

Whoever is inside can ask the policy, by the addresses in ROUTES, and that is all: no other address of the service is
behind the door, and no other session's. The session's key is added here and never goes inside; nobody inside can give a
reward or see another's work. Each connection is one request, read only as far as it is bounded. A flood waits at the
door: connections in a queue of the kernel's, requests and their bytes for their turn.
"""

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import aiohttp

from env_service.environments.interface import AgentClient

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
_MAX_HEAD = 16 << 10
_REQUEST_S = 60.0
_CONNECT_S = 30.0
_REST_S = 0.1
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
    headers: Mapping[str, str]
    body: bytes = b""


class _SessionDoor:
    def __init__(self, client: AgentClient, http: aiohttp.ClientSession) -> None:
        self._client = client
        self._http = http
        self._room = asyncio.Semaphore(MAX_CONNECTIONS)
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
                await self._answer(reader, writer)
            finally:
                writer.close()
        # Whoever is inside may send anything, and leave at any time: uvloop raises RuntimeError for a write after that.
        except (OSError, EOFError, RuntimeError, aiohttp.ClientError):
            logger.debug("a connection from inside of a computer came to nothing", exc_info=True)
        finally:
            self._room.release()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_REQUEST_S):
                asked = await self._asked(reader)
            # A client that leaves is told apart from one that waits: its turn may be asked for again.
            answering = asyncio.ensure_future(self._passed_on(asked, writer))
            leaving = asyncio.ensure_future(self._left(reader))
            try:
                await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                leaving.cancel()
                if not answering.done():
                    answering.cancel()
                await asyncio.gather(answering, leaving, return_exceptions=True)
            if not answering.cancelled():
                answering.result()
        except _DoorRefusal as refusal:
            writer.write(_refused(refusal))
        with suppress(ConnectionError):
            await writer.drain()

    async def _asked(self, reader: asyncio.StreamReader) -> _DoorRequest:
        """The request of a connection. Raises _DoorRefusal, and EOFError for one that ends before."""
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
            raise _DoorRefusal(413, f"a body of {length} bytes; at most {MAX_BODY} are taken")
        body = bytearray()
        while len(body) < int(length):
            part = await reader.read(min(_MAX_HEAD, int(length) - len(body)))
            if not part:
                raise EOFError
            body += part
            await self._allowance.take(len(part))
        return _DoorRequest(asked.method, asked.path, asked.headers, bytes(body))

    async def _left(self, reader: asyncio.StreamReader) -> None:
        """Return when the client has left. More than its request is not looked at."""
        while part := await reader.read(_MAX_HEAD):
            await self._allowance.take(len(part))

    async def _passed_on(self, asked: _DoorRequest, writer: asyncio.StreamWriter) -> None:
        """Have the session answer. Raises _DoorRefusal, if nothing has been answered."""
        headers = {name: asked.headers[name] for name in _PASSED_ON if name in asked.headers}
        headers |= {"Authorization": f"Bearer {self._client.key}", "Accept-Encoding": "identity"}
        url = self._client.anthropic_url + asked.path
        request = self._http.request(asked.method, url, data=asked.body or None, headers=headers, allow_redirects=False)
        try:
            answer = await request
        except (aiohttp.ClientError, TimeoutError) as error:
            raise _DoorRefusal(502, f"the session cannot be reached: {type(error).__name__}") from error
        except ValueError as error:
            raise _DoorRefusal(400, f"a header cannot be passed on: {error}") from error
        async with answer:
            writer.write(_answer_head(answer.status, answer.headers.get("Content-Type", "application/json")))
            async for part in answer.content.iter_any():
                writer.write(b"%x\r\n%b\r\n" % (len(part), part))
                await writer.drain()
        writer.write(b"0\r\n\r\n")


class ByteAllowance:
    """So many bytes a second, of which what was not used counts up to `at_once`."""

    def __init__(self, *, per_s: int, at_once: int) -> None:
        self._clock = asyncio.get_running_loop().time
        self._per_s = per_s
        self._at_once = at_once
        self._left = float(at_once)
        self._since = self._clock()

    async def take(self, count: int) -> None:
        """Return when these have their turn, behind those that were taken before."""
        now = self._clock()
        self._left = min(self._at_once, self._left + (now - self._since) * self._per_s) - count
        self._since = now
        if self._left < 0:
            await asyncio.sleep(-self._left / self._per_s)


async def _head(reader: asyncio.StreamReader) -> _DoorRequest:
    """A request without its body. Raises _DoorRefusal for one that is none."""
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except asyncio.LimitOverrunError:
        raise _DoorRefusal(431, f"a request begins with at most {_MAX_HEAD} bytes of headers") from None
    first, *lines = head.removesuffix("\r\n\r\n").split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        raise _DoorRefusal(400, "this is no request of HTTP/1.1")
    parts = [line.partition(":") for line in lines]
    headers = {name.strip().lower(): value.strip() for name, _, value in parts}
    return _DoorRequest(words[0], words[1].partition("?")[0], headers)


def _answer_head(status: int, content_type: str) -> bytes:
    lines = (f"HTTP/1.1 {status} {'OK' if status < 400 else 'Refused'}", f"Content-Type: {content_type}")
    return "\r\n".join([*lines, "Transfer-Encoding: chunked", "Connection: close", "", ""]).encode("latin-1")


def _refused(refusal: _DoorRefusal) -> bytes:
    """A refusal, in a form that clients of either API read."""
    error = {"message": str(refusal), "type": "invalid_request_error", "code": "not_passed_on", "param": None}
    body = json.dumps({"type": "error", "error": error}).encode()
    return _answer_head(refusal.status, "application/json") + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
