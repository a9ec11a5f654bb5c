"""HTTP load whose requests start when they are due, whether earlier ones are answered or not.

Latency counts from the moment at which a request was due: a server that falls behind cannot hide it. How far the sender
itself fell behind is counted beside it: what it could not send, the server did not have to bear.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

_MAX_CONNECTIONS = 1000
_TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class RepeatedRequest:
    """A request that is sent again and again. `expected` is in a right answer `times` times."""

    host: str
    port: int
    request: bytes
    expected: bytes
    times: int


@dataclass
class LoadResult:
    """Results of a load: statuses, latencies in seconds by status, answers that were not right.

    `late`: how many seconds after they were due requests were sent.
    """

    seconds: float = 0.0
    statuses: Counter[int] = field(default_factory=Counter)
    latencies: dict[int, list[float]] = field(default_factory=dict)
    late: list[float] = field(default_factory=list)
    wrong: int = 0

    def note(self, status: int, latency_s: float) -> None:
        """Counts an answer."""
        self.statuses[status] += 1
        self.latencies.setdefault(status, []).append(latency_s)


def percentile(values: Sequence[float], part: float) -> float:
    """The value below which `part` of them lie; NaN of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else float("nan")


class _Connection(asyncio.Protocol):
    """A connection, one request at a time. A protocol, not a stream: the sender shares two cores with the server."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._body_at: int | None = None
        self._ends_at = 0
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def ask(self, request: bytes) -> asyncio.Future[tuple[int, bytes]]:
        """Status and body of the answer. Raises OSError."""
        assert self.transport is not None
        self._answer = asyncio.get_running_loop().create_future()
        if self.transport.is_closing():
            self._answer.set_exception(ConnectionResetError("closed between two requests"))
        self.transport.write(request)
        return self._answer

    def data_received(self, data: bytes) -> None:
        self._received += data
        if self._body_at is None:
            head_ends = self._received.find(b"\r\n\r\n")
            if head_ends < 0:
                return
            head = self._received[:head_ends].lower() + b"\r\n"
            self._body_at = head_ends + 4
            self._ends_at = self._body_at + int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
        if len(self._received) >= self._ends_at:
            answer = int(self._received[9:12]), bytes(self._received[self._body_at : self._ends_at])
            self._received, self._body_at = bytearray(), None
            if self._answer is not None and not self._answer.done():
                self._answer.set_result(answer)

    def connection_lost(self, error: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error or ConnectionResetError("closed before the answer"))


class _Connections:
    """Idle ones first, the last used before others; new ones when none is idle."""

    def __init__(self, target: RepeatedRequest) -> None:
        self._target = target
        self._idle: list[_Connection] = []
        self._all: list[_Connection] = []
        self._places = asyncio.Semaphore(_MAX_CONNECTIONS)

    async def ask(self, load: LoadResult, *, due: float) -> None:
        async with self._places:
            try:
                connection = self._idle.pop() if self._idle else await self._connect()
                load.late.append(time.perf_counter() - due)
                status, body = await connection.ask(self._target.request)
            except OSError:
                load.note(0, time.perf_counter() - due)
                return
        load.note(status, time.perf_counter() - due)
        self._idle.append(connection)
        if status == 200 and body.count(self._target.expected) != self._target.times:
            load.wrong += 1

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(_Connection, self._target.host, self._target.port)
        self._all.append(connection)
        return connection

    def close(self) -> None:
        for connection in self._all:
            if connection.transport is not None:
                connection.transport.close()


async def open_loop(target: RepeatedRequest, *, per_s: float, seconds: float) -> LoadResult:
    """Requests that start evenly, `per_s` in a second. Status 0 counts those without an answer, after a minute too."""
    load, connections = LoadResult(), _Connections(target)
    began = time.perf_counter()
    asked: set[asyncio.Task[None]] = set()
    for number in range(int(per_s * seconds)):
        due = began + number / per_s
        if (wait_s := due - time.perf_counter()) > 0:
            await asyncio.sleep(wait_s)
        elif number % 16 == 0:
            await asyncio.sleep(0)  # also one that is behind listens to the answers
        asking = asyncio.create_task(connections.ask(load, due=due))
        asked.add(asking)
        asking.add_done_callback(asked.discard)
    if asked:
        _, silent = await asyncio.wait(asked, timeout=_TIMEOUT_S)
        if silent:
            load.statuses[0] += len(silent)
            await _end(silent)
    load.seconds = time.perf_counter() - began
    connections.close()
    return load


async def closed_loop(target: RepeatedRequest, *, clients: int, seconds: float) -> LoadResult:
    """Clients that send their next request as soon as they have an answer: what the server can do at most."""
    load, connections = LoadResult(), _Connections(target)
    began = time.perf_counter()

    async def ask_again() -> None:
        while (due := time.perf_counter()) < began + seconds:
            await connections.ask(load, due=due)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(clients):
            tasks.create_task(ask_again())
    load.seconds = time.perf_counter() - began
    connections.close()
    return load


async def _end(tasks: set[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
