"""HTTP load whose requests start when they are due, whether earlier ones are answered or not.

Latency counts from the moment at which a request was due: a server that falls behind cannot hide it.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

_MOST_CONNECTIONS = 1000


@dataclass(frozen=True, kw_only=True)
class Target:
    """One request, sent again and again. `expected` is in a right answer `times` times."""

    host: str
    port: int
    request: bytes
    expected: bytes
    times: int


@dataclass
class Load:
    """What came of it: statuses, latencies in seconds by status, answers that were not right."""

    seconds: float = 0.0
    statuses: Counter[int] = field(default_factory=Counter)
    latencies: dict[int, list[float]] = field(default_factory=dict)
    wrong: int = 0
    retry_after: Counter[str] = field(default_factory=Counter)

    def note(self, status: int, latency_s: float) -> None:
        """One answer."""
        self.statuses[status] += 1
        self.latencies.setdefault(status, []).append(latency_s)


def percentile(values: Sequence[float], part: float) -> float:
    """The value below which `part` of them lie; NaN of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else float("nan")


class _Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def ask(self, request: bytes) -> tuple[int, bytes, bytes]:
        """Status, head and body of the answer."""
        self.writer.write(request)
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
        return int(head[9:12]), head, await self.reader.readexactly(length)


class _Connections:
    """Idle ones first, the last used before others; new ones when none is idle."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._idle: list[_Connection] = []
        self._all: list[_Connection] = []
        self._places = asyncio.Semaphore(_MOST_CONNECTIONS)

    async def ask(self, load: Load, *, due: float, timeout_s: float = 60.0) -> None:
        async with self._places:
            try:
                async with asyncio.timeout(timeout_s):
                    connection = self._idle.pop() if self._idle else await self._connect()
                    status, head, body = await connection.ask(self._target.request)
            except (OSError, TimeoutError, asyncio.IncompleteReadError):
                load.note(0, time.perf_counter() - due)
                return
        load.note(status, time.perf_counter() - due)
        self._idle.append(connection)
        if status == 200 and body.count(self._target.expected) != self._target.times:
            load.wrong += 1
        if status == 429:
            load.retry_after[head.lower().partition(b"retry-after:")[2].partition(b"\r\n")[0].strip().decode()] += 1

    async def _connect(self) -> _Connection:
        connection = _Connection(*await asyncio.open_connection(self._target.host, self._target.port))
        self._all.append(connection)
        return connection

    async def close(self) -> None:
        for connection in self._all:
            connection.writer.close()
            with contextlib.suppress(OSError):  # the server has closed it in its own way
                await connection.writer.wait_closed()


async def open_loop(target: Target, *, per_s: float, seconds: float) -> Load:
    """Requests that start evenly, `per_s` in a second. Status 0 counts those without an answer."""
    load, connections = Load(), _Connections(target)
    began = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for number in range(int(per_s * seconds)):
            due = began + number / per_s
            if (wait_s := due - time.perf_counter()) > 0:
                await asyncio.sleep(wait_s)
            tasks.create_task(connections.ask(load, due=due))
    load.seconds = time.perf_counter() - began
    await connections.close()
    return load


async def closed_loop(target: Target, *, clients: int, seconds: float) -> Load:
    """Clients that send their next request as soon as they have an answer: what the server can do at most."""
    load, connections = Load(), _Connections(target)
    began = time.perf_counter()

    async def ask_again() -> None:
        while (due := time.perf_counter()) < began + seconds:
            await connections.ask(load, due=due)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(clients):
            tasks.create_task(ask_again())
    load.seconds = time.perf_counter() - began
    await connections.close()
    return load
