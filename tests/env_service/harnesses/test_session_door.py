"""The door to a session: what goes through, what does not, and what a flood comes to."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvloop
from aiohttp import web

from env_service.environments.interface import AgentClient
from env_service.harnesses import session_door as doors
from env_service.harnesses.session_door import ByteAllowance, session_door
from tests.env_service.peers import served

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
ASKS = b"POST /v1/chat/completions?beta=true HTTP/1.1\r\nAuthorization: Bearer of-others\r\nContent-Length: 2\r\n"
ASKS += b"X-Stainless-Retry-Count: 1\r\nContent-Type: application/json\r\nCookie: x\r\n\r\n{}"


@dataclass
class OpenDoor:
    """A door to a session that keeps what came through."""

    port: int
    passed: list[web.Request] = field(default_factory=list)

    async def says(self, request: bytes) -> str:
        """The whole answer to a request."""
        async with asyncio.timeout(20):
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            writer.write(request)
            answer = await reader.read()
            writer.close()
            return answer.decode()


@asynccontextmanager
async def open_door(handler: Handler | None = None) -> AsyncIterator[OpenDoor]:
    async def kept(request: web.Request) -> web.StreamResponse:
        door.passed.append(request)
        await request.read()
        return await handler(request) if handler is not None else web.json_response({"it": "answers"})

    listener = socket.create_server(("127.0.0.1", 0))
    door = OpenDoor(listener.getsockname()[1])

    async def nothing() -> Any: ...

    async with served(kept, "/v1/sessions/mine/{rest:.*}") as url:
        mine = f"{url}/v1/sessions/mine/v1"
        client = AgentClient(base_url=mine, key="hw-key", model="policy", seed=0, posted=nothing, offer=nothing)
        async with session_door(listener, client) as inside:
            assert inside == f"http://127.0.0.1:{door.port}"
            yield door


async def test_a_request_goes_to_its_session_with_the_key_that_nobody_inside_has() -> None:
    async with open_door() as door:
        answer = await door.says(ASKS)

    (passed,) = door.passed
    assert (passed.method, passed.raw_path) == ("POST", "/v1/sessions/mine/v1/chat/completions")
    assert passed.headers["Authorization"] == "Bearer hw-key"
    assert passed.headers["x-stainless-retry-count"] == "1"
    assert "Cookie" not in passed.headers
    assert answer.startswith("HTTP/1.1 200 ")
    assert '{"it": "answers"}' in answer


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"POST /reward HTTP/1.1\r\n\r\n", 404),
        (b"POST /commands HTTP/1.1\r\n\r\n", 404),
        (b"POST /v1/sessions HTTP/1.1\r\n\r\n", 404),
        (b"POST /v1/sessions/other/v1/chat/completions HTTP/1.1\r\n\r\n", 404),
        (b"POST /v1/models/../../reward HTTP/1.1\r\n\r\n", 404),
        (b"GET /v1/chat/completions HTTP/1.1\r\n\r\n", 404),
        (b"GET http://169.254.169.254/v1/models HTTP/1.1\r\n\r\n", 404),
        (b"CONNECT 127.0.0.1:7310 HTTP/1.1\r\n\r\n", 404),
        (b"POST /v1/messages HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n", 411),
        (b"POST /v1/messages HTTP/1.1\r\nContent-Length: 4194305\r\n\r\n", 413),
        (b"POST /v1/messages HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 400),
        (b"POST /v1/messages HTTP/1.1\r\nContent-Type: a\nAuthorization: b\r\n\r\n", 400),
        (b"POST /v1/messages HTTP/1.1\r\nX: " + bytes(20_000) + b"\r\n\r\n", 431),
        (b"\0\r\n\r\n", 400),
    ],
)
async def test_nothing_else_goes_through(request_: bytes, status: int) -> None:
    async with open_door() as door:
        assert (await door.says(request_)).startswith(f"HTTP/1.1 {status} ")
        assert not door.passed
        assert (await door.says(ASKS)).startswith("HTTP/1.1 200 ")


async def test_an_answer_comes_as_it_grows_and_a_client_that_leaves_is_gone_for_the_session_too() -> None:
    left = asyncio.Event()

    async def grow(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        await answer.write(b"data: one\n\n")
        while request.transport is not None and not request.transport.is_closing():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        left.set()
        return answer

    async with open_door(grow) as door, asyncio.timeout(20):
        reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
        writer.write(ASKS)
        assert b"text/event-stream" in await reader.readuntil(b"\r\n\r\n")
        assert await reader.readuntil(b"one\n\n")
        writer.close()
        await left.wait()


def test_a_client_that_breaks_off_in_an_answer_leaves_the_door_open() -> None:
    begun, mute = asyncio.Event(), socket.socket()

    async def grow(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        await answer.write(b"one")
        if not begun.is_set():
            await begun.wait()
            mute.close()  # with bytes that it has not read, which is a reset; the door hears of both at once
            await answer.write(b"two")
        return answer

    async def break_off() -> None:
        async with open_door(grow) as door:
            mute.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(mute, ("127.0.0.1", door.port))
            await loop.sock_sendall(mute, ASKS)
            await loop.sock_recv(mute, 1)
            begun.set()
            await asyncio.sleep(0.05)
            assert "one" in await door.says(ASKS)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as the process has it
        runner.run(break_off())


async def test_a_flood_waits_at_the_door() -> None:
    flooding: list[socket.socket] = []
    async with open_door() as door:
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(90):
            flooding.append(socket.create_connection(("127.0.0.1", door.port)))
            flooding[-1].send(b"POST /v1/")
        await asyncio.sleep(0.1)
        ours = len(os.listdir("/proc/self/fd")) - before - len(flooding)
        for each in flooding:
            each.close()
        assert ours == doors.MAX_CONNECTIONS
        assert (await door.says(ASKS)).startswith("HTTP/1.1 200 ")


async def test_requests_and_their_bytes_wait_for_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    take = ByteAllowance.take

    async def noted(self: ByteAllowance, count: int) -> None:
        taken.append(count)
        await take(self, count)

    monkeypatch.setattr(ByteAllowance, "take", noted)
    async with open_door() as door:
        await door.says(ASKS.replace(b" 2\r\n", b" 70000\r\n").removesuffix(b"{}") + b"x" * 70_000)
        assert taken.count(64 << 10) == 2, "the next connection waits for its turn already"
        assert sum(taken) == 2 * (64 << 10) + 70_000


async def test_what_is_beyond_an_allowance_takes_its_time() -> None:
    clock = asyncio.get_running_loop().time
    allowance = ByteAllowance(per_s=1000, at_once=50)
    began = clock()
    for _ in range(5):
        await allowance.take(50)
    assert clock() - began >= 0.19
