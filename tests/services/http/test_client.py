"""Deadlines, retries and the error tree, against a real server."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Annotated

import pytest
from fastapi import Depends
from pydantic import BaseModel, SecretStr
from starlette.responses import Response, StreamingResponse

from protocol.model import WireModel
from protocol.status import Readiness
from services.http.app import create_app
from services.http.bodies import json_answer, json_body, streamed_answer
from services.http.client import (
    HttpClient,
    ServiceError,
    ServiceFailed,
    ServiceRefused,
    ServiceTimeout,
    ServiceUnreachable,
)
from services.http.metrics import Metrics
from services.http.refusals import RequestRefused
from services.http.server import Listener, serve_http

TOKEN = SecretStr("open sesame")


class AskHow(WireModel):
    how: str = "echo"


class Part(WireModel):
    number: int
    padding: str = ""


class AskServer:
    """A server whose answers a test picks with `AskHow.how`."""

    def __init__(self, listener: Listener) -> None:
        self.url = listener.url
        self.calls = 0
        self.stream_closed = asyncio.Event()
        self.go_on = asyncio.Event()
        self.meeting = asyncio.Barrier(300)
        metrics = Metrics("learner")
        ready = Readiness(ready=True)
        self.app = create_app(service="learner", version="0.1.0", token=TOKEN, readiness=lambda: ready, metrics=metrics)
        self.app.post("/ask")(self.ask_route())
        self.app.get("/slow")(self.slow_route())
        self.app.post("/stream")(self.stream_route())

    def ask_route(self) -> Callable[[AskHow], Awaitable[Response]]:
        async def ask(body: Annotated[AskHow, Depends(json_body(AskHow))]) -> Response:
            self.calls += 1
            match body.how:
                case "hang":
                    await asyncio.Event().wait()
                case "meet":
                    await self.meeting.wait()
                case "refuse":
                    raise RequestRefused(409, "unlucky", "not today")
                case "fail":
                    raise RequestRefused(503, "busy", "come back later")
                case "fail twice" if self.calls < 3:
                    raise RequestRefused(503, "busy", "come back later")
                case "other":
                    return Response('{"what": 1}')
                case "big":
                    return Response("x" * 5000)
            return json_answer(body)

        return ask

    def slow_route(self) -> Callable[[bool], Awaitable[Response]]:
        async def late(told: asyncio.Event) -> AsyncIterator[bytes]:
            yield b"x" * 1000
            await told.wait()
            yield b"x" * 1000

        async def slow(length: bool) -> Response:
            headers = {"Content-Length": "2000"} if length else {}
            return StreamingResponse(late(self.go_on), headers=headers)

        return slow

    def stream_route(self) -> Callable[[AskHow], Awaitable[Response]]:
        async def stream(body: Annotated[AskHow, Depends(json_body(AskHow))]) -> Response:
            if body.how == "refuse":
                raise RequestRefused(409, "unlucky", "not today")
            return streamed_answer(self.parts(body.how))

        return stream

    async def parts(self, how: str) -> AsyncIterator[BaseModel]:
        try:
            for number in itertools.count():
                if number == 3:
                    match how:
                        case "three":
                            return
                        case "refuse late":
                            raise RequestRefused(409, "unlucky", "not today")
                        case "break":
                            raise ValueError("inside")
                        case "hang":
                            await asyncio.Event().wait()
                yield Part(number=number, padding="x" * 3000)
        finally:
            self.stream_closed.set()


@pytest.fixture
async def server() -> AsyncIterator[AskServer]:
    with Listener(host="127.0.0.1", port=0) as listener:
        made = AskServer(listener)
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            task = group.create_task(serve_http(made.app, listener, finish_s=1))
            yield made
            task.cancel()


@pytest.fixture
async def client() -> AsyncIterator[HttpClient]:
    async with HttpClient(token=TOKEN, backoff_s=0.0, max_answer_bytes=4000) as made:
        yield made


async def ask(client: HttpClient, server: AskServer, how: str, *, deadline_s: float = 10, retries: int = 0) -> AskHow:
    return await client.post(
        f"{server.url}/ask", AskHow(how=how), AskHow, deadline_s=deadline_s, retries=retries, idempotent=True
    )


async def numbers(client: HttpClient, server: AskServer, how: str, *, idle_timeout_s: float = 5) -> list[int]:
    url = f"{server.url}/stream"
    async with client.stream(url, AskHow(how=how), Part, deadline_s=10, idle_timeout_s=idle_timeout_s) as parts:
        return [part.number async for part in parts]


async def test_a_model_goes_out_and_a_model_comes_back(client: HttpClient, server: AskServer) -> None:
    assert await ask(client, server, "echo") == AskHow(how="echo")
    assert (await client.get(f"{server.url}/readyz", Readiness, deadline_s=5)).ready


async def test_a_refusal_carries_the_counterparts_words_and_is_not_retried(
    client: HttpClient, server: AskServer
) -> None:
    with pytest.raises(ServiceRefused, match=r"http://127.*/ask: refused with 409 unlucky: not today") as caught:
        await ask(client, server, "refuse", retries=3)
    assert (caught.value.status, caught.value.kind, caught.value.url) == (409, "unlucky", f"{server.url}/ask")
    assert server.calls == 1


async def test_a_wrong_token_is_a_refusal(server: AskServer) -> None:
    async with HttpClient(token=SecretStr("wrong")) as stranger:
        with pytest.raises(ServiceRefused, match="401 unauthorized"):
            await ask(stranger, server, "echo")


async def test_a_failure_is_retried_until_it_ends(client: HttpClient, server: AskServer) -> None:
    assert await ask(client, server, "fail twice", retries=2) == AskHow(how="fail twice")
    assert server.calls == 3
    with pytest.raises(ServiceFailed, match="503 busy"):
        await ask(client, server, "fail", retries=1)
    assert server.calls == 5


async def test_a_call_that_is_not_idempotent_is_not_repeated_once_it_may_have_arrived(
    client: HttpClient, server: AskServer
) -> None:
    with pytest.raises(ServiceFailed):
        await client.post(f"{server.url}/ask", AskHow(how="fail"), AskHow, deadline_s=5, retries=3)
    assert server.calls == 1


async def test_nobody_there_is_unreachable_and_names_the_address(client: HttpClient) -> None:
    with Listener(host="127.0.0.1", port=0) as listener:
        url = f"{listener.url}/ask"
    with pytest.raises(ServiceUnreachable, match="cannot connect") as caught:
        await client.post(url, AskHow(), AskHow, deadline_s=5, retries=2)
    assert not caught.value.sent
    assert url in str(caught.value)


async def test_a_connection_that_breaks_is_unreachable_and_may_have_been_sent(client: HttpClient) -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.close()

    async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(ServiceUnreachable, match="the connection broke") as caught:
            await client.post(f"http://127.0.0.1:{port}/", AskHow(), AskHow, deadline_s=5)
    assert caught.value.sent


async def test_a_call_that_a_broken_connection_may_have_brought_there_is_not_repeated(client: HttpClient) -> None:
    requests = 0

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal requests
        await reader.readline()
        requests += 1
        writer.close()

    async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        with pytest.raises(ServiceUnreachable):
            await client.post(url, AskHow(), AskHow, deadline_s=5, retries=3)
        assert requests == 1
        with pytest.raises(ServiceUnreachable):
            await client.post(url, AskHow(), AskHow, deadline_s=5, retries=3, idempotent=True)
        assert requests == 5


async def test_nobody_is_followed_to_another_address(client: HttpClient) -> None:
    """It would be shown the token, and what was meant for somebody else."""
    arrived: list[str] = []

    async def elsewhere(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        arrived.append((await reader.readline()).decode())
        writer.close()

    async with await asyncio.start_server(elsewhere, "127.0.0.1", 0) as other:
        target = f"http://127.0.0.1:{other.sockets[0].getsockname()[1]}/"

        async def redirect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(f"HTTP/1.1 307 Away\r\nLocation: {target}\r\nContent-Length: 0\r\n\r\n".encode())
            await writer.drain()
            writer.close()

        async with await asyncio.start_server(redirect, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
            with pytest.raises(ServiceError):
                await client.post(url, AskHow(), AskHow, deadline_s=5)
    assert arrived == []


async def test_a_deadline_covers_all_attempts(client: HttpClient, server: AskServer) -> None:
    with pytest.raises(ServiceTimeout, match="deadline"):
        await ask(client, server, "hang", deadline_s=0.05, retries=100)
    assert server.calls == 1


async def test_an_answer_of_another_form_or_size_is_a_failure(client: HttpClient, server: AskServer) -> None:
    with pytest.raises(ServiceFailed, match=r"expected a AskHow, got .*what"):
        await ask(client, server, "other")
    with pytest.raises(ServiceFailed, match="larger than 4000 bytes"):
        await ask(client, server, "big")


async def test_a_download_of_known_length_has_more_time(client: HttpClient, server: AskServer) -> None:
    loop = asyncio.get_running_loop()
    loop.call_later(0.6, server.go_on.set)
    raw, _ = await client.download(f"{server.url}/slow?length=true", deadline_s=0.3, bytes_per_s=100)
    assert len(raw) == 2000


async def test_a_download_without_a_length_has_its_deadline_alone(client: HttpClient, server: AskServer) -> None:
    with pytest.raises(ServiceTimeout):
        await client.download(f"{server.url}/slow?length=false", deadline_s=0.3, bytes_per_s=100)


async def test_parts_arrive_as_models(client: HttpClient, server: AskServer) -> None:
    assert await numbers(client, server, "three") == [0, 1, 2]


async def test_a_stream_that_is_refused_early_or_late_says_so(client: HttpClient, server: AskServer) -> None:
    with pytest.raises(ServiceRefused, match="409 unlucky"):
        await numbers(client, server, "refuse")
    with pytest.raises(ServiceFailed, match="unlucky: not today"):
        await numbers(client, server, "refuse late")


@pytest.mark.parametrize(("how", "error"), [("break", ServiceUnreachable), ("hang", ServiceTimeout)])
async def test_a_stream_that_breaks_or_stalls_is_an_error_after_the_parts_that_came(
    client: HttpClient, server: AskServer, how: str, error: type[ServiceError]
) -> None:
    got: list[int] = []

    async def read() -> None:
        url = f"{server.url}/stream"
        async with client.stream(url, AskHow(how=how), Part, deadline_s=10, idle_timeout_s=0.2) as parts:
            async for part in parts:
                got.append(part.number)

    with pytest.raises(error):
        await read()
    assert got == [0, 1, 2]


async def test_leaving_a_stream_early_closes_it_on_the_server(client: HttpClient, server: AskServer) -> None:
    async with client.stream(
        f"{server.url}/stream", AskHow(how="endless"), Part, deadline_s=10, idle_timeout_s=5
    ) as parts:
        async for part in parts:
            if part.number == 5:
                break
    await server.stream_closed.wait()


async def test_cancelling_a_call_is_a_cancellation_and_no_service_error(client: HttpClient, server: AskServer) -> None:
    async with asyncio.TaskGroup() as group:
        task = group.create_task(ask(client, server, "hang"))
        await asyncio.sleep(0)
        task.cancel()
    assert task.cancelled()


async def test_three_hundred_calls_that_wait_for_each_other_all_get_a_connection(
    client: HttpClient, server: AskServer
) -> None:
    met = await asyncio.gather(*(ask(client, server, "meet", deadline_s=15) for _ in range(300)))
    assert len(met) == 300


async def test_a_host_that_cannot_be_looked_up_is_not_there() -> None:
    async with HttpClient() as client:
        with pytest.raises(ServiceUnreachable, match="no connection") as caught:
            await client.get("http://a..b:7310/v1/status", Readiness, deadline_s=5.0)
    assert not caught.value.sent
