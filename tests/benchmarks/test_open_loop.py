"""The load of the benchmarks: what it counts, with scripted servers."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from benchmarks.open_loop import RepeatedRequest, open_loop, percentile

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def server(serve: Serve) -> AsyncIterator[RepeatedRequest]:
    """A server that treats each connection so, and has closed all of them at the end."""
    writers: list[asyncio.StreamWriter] = []

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        async with asyncio.timeout(60):
            await serve(reader, writer)
        writer.close()

    async with asyncio.timeout(60), await asyncio.start_server(connected, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        yield RepeatedRequest(host="127.0.0.1", port=port, request=b"GET\n", expected=b"1.0", times=2)
        for writer in writers:
            writer.close()
            await writer.wait_closed()


def answer(status: str, body: bytes, header: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\n{header}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def test_answers_are_counted_by_status_and_looked_at() -> None:
    right, wrong = answer("200 OK", b"1.0 1.0"), answer("200 OK", b"1.0 0.0")
    busy = answer("429 Too Many Requests", b"", "Retry-After: 3\r\n")
    answers = iter([right, wrong, busy, b"", right])

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.readline() and (scripted := next(answers)):
            writer.write(scripted)

    async with server(serve) as target:
        load = await open_loop(target, per_s=50.0, seconds=0.1)
    assert load.statuses == {200: 3, 429: 1, 0: 1}
    assert load.wrong == 1
    assert all(latency > 0 for latencies in load.latencies.values() for latency in latencies)


async def test_requests_do_not_wait_for_one_another() -> None:
    """All of them are under way at once: the server answers none before the last has come."""
    count, arrived, all_here = 20, iter(range(1, 21)), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        if next(arrived) == count:
            all_here.set()
        await all_here.wait()
        writer.write(answer("200 OK", b"1.0 1.0"))

    async with server(serve) as target:
        load = await open_loop(target, per_s=1000.0, seconds=count / 1000)
    assert load.statuses == {200: count}


def test_a_percentile_is_a_value_of_the_list() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([3.0, 1.0, 2.0], 0.99) == 3.0
    assert percentile([], 0.5) != percentile([], 0.5)
