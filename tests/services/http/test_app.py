"""Refusals over a real socket: each is clear, counted, and closes nothing for others."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

import aiohttp
import pytest
from fastapi import Depends, FastAPI
from pydantic import BaseModel, Field, SecretStr

from protocol.model import WireModel
from protocol.status import ErrorBody, ErrorDetail, Readiness
from services.http.app import create_app
from services.http.bodies import json_answer, json_body, streamed_answer
from services.http.metrics import Metrics
from services.http.refusals import RequestRefused
from services.http.server import Listener, serve_http

TOKEN = SecretStr("open sesame")
AUTHORIZED = {"Authorization": "Bearer open sesame"}


class Ask(WireModel):
    tokens: tuple[int, ...] = Field(max_length=4)
    temperature: float = Field(1.0, gt=0)


class ReadinessSwitch:
    """A readiness that a test sets."""

    def __init__(self) -> None:
        self.state = Readiness(ready=False, waiting_for=("the learner",), waiting_s=3.5)

    def __call__(self) -> Readiness:
        return self.state


def make_app(switch: ReadinessSwitch) -> FastAPI:
    app = create_app(
        service="learner",
        version="0.1.0",
        token=TOKEN,
        readiness=switch,
        metrics=Metrics("learner"),
        max_body_bytes=1000,
    )

    @app.post("/v1/echo")
    async def echo(body: Annotated[Ask, Depends(json_body(Ask))]) -> object:
        if body.tokens == (13,):
            raise RequestRefused(409, "unlucky", "token 13 is refused here")
        if body.tokens == (500,):
            raise KeyError("inside")
        return json_answer(body)

    @app.post("/v1/stream")
    async def stream(body: Annotated[Ask, Depends(json_body(Ask))]) -> object:
        async def parts() -> AsyncIterator[BaseModel]:
            for token in body.tokens:
                if token == 13:
                    raise RequestRefused(409, "unlucky", "token 13 is refused here")
                yield Ask(tokens=(token,))

        return streamed_answer(parts())

    @app.post("/v1/together")
    async def together(body: Annotated[Ask, Depends(json_body(Ask))]) -> object:
        async def parts() -> AsyncIterator[tuple[BaseModel, ...]]:
            yield tuple(Ask(tokens=(token,)) for token in body.tokens)
            yield (Ask(tokens=(9,)),)

        return streamed_answer(parts())

    return app


@asynccontextmanager
async def serving(app: FastAPI) -> AsyncIterator[str]:
    """The address of a server of `app`."""
    with Listener(host="127.0.0.1", port=0) as listener:
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            server = group.create_task(serve_http(app, listener, finish_s=1))
            yield listener.url
            server.cancel()


@pytest.fixture
def switch() -> ReadinessSwitch:
    return ReadinessSwitch()


@pytest.fixture
async def session(switch: ReadinessSwitch) -> AsyncIterator[aiohttp.ClientSession]:
    async with serving(make_app(switch)) as url, aiohttp.ClientSession(base_url=url) as client:
        yield client


async def refusal(
    session: aiohttp.ClientSession, body: bytes, *, token: str = "open sesame"
) -> tuple[int, ErrorDetail]:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with session.post("/v1/echo", data=body, headers=headers) as answer:
        return answer.status, ErrorBody.model_validate_json(await answer.read()).error


async def test_health_readiness_and_metrics_need_no_token(
    session: aiohttp.ClientSession, switch: ReadinessSwitch
) -> None:
    async with session.get("/healthz") as answer:
        assert answer.status == 200
    async with session.get("/readyz") as answer:
        assert answer.status == 503
        assert Readiness.model_validate_json(await answer.read()) == switch.state
    switch.state = Readiness(ready=True)
    async with session.get("/readyz") as answer:
        assert answer.status == 200
    async with session.get("/metrics") as answer:
        assert "headway_learner_refused_requests" in await answer.text()


async def test_a_body_that_fits_is_served(session: aiohttp.ClientSession) -> None:
    async with session.post("/v1/echo", data=b'{"tokens":[1,2]}', headers=AUTHORIZED) as answer:
        assert Ask.model_validate_json(await answer.read()) == Ask(tokens=(1, 2))


async def test_a_wrong_or_missing_token_is_401(session: aiohttp.ClientSession) -> None:
    for token in ("", "wrong", "open sesame ", "open sesam", "open", "Open sesame"):
        status, error = await refusal(session, b"{}", token=token)
        assert (status, error.kind) == (401, "unauthorized")
        assert "sesame" not in error.message
    for shown in ({}, {"Authorization": "Bearer"}, {"Authorization": ""}):
        async with session.get("/openapi.json", headers=shown) as answer:
            assert answer.status == 401


async def test_a_body_that_does_not_arrive_is_408_and_names_its_sender(switch: ReadinessSwitch) -> None:
    app = make_app(switch)

    @app.post("/v1/impatient")
    async def impatient(body: Annotated[Ask, Depends(json_body(Ask, deadline_s=0.1))]) -> object:
        return json_answer(body)

    async with serving(app) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        host, port = writer.get_extra_info("sockname")
        head = f"POST /v1/impatient HTTP/1.1\r\nHost: x\r\nAuthorization: {AUTHORIZED['Authorization']}\r\n"
        writer.write(f"{head}Content-Length: 14\r\n\r\n{{".encode())
        answer = (await reader.readuntil(b"\r\n\r\n")).decode()
        body = await reader.readuntil(b"}}")
        writer.close()
    assert " 408 " in answer.splitlines()[0]
    assert f"{host}:{port} did not send its body in 0.1 s" in ErrorBody.model_validate_json(body).error.message


async def test_a_body_that_is_not_json_is_400(session: aiohttp.ClientSession) -> None:
    for body in (b"", b"{", b"\xff\xfe", b'{"tokens":[1,'):
        status, error = await refusal(session, body)
        assert (status, error.kind) == (400, "malformed_json")


async def test_a_field_that_does_not_fit_is_named_with_what_was_got_and_expected(
    session: aiohttp.ClientSession,
) -> None:
    status, error = await refusal(session, b'{"tokens":[1,"two"]}')
    assert (status, error.kind, error.field) == (422, "invalid_field", "tokens.1")
    assert (error.got, error.expected) == ("'two'", "a valid integer")
    status, error = await refusal(session, b'{"tokens":[1],"temprature":2}')
    assert (status, error.kind, error.field) == (422, "unknown_field", "temprature")
    assert (await refusal(session, b'{"tokens":[1],"temperature":-1}'))[1].expected == "greater than 0"
    assert (await refusal(session, b"[]"))[1].field == "body"


async def test_a_body_over_the_limit_is_413_announced_or_not(session: aiohttp.ClientSession) -> None:
    status, error = await refusal(session, b" " * 1001)
    assert (status, error.kind) == (413, "body_too_large")

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b" " * 100

    async with session.post("/v1/echo", data=chunks(), headers=AUTHORIZED) as answer:
        assert answer.status == 413
        assert (await answer.json())["error"]["got"] > 1000


async def test_a_handlers_refusal_an_unknown_route_and_a_wrong_method_are_answered(
    session: aiohttp.ClientSession,
) -> None:
    status, error = await refusal(session, b'{"tokens":[13]}')
    assert (status, error.kind, error.message) == (409, "unlucky", "token 13 is refused here")
    async with session.get("/v1/none", headers=AUTHORIZED) as answer:
        assert (answer.status, (await answer.json())["error"]["kind"]) == (404, "unknown_route")
    async with session.get("/v1/echo", headers=AUTHORIZED) as answer:
        assert (answer.status, (await answer.json())["error"]["kind"]) == (405, "wrong_method")


async def test_an_error_inside_is_500_and_the_server_goes_on(session: aiohttp.ClientSession) -> None:
    status, error = await refusal(session, b'{"tokens":[500]}')
    assert (status, error.kind) == (500, "internal")
    assert "KeyError" in error.message
    async with session.get("/healthz") as answer:
        assert answer.status == 200


async def test_refusals_are_counted_by_reason(session: aiohttp.ClientSession) -> None:
    await refusal(session, b"{")
    await refusal(session, b'{"tokens":[13]}')
    await refusal(session, b"{}", token="wrong")
    await refusal(session, b" " * 1001)
    async with session.get("/metrics") as answer:
        text = await answer.text()
    for reason in ("malformed_json", "unlucky", "unauthorized", "body_too_large"):
        assert f'headway_learner_refused_requests_total{{reason="{reason}"}} 1.0' in text


async def test_parts_are_streamed_as_lines_and_a_late_refusal_is_the_last(session: aiohttp.ClientSession) -> None:
    async with session.post("/v1/stream", data=b'{"tokens":[1,2,13,4]}', headers=AUTHORIZED) as answer:
        assert answer.status == 200
        lines = (await answer.text()).splitlines()
    assert [json.loads(line).get("tokens") for line in lines] == [[1], [2], None]
    assert ErrorBody.model_validate_json(lines[-1]).error.kind == "unlucky"


async def test_parts_of_a_tuple_are_lines_of_one_chunk(session: aiohttp.ClientSession) -> None:
    async with session.post("/v1/together", data=b'{"tokens":[1,2,3]}', headers=AUTHORIZED) as answer:
        chunks = [chunk async for chunk, _ in answer.content.iter_chunks() if chunk]
    assert [[json.loads(line)["tokens"] for line in chunk.splitlines()] for chunk in chunks] == [[[1], [2], [3]], [[9]]]


async def test_a_wrong_method_is_told_the_right_one(session: aiohttp.ClientSession) -> None:
    async with session.get("/v1/echo", headers=AUTHORIZED) as answer:
        assert (answer.status, answer.headers["Allow"]) == (405, "POST")
