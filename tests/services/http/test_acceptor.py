"""Connections are accepted as they come, all of them, also while the loop turns slowly."""

import asyncio
import errno
import socket
from collections.abc import Iterator
from typing import cast

import pytest
import uvloop

from services.http.server import Acceptor, Listener


class Counted(asyncio.Protocol):
    def __init__(self, made: list["Counted"], first: asyncio.Event | None = None) -> None:
        self._made = made
        self._first = first or asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._made.append(self)
        self._first.set()


@pytest.fixture
def listener() -> Iterator[Listener]:
    with Listener(host="127.0.0.1", port=0) as listening:
        yield listening


def connected(listener: Listener, *, clients: int) -> list[socket.socket]:
    return [socket.create_connection(("127.0.0.1", listener.port), timeout=10) for _ in range(clients)]


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def ended(acceptor: Acceptor, made: list[Counted]) -> None:
    acceptor.close()
    for protocol in made:
        protocol.transport.abort()
    await turns(5)


def test_all_that_wait_are_accepted_in_a_few_turns_of_the_loop(listener: Listener) -> None:
    made: list[Counted] = []
    waiting = connected(listener, clients=100)

    async def accept() -> None:
        acceptor = Acceptor(listener.socket, lambda: Counted(made))
        await turns(20)
        await ended(acceptor, made)

    uvloop.run(accept())
    assert len(made) == 100
    for client in waiting:
        client.close()


def test_it_accepts_no_more_once_closed(listener: Listener) -> None:
    made: list[Counted] = []

    async def accept() -> None:
        Acceptor(listener.socket, lambda: Counted(made)).close()
        with connected(listener, clients=1)[0]:
            await turns(20)

    uvloop.run(accept())
    assert made == []


class Exhausted:
    """A listening socket whose first connection finds no file descriptor left."""

    def __init__(self, real: socket.socket) -> None:
        self._real = real
        self.failures = 0

    def fileno(self) -> int:
        return self._real.fileno()

    def accept(self) -> tuple[socket.socket, object]:
        if self.failures == 0:
            self.failures += 1
            raise OSError(errno.EMFILE, "too many open files")
        return self._real.accept()


def test_without_descriptors_it_pauses_and_comes_back(
    listener: Listener, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("services.http.server._PAUSE_S", 0.01)
    made: list[Counted] = []
    exhausted = Exhausted(listener.socket)

    async def accept() -> None:
        first = asyncio.Event()
        acceptor = Acceptor(exhausted, lambda: Counted(made, first))  # type: ignore[arg-type]
        async with asyncio.timeout(60):
            await first.wait()
        await ended(acceptor, made)

    with connected(listener, clients=1)[0]:
        uvloop.run(accept())
    assert exhausted.failures == 1
    assert "no connection can be accepted for 0.01 s" in caplog.text
