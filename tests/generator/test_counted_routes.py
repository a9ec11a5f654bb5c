"""Requests count as being here from when they are taken until the last byte of a stream."""

import asyncio
import warnings
from argparse import Namespace
from collections.abc import AsyncIterator
from typing import Any, cast

import aiohttp
import httpx
import pytest
from fastapi import FastAPI
from starlette.responses import Response, StreamingResponse

from protocol.generation import GeneratePart
from protocol.status import Readiness
from services.http.app import create_app
from services.http.metrics import Metrics
from services.http.server import Listener, serve_http

with warnings.catch_warnings():  # those of vLLM
    warnings.simplefilter("ignore")
    from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
    from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

    from generator.engine.gated_llm import TurnedAway
    from generator.openai_routes import answer_engine_errors, counted_app
    from generator.routes import add_token_routes
    from generator.serving import GeneratorMetrics, Serving


class IdleEngine:
    """Ends its completions when it `may_end`."""

    is_alive = True

    def __init__(self) -> None:
        self.may_end = asyncio.Event()

    async def generate(self, **_: object) -> AsyncIterator[tuple[GeneratePart, ...]]:
        await self.may_end.wait()
        yield (GeneratePart(index=0, finish_reason="stop"),)


def serving_of(engine: IdleEngine, *, most: int) -> Serving:
    given = cast("Any", engine)
    serving = Serving(
        engine=given, generator_id="g", vocabulary_size=8, max_model_len=8, max_waiting_requests=most,
        metrics=GeneratorMetrics(Metrics("generator"), engine=given),
    )  # fmt: skip
    serving.holds("1.0")
    return serving


async def test_of_requests_that_come_together_no_more_are_taken_than_there_are_places_for() -> None:
    engine, app = IdleEngine(), FastAPI()
    serving = serving_of(engine, most=2)
    add_token_routes(app, serving=serving, scoring=cast("Any", None))
    body = {"request_id": "r", "prompt_token_ids": [1], "sampling": {"max_tokens": 1}}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://g") as client:
        for _ in range(2):  # all places are free again after that
            engine.may_end.clear()
            asked = [asyncio.create_task(client.post("/v1/generate", json=body)) for _ in range(5)]
            for _ in range(300):  # more turns of the loop than a request takes to be refused
                await asyncio.sleep(0)
            engine.may_end.set()
            answers = await asyncio.gather(*asked)
            assert sorted(answer.status_code for answer in answers) == [200, 200, 429, 429, 429]


async def test_a_stream_takes_a_place_until_it_ends() -> None:
    serving = serving_of(IdleEngine(), most=1)
    openai = counted_app(check_ready=serving.check_ready, occupied=serving.occupied)
    end = asyncio.Event()

    async def parts() -> AsyncIterator[bytes]:
        yield b"first"
        await end.wait()
        yield b"last"

    @openai.get("/stream")
    async def stream() -> Response:
        return StreamingResponse(parts())

    app = create_app(
        service="generator", version="1", token=None, readiness=lambda: Readiness(ready=True),
        metrics=Metrics("generator"),
    )  # fmt: skip
    app.mount("/openai", openai)
    with Listener(host="127.0.0.1", port=0) as listener:
        server = asyncio.create_task(serve_http(app, listener, finish_s=0))
        async with asyncio.timeout(30), aiohttp.ClientSession() as client:
            url = f"{listener.url}/openai/stream"
            async with client.get(url) as first:
                assert await first.content.readany() == b"first"
                async with client.get(url) as second:
                    assert second.status == 429
                end.set()
                assert await first.content.read() == b"last"
            async with client.get(url) as third:
                assert (third.status, await third.content.read()) == (200, b"firstlast")
        server.cancel()
        await asyncio.wait([server])


@pytest.mark.parametrize(
    ("cause", "status", "said"),
    [
        (TurnedAway("the generator hands its requests back"), 503, "requests back: try another generator"),
        (None, 503, "the engine of this generator has died: try another generator"),
        (OverflowError("can't serialize ints >= 2**64"), 400, "can't serialize ints"),
        (RuntimeError("no such thing"), 500, "no such thing"),
    ],
)
async def test_a_client_is_told_why_the_engine_did_not_take_its_request(
    cause: Exception | None, status: int, said: str
) -> None:
    app = FastAPI()
    app.state.args = Namespace(log_error_stack=False)
    init_exception_handler(app)
    answer_engine_errors(app)

    @app.get("/ask")
    async def ask() -> None:
        if cause is None:
            raise EngineDeadError
        raise EngineGenerateError from cause

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://g") as client:
        answer = await client.get("/ask")
    assert answer.status_code == status
    assert said in answer.json()["error"]["message"]
