"""Requests of the OpenAI-compatible routes count as being here, until the last byte of a stream."""

import asyncio
import warnings
from collections.abc import AsyncIterator
from typing import Any, cast

import aiohttp
from starlette.responses import Response, StreamingResponse

from protocol.status import Readiness
from services.http.app import create_app
from services.http.metrics import Metrics
from services.http.server import Listener, serve_http

with warnings.catch_warnings():  # those of vLLM
    warnings.simplefilter("ignore")
    from generator.openai_routes import counted_app
    from generator.serving import GeneratorMetrics, Serving


class IdleEngine:
    is_alive = True


async def test_a_stream_takes_a_place_until_it_ends() -> None:
    engine = cast("Any", IdleEngine())
    serving = Serving(
        engine=engine, generator_id="g", vocabulary_size=8, max_model_len=8, max_waiting_requests=1,
        metrics=GeneratorMetrics(Metrics("generator"), engine=engine),
    )  # fmt: skip
    serving.holds("1.0")
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
