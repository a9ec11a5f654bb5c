"""A generator's routes while its engine starts, and of clients that go away."""

import asyncio
import contextlib
import gc
import json
import socket
import warnings
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from starlette.types import Message

from generator.config import GeneratorConfig, JoinConfig
from generator.engine.options import EngineOptions
from generator.engine.records import EngineCounters
from protocol.fleet import INSTANCE_HEADER
from protocol.status import Readiness
from services.config.models import HttpConfig
from services.http.app import create_app
from services.http.metrics import Metrics
from services.process import Stop

with warnings.catch_warnings():  # those of vLLM
    warnings.simplefilter("ignore")
    from generator import service
    from generator.routes import add_token_routes, add_weight_routes


class StillEngine:
    """Starts when it may, and then does nothing."""

    may_start = asyncio.Event()
    version, kind, dtype = "0.0", "still", "float32"
    answer_timeout_s = 60.0
    is_alive = True

    @classmethod
    async def start(cls, *, options: EngineOptions) -> "StillEngine":
        await cls.may_start.wait()
        return cls()

    async def ping(self) -> None:
        """Answers at once."""

    async def drain(self, *, timeout_s: float) -> bool:
        """Has no request to wait for."""
        return True

    async def hand_back(self, *, stopped: bool = False) -> None:
        """Has no request to hand back."""

    async def shutdown(self) -> None:
        """Has nothing to end."""

    def counters(self) -> EngineCounters:
        return EngineCounters(
            running=0, waiting=0, tokens_total=0, completions_total=0, cached_tokens_total=0, cache_queries_total=0,
            idle_s=0.0, uptime_s=0.0,
        )  # fmt: skip


class SlowWarmUp:
    """Mounts the OpenAI routes when it may."""

    def __init__(self) -> None:
        self.has_begun, self.may_end = asyncio.Event(), asyncio.Event()

    async def mount(self, app: FastAPI, **_: object) -> None:
        self.has_begun.set()
        await self.may_end.wait()
        openai = FastAPI(openapi_url=None)
        openai.add_api_route("/v1/models", lambda: {}, methods=["GET"])
        app.mount("/openai", openai)


@pytest.fixture
def warm_up(monkeypatch: pytest.MonkeyPatch) -> SlowWarmUp:
    made = SlowWarmUp()
    monkeypatch.setattr(StillEngine, "may_start", asyncio.Event())
    monkeypatch.setattr(service, "Engine", StillEngine)
    monkeypatch.setattr(service, "mount_openai_routes", made.mount)
    return made


@contextlib.asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[aiohttp.ClientSession]:
    """A client of a generator that serves alone."""
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 32}))
    (folder / "tokenizer.json").write_text("{}")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = GeneratorConfig(model=folder, http=HttpConfig(port=port), join=JoinConfig(learner=None), drain_s=0.0)
    stop = Stop()
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        group.create_task(service.serve(config, EngineOptions(model=str(folder)), stop))
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client:
            yield client
        stop.request("the test has ended")


async def asked(
    client: aiohttp.ClientSession, path: str, *, wait_while: int = 0
) -> tuple[int, str | None, dict[str, Any]]:
    """Status, Retry-After and body of the answer, as soon as somebody listens and has another status."""
    while True:
        with contextlib.suppress(aiohttp.ClientConnectorError):
            async with client.get(path) as answer:
                if answer.status != wait_while:
                    return answer.status, answer.headers.get("Retry-After"), await answer.json()
        await asyncio.sleep(0.01)


async def test_until_all_routes_are_there_those_that_lack_are_refused_for_half_a_minute(
    warm_up: SlowWarmUp, tmp_path: Path
) -> None:
    async with serving(tmp_path) as client:
        status, retry_s, body = await asked(client, "/v1/state")
        assert (status, retry_s, body["error"]["kind"]) == (503, "30", "starting")
        assert "/v1/state" not in (await asked(client, "/openapi.json"))[2]["paths"]
        StillEngine.may_start.set()
        await warm_up.has_begun.wait()
        for path in ("/v1/state", "/openai/v1/models", "/v1/adapters/sample"):
            assert (await asked(client, path))[0] == 503
        warm_up.may_end.set()
        assert (await asked(client, "/openai/v1/models", wait_while=503))[0] == 200
        assert (await asked(client, "/v1/state"))[0] == 200
        assert (await asked(client, "/v1/adapters/sample"))[0] == 404
        assert {"/v1/state", "/v1/generate"} <= set((await asked(client, "/openapi.json"))[2]["paths"])


@pytest.mark.parametrize("step", ["group", "host", "prepare", "pull", "commit", "probe"])
def test_a_step_for_a_former_process_of_the_address_is_refused_before_it_is_looked_at(step: str) -> None:
    app = create_app(
        service="generator", version="1", token=None, readiness=lambda: Readiness(ready=True),
        metrics=Metrics("generator"),
    )  # fmt: skip
    add_weight_routes(app, sync=None, instance="now")  # type: ignore[arg-type]
    client = TestClient(app)

    def asked_of(meant: str | None) -> tuple[int, str]:
        headers = {} if meant is None else {INSTANCE_HEADER: meant}
        answer = client.post(f"/v1/weights/{step}", json={}, headers=headers)
        return answer.status_code, answer.json()["error"]["kind"]

    assert asked_of("before") == (409, "another_process")
    assert asked_of("now") == asked_of(None) == (422, "invalid_field")


class FailsAtItsEnd:
    """Scores nothing, and breaks when it is cancelled."""

    def __init__(self) -> None:
        self.has_begun = asyncio.Event()

    async def answer(self, body: object) -> object:
        self.has_begun.set()
        try:
            return await asyncio.Event().wait()
        finally:
            raise RuntimeError("broken at its end")


async def test_an_error_of_work_that_nobody_waits_for_is_taken() -> None:
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    scoring: Any = FailsAtItsEnd()
    app = create_app(
        service="generator", version="1", token=None, readiness=lambda: Readiness(ready=True),
        metrics=Metrics("generator"),
    )  # fmt: skip
    add_token_routes(app, serving=None, scoring=scoring)  # type: ignore[arg-type]
    body = b'{"request_id": "r", "sequences": [[3, 4]]}'
    arriving: list[Message] = [{"type": "http.request", "body": body}]
    sent: list[Message] = []

    async def receive() -> Message:
        if arriving:
            return arriving.pop()
        await scoring.has_begun.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    scope = {"type": "http", "method": "POST", "path": "/v1/logprobs", "headers": headers, "query_string": b""}
    await app(scope, receive, send)
    gc.collect()
    await asyncio.sleep(0)
    assert sent[0]["status"] == 499
    assert complaints == []
