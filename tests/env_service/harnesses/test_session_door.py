"""The door to a session: what goes through, what does not, and what a flood comes to."""

import asyncio
import http.client
import json
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
from env_service.harnesses.door_bounds import ByteAllowance
from env_service.harnesses.session_door import session_door
from tests.env_service.peers import eventually, served

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
ASKS = b"POST /v1/chat/completions?beta=true HTTP/1.1\r\nAuthorization: Bearer of-others\r\nContent-Length: 2\r\n"
ASKS += b"X-Stainless-Retry-Count: 1\r\nContent-Type: application/json\r\nCookie: x\r\n\r\n{}"


@dataclass
class OpenDoor:
    """A door to a session that keeps what came through."""

    port: int
    passed: list[web.Request] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)

    async def says(self, request: bytes) -> str:
        """The whole answer to a request."""
        return (await self.answers(request)).decode()

    async def answers(self, request: bytes, *, half_closed: bool = False) -> bytes:
        """The whole answer; `half_closed`: to a client that closes its sending side behind the request."""
        async with asyncio.timeout(20):
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            writer.write(request)
            if half_closed:
                writer.write_eof()
            answer = await reader.read()
            writer.close()
            return answer


@asynccontextmanager
async def open_door(handler: Handler | None = None) -> AsyncIterator[OpenDoor]:
    async def kept(request: web.Request) -> web.StreamResponse:
        door.passed.append(request)
        door.lengths.append(len(await request.content.read()))  # larger ones, too, than `request.read` takes
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


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_client_that_closes_its_sending_side_gets_its_answer(loop_factory: Callable[[], Any]) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(0.3)  # in which one that has left is noticed
        return web.json_response({"it": "answers"})

    async def close_first() -> None:
        async with open_door(answer) as door:
            head, _, body = (await door.answers(ASKS, half_closed=True)).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 ")
            assert body == b'{"it": "answers"}'

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(close_first())


ASKS_AS_BEFORE = ASKS.replace(b"HTTP/1.1", b"HTTP/1.0")


async def grown(request: web.Request) -> web.StreamResponse:
    answer = web.StreamResponse()
    await answer.prepare(request)
    for part in (b"data: one\n\n", b"data: two\n\n"):
        await answer.write(part)
        await asyncio.sleep(0.01)
    return answer


async def test_a_client_of_http_1_0_is_answered_as_it_reads() -> None:
    async with open_door() as door:
        head, _, body = (await door.answers(ASKS_AS_BEFORE)).partition(b"\r\n\r\n")
        assert b"chunked" not in head
        assert b"Content-Length: 17" in head.splitlines()
        assert body == b'{"it": "answers"}'
        refused = (await door.answers(b"POST /reward HTTP/1.0\r\n\r\n")).partition(b"\r\n\r\n")[2]
        assert json.loads(refused)["error"]["code"] == "not_passed_on"

    async with open_door(grown) as door:
        head, _, body = (await door.answers(ASKS_AS_BEFORE)).partition(b"\r\n\r\n")
        assert b"chunked" not in head
        assert body == b"data: one\n\ndata: two\n\n"


async def test_half_an_answer_is_no_whole_one_for_a_client_that_reads_to_the_end_of_its_connection() -> None:
    async def breaks_off(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        await answer.write(b"half")
        assert request.transport is not None
        request.transport.abort()
        return answer

    async with open_door(breaks_off) as door:
        with pytest.raises(ConnectionResetError):
            await door.answers(ASKS_AS_BEFORE)


def asks(length: int) -> bytes:
    """The beginning of a request whose body has that many bytes."""
    return ASKS.replace(b" 2\r\n", b" %d\r\n" % length).removesuffix(b"{}")


async def test_one_that_sends_too_much_reads_why_it_is_refused() -> None:
    def ask(port: int) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        try:
            connection.request("POST", "/v1/messages", b"x" * (9 << 20))
            answer = connection.getresponse()
            return answer.status, json.load(answer)["error"]["message"]
        finally:
            connection.close()

    async with open_door() as door:
        status, message = await asyncio.to_thread(ask, door.port)
    assert (status, door.passed) == (413, [])
    assert message == "the body has 9437184 bytes; expected at most 4194304: send less at once"


async def test_bodies_beyond_what_is_held_at_once_wait_until_others_are_answered() -> None:
    came: asyncio.Queue[asyncio.Event] = asyncio.Queue()

    async def hold(request: web.Request) -> web.StreamResponse:
        answered = asyncio.Event()
        came.put_nowait(answered)
        await answered.wait()
        return web.json_response({"it": "answers"})

    async with open_door(hold) as door, asyncio.timeout(20):
        largest = asks(doors.MAX_BODY) + b"x" * doors.MAX_BODY
        asking = [asyncio.ensure_future(door.says(largest)) for _ in range(2)]
        first, second = await came.get(), await came.get()
        asking.append(asyncio.ensure_future(door.says(ASKS)))
        await asyncio.sleep(0.3)
        assert came.empty(), "the third waits, small as it is"
        first.set()
        third = await came.get()
        for each in (second, third):
            each.set()
        assert {(await each).partition("\r\n")[0] for each in asking} == {"HTTP/1.1 200 OK"}
    assert door.lengths == [doors.MAX_BODY, doors.MAX_BODY, 2]


async def test_a_client_that_leaves_while_it_waits_for_room_asks_for_nothing() -> None:
    over = asyncio.Event()

    async def slow(_request: web.Request) -> web.StreamResponse:
        await over.wait()
        return web.json_response({})

    head = b"POST /v1/messages HTTP/1.1\r\nContent-Length: %d\r\n\r\n"
    async with open_door(slow) as door, asyncio.timeout(20):
        large = head % doors.MAX_BODY + bytes(doors.MAX_BODY)
        asked = [asyncio.ensure_future(door.says(large)) for _ in range(doors.MAX_BODIES // doors.MAX_BODY)]
        await eventually(lambda: len(door.lengths) == len(asked))
        gone = (await asyncio.open_connection("127.0.0.1", door.port))[1]
        gone.write(ASKS)
        await gone.drain()
        gone.close()
        await gone.wait_closed()
        waiting = asyncio.ensure_future(door.answers(ASKS, half_closed=True))
        assert " 404 " in await door.says(b"GET / HTTP/1.1\r\n\r\n"), "those before it have come in"
        over.set()
        assert b"HTTP/1.1 200 OK" in await waiting
        await asyncio.gather(*asked)
        assert len(door.passed) == len(asked) + 1


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
        await door.says(asks(70_000) + b"x" * 70_000)
        assert taken.count(64 << 10) == 2, "the next connection waits for its turn already"
        assert sum(taken) == 2 * (64 << 10) + 70_000


async def test_what_is_beyond_an_allowance_takes_its_time() -> None:
    clock = asyncio.get_running_loop().time
    allowance = ByteAllowance(per_s=1000, at_once=50)
    began = clock()
    for _ in range(5):
        await allowance.take(50)
    assert clock() - began >= 0.19
