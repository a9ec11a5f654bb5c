"""TCP links that can be troubled: late, slow, half-open, cut, with bytes lost or changed.

All links of a test live in one event loop, in a thread of its own. A `Trouble` is read for every chunk that passes, so
that a test changes it at any time from its own thread.
"""

import asyncio
import random
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Self, TypeVar

_CHUNK = 1 << 16
_LOOK_EVERY_S = 0.02
T = TypeVar("T")


@dataclass
class Trouble:
    """Trouble of a link with the bytes that pass now. `drop_chunks` and `flip_bytes` count down to 0.

    stalled: connections stay open, or are taken, and nothing passes, not even their end: half-open.
    """

    delay_s: float = 0.0
    bytes_per_s: float | None = None
    stalled: bool = False
    drop_chunks: int = 0
    flip_bytes: int = 0

    def heal(self) -> None:
        """No trouble any more."""
        self.delay_s, self.bytes_per_s, self.stalled, self.drop_chunks, self.flip_bytes = 0.0, None, False, 0, 0

    async def pass_through(self, data: bytes) -> bytes:
        """The chunk as it arrives on the other side, when it arrives; empty if it is lost."""
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        if self.bytes_per_s:
            await asyncio.sleep(len(data) / self.bytes_per_s)
        while self.stalled:  # noqa: ASYNC110 - another thread changes it
            await asyncio.sleep(_LOOK_EVERY_S)
        if self.drop_chunks > 0:
            self.drop_chunks -= 1
            return b""
        if self.flip_bytes > 0:
            self.flip_bytes -= 1
            return _flipped(data)
        return data


def _flipped(data: bytes) -> bytes:
    place = random.randrange(len(data))
    return data[:place] + bytes([data[place] ^ 0x55]) + data[place + 1 :]


@dataclass
class LinkConnection:
    """A connection through a link. `kind` is its watcher's name for it, by the first bytes."""

    client: asyncio.StreamWriter
    kind: str = ""
    server: asyncio.StreamWriter | None = None
    answered: asyncio.Event = field(default_factory=asyncio.Event)

    def abort(self) -> None:
        for writer in (self.client, self.server):
            if writer is not None:
                writer.transport.abort()


class LinkWatcher:
    """Sees what clients send through a link. This one sees nothing in it."""

    def kind_of(self, data: bytes) -> str:
        """The kind of a connection that begins with these bytes."""
        return ""

    async def before(self, connection: LinkConnection, data: bytes) -> None:
        """Called before the bytes are passed on."""

    async def after(self, connection: LinkConnection, data: bytes) -> None:
        """Called when they were passed on."""


class ChaosLink:
    """Listens on `port` and passes everything on to `target`. Troubles are set by kind of connection."""

    def __init__(self, network: "LinkNetwork", *, target: int, watcher: LinkWatcher) -> None:
        self._network = network
        self._target = target
        self._watcher = watcher
        self._troubles: dict[str, Trouble] = {}
        self._connections: list[LinkConnection] = []
        self._server: asyncio.Server | None = None
        self.refusing = False
        self.port = 0

    def trouble(self, kind: str = "") -> Trouble:
        """The trouble of connections of a kind."""
        return self._troubles.setdefault(kind, Trouble())

    def heal(self) -> None:
        """Everything passes again; connections that were open stay."""
        self.refusing = False
        for trouble in list(self._troubles.values()):
            trouble.heal()

    def cut(self, *, refuse: bool = False) -> None:
        """Breaks all connections; with `refuse` new ones too, until `heal`."""
        self.refusing = refuse
        self._network.call(self._abort_all)

    def _abort_all(self) -> None:
        for connection in self._connections:
            connection.abort()

    async def serve(self) -> None:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0, backlog=256)
        self.port = int(self._server.sockets[0].getsockname()[1])

    def close(self) -> None:
        """To be called in the network's loop."""
        if self._server is not None:
            self._server.close()
        self._abort_all()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = LinkConnection(client=writer)
        self._connections.append(connection)
        try:
            await self._pass_on(reader, connection)
        except (OSError, asyncio.CancelledError):
            pass  # broken on one side, or the network closes: asyncio would print the latter
        finally:
            connection.abort()
            self._connections.remove(connection)

    async def _pass_on(self, reader: asyncio.StreamReader, connection: LinkConnection) -> None:
        if self.refusing:
            return
        server_reader, connection.server = await asyncio.open_connection("127.0.0.1", self._target)
        up = asyncio.create_task(self._pump_up(reader, connection))
        down = asyncio.create_task(self._pump_down(server_reader, connection))
        _, pending = await asyncio.wait({up, down}, return_when=asyncio.FIRST_EXCEPTION)
        for task in pending:
            task.cancel()
        for ended in await asyncio.gather(up, down, return_exceptions=True):
            if isinstance(ended, Exception) and not isinstance(ended, OSError):  # both sides of a break may tell of it
                raise ended

    async def _pump_up(self, reader: asyncio.StreamReader, connection: LinkConnection) -> None:
        assert connection.server is not None
        first = True
        while data := await reader.read(_CHUNK):
            if first:
                connection.kind, first = self._watcher.kind_of(data), False
            await self._watcher.before(connection, data)
            if passed := await self.trouble(connection.kind).pass_through(data):
                connection.answered.clear()
                connection.server.write(passed)
                await connection.server.drain()
            await self._watcher.after(connection, data)
        await self._end(connection.server, connection)

    async def _pump_down(self, reader: asyncio.StreamReader, connection: LinkConnection) -> None:
        while data := await reader.read(_CHUNK):
            connection.answered.set()
            if passed := await self.trouble(connection.kind).pass_through(data):
                connection.client.write(passed)
                await connection.client.drain()
        await self._end(connection.client, connection)

    async def _end(self, writer: asyncio.StreamWriter, connection: LinkConnection) -> None:
        while self.trouble(connection.kind).stalled:  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_EVERY_S)
        writer.write_eof()


class LinkNetwork:
    """The event loop of all links; a context manager."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._links: list[ChaosLink] = []
        self._thread = threading.Thread(target=self._loop.run_forever, name="chaos-network", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.run(self._close_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)
        self._loop.close()

    def link(self, target: int, *, watcher: LinkWatcher | None = None) -> ChaosLink:
        """A new link to a port of this machine, on a free port."""
        link = ChaosLink(self, target=target, watcher=watcher or LinkWatcher())
        self._links.append(link)
        self.run(link.serve())
        return link

    def run(self, work: Coroutine[None, None, T]) -> T:
        """Runs in the loop, from another thread, and waits."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=10)

    def call(self, work: Callable[[], None]) -> None:
        """Calls in the loop, soon."""
        self._loop.call_soon_threadsafe(work)

    async def _close_all(self) -> None:
        for link in self._links:
            link.close()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
