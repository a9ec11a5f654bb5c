"""Without a token, a page in a browser of this machine neither reads nor writes at a service of it."""

import socket
from collections.abc import AsyncIterator, Mapping
from typing import Annotated

import aiohttp
import pytest
from fastapi import Depends
from pydantic import SecretStr

from protocol.status import ErrorBody, Readiness
from services.http.app import create_app
from services.http.bodies import json_answer, json_body
from services.http.metrics import Metrics
from tests.services.http.test_app import Ask, serving

BODY = b'{"tokens":[1]}'
JSON = {"Content-Type": "application/json"}


async def _session(token: str | None) -> AsyncIterator[aiohttp.ClientSession]:
    app = create_app(
        service="learner", version="1", token=None if token is None else SecretStr(token),
        readiness=lambda: Readiness(ready=True), metrics=Metrics("learner"), open_paths=frozenset({"/"}),
    )  # fmt: skip

    @app.get("/")
    async def page() -> dict[str, str]:
        return {}

    @app.post("/v1/echo")
    async def echo(body: Annotated[Ask, Depends(json_body(Ask))]) -> object:
        return json_answer(body)

    async with serving(app) as url, aiohttp.ClientSession(base_url=url) as client:
        yield client


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async for client in _session(None):
        yield client


@pytest.fixture
async def guarded() -> AsyncIterator[aiohttp.ClientSession]:
    async for client in _session("a long enough token"):
        yield client


async def _refusal(session: aiohttp.ClientSession, headers: Mapping[str, str]) -> tuple[int, str, str]:
    async with session.post("/v1/echo", data=BODY, headers=headers, skip_auto_headers=["Content-Type"]) as answer:
        if answer.status == 200:
            return 200, "", ""
        error = ErrorBody.model_validate_json(await answer.read()).error
        return answer.status, error.kind, error.message


@pytest.mark.parametrize(
    "host", ["rebound.example", "rebound.example:80", "127.0.0.1.rebound.example", "10.1.2.3", "localhost@evil.example",
             "notlocalhost", "[::1", "", "127.0.0.1, evil.example", "k\xf6ln.example"],
)  # fmt: skip
async def test_a_host_that_is_no_name_of_this_machine_is_refused(session: aiohttp.ClientSession, host: str) -> None:
    status, kind, message = await _refusal(session, {**JSON, "Host": host})
    assert (status, kind) == (403, "foreign_caller")
    assert "Host" in message
    assert "http.token" in message
    async with session.get("/", headers={"Host": host}) as answer:
        assert answer.status == 403


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:7300", "localhost.", "run.localhost:1", "127.0.0.1", "127.8.9.1:80", "[::1]:7300",
             socket.gethostname()],
)  # fmt: skip
async def test_names_of_this_machine_are_served(session: aiohttp.ClientSession, host: str) -> None:
    assert (await _refusal(session, {**JSON, "Host": host}))[0] == 200


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "file://", "http://localhost.evil.example", ""])
async def test_a_page_from_elsewhere_is_refused(session: aiohttp.ClientSession, origin: str) -> None:
    status, kind, message = await _refusal(session, {**JSON, "Origin": origin})
    assert (status, kind) == (403, "foreign_caller")
    assert f"Origin {origin!r}" in message


@pytest.mark.parametrize("origin", ["http://localhost:3000", "http://127.0.0.1:7300", "http://[::1]"])
async def test_a_page_of_this_machine_is_served(session: aiohttp.ClientSession, origin: str) -> None:
    assert (await _refusal(session, {**JSON, "Origin": origin}))[0] == 200


@pytest.mark.parametrize(
    "kind",
    ["text/plain", "Text/Plain; charset=utf-8", "application/x-www-form-urlencoded", "multipart/form-data; x=y", None],
)  # fmt: skip
async def test_a_body_of_a_type_that_any_page_may_send_is_refused(
    session: aiohttp.ClientSession, kind: str | None
) -> None:
    status, name, message = await _refusal(session, {} if kind is None else {"Content-Type": kind})
    assert (status, name) == (415, "content_type")
    assert "application/json" in message


async def test_health_and_metrics_are_open_to_any_name(session: aiohttp.ClientSession) -> None:
    for path in ("/healthz", "/readyz", "/metrics"):
        async with session.get(path, headers={"Host": "probe.example"}) as answer:
            assert answer.status == 200


async def test_with_a_token_any_name_and_type_will_do(guarded: aiohttp.ClientSession) -> None:
    headers = {"Host": "learner.example", "Origin": "https://x.example", "Authorization": "Bearer a long enough token"}
    assert (await _refusal(guarded, headers))[0] == 200
    assert (await _refusal(guarded, {**headers, "Authorization": "Bearer none"}))[0] == 401
