"""A TCP proxy on loopback that does to a connection what networks do: falls silent without a word, or changes bytes."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

Change = Callable[[bytes], bytes]


class TcpProxy:
    """Forwards to one port. While `frozen`, takes connections and bytes and passes nothing on."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._open = asyncio.Event()
        self._open.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0
        self.connections = 0
        self.another = asyncio.Event()
        self.to_server: Change = bytes
        self.to_client: Change = bytes

    def freeze(self) -> None:
        """Pass nothing on, and close nothing."""
        self._open.clear()

    def thaw(self) -> None:
        """Pass bytes on again, those of the time between included."""
        self._open.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves a connection, until either side closes."""
        self.connections += 1
        if self.connections > 1:
            self.another.set()
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            onward_reader, onward_writer = await asyncio.open_connection("127.0.0.1", self._port)
            await asyncio.gather(
                self._pass(reader, onward_writer, lambda data: self.to_server(data)),
                self._pass(onward_reader, writer, lambda data: self.to_client(data)),
            )
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, change: Change) -> None:
        try:
            while data := await reader.read(1 << 16):
                await self._open.wait()
                writer.write(change(data))
                await writer.drain()
        finally:
            writer.close()

    async def end(self) -> None:
        """Close all connections."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def tcp_proxy(address: str) -> AsyncIterator[TcpProxy]:
    """A proxy to `tcp://127.0.0.1:<port>`, listening on a port of its own."""
    proxy = TcpProxy(int(address.rpartition(":")[2]))
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
        await proxy.end()
        await server.wait_closed()
