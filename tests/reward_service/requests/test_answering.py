"""`POST /v1/score` over a real socket: results as they finish, repetitions, too much at once, and its document."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from pydantic import JsonValue

from protocol.rewards import ScoreResult
from protocol.status import Readiness
from reward_service.included import build_registry
from reward_service.requests.scoring import Scorer
from reward_service.service import build_app
from reward_service.verifier.config import WorkerConfig
from reward_service.verifier.lanes import make_metrics
from services.http.metrics import Metrics
from services.http.server import Listener, serve_http
from tests.reward_service.conftest import config_with_samples

LINES = {"Accept": "application/x-ndjson"}
EXACT: dict[str, JsonValue] = {
    "id": "exact",
    "verifier": "exact_match",
    "completion": "7",
    "arguments": {"answer": "7"},
}
HANG: dict[str, JsonValue] = {"id": "hang", "verifier": "hang_async", "completion": ""}


@asynccontextmanager
async def serving(*, max_pending_items: int = 1000) -> AsyncIterator[tuple[Scorer, aiohttp.ClientSession]]:
    """A scorer behind a real server, and a client of it."""
    config = config_with_samples(workers=WorkerConfig(count=1), max_pending_items=max_pending_items)
    registry, metrics = build_registry(config), Metrics("reward-service")
    scorer = Scorer(registry=registry, config=config, metrics=make_metrics(metrics), service_id="rewards-0")
    ready = Readiness(ready=True)
    with Listener(host="127.0.0.1", port=0) as listener:
        async with scorer, asyncio.timeout(120), asyncio.TaskGroup() as tasks:
            app = build_app(
                config=config, registry=registry, scorer=scorer, metrics=metrics, readiness=lambda: ready, version="1"
            )
            server = tasks.create_task(serve_http(app, listener, finish_s=1))
            async with aiohttp.ClientSession(base_url=listener.url) as session:
                yield scorer, session
            server.cancel()


def body(*items: dict[str, JsonValue], deadline_s: float = 60.0) -> dict[str, JsonValue]:
    return {"items": [*items], "deadline_s": deadline_s}


async def lines(answer: aiohttp.ClientResponse) -> list[ScoreResult]:
    return [ScoreResult.model_validate_json(line) async for line in answer.content]


async def test_results_are_sent_in_the_order_in_which_they_finish() -> None:
    async with serving() as (_, session):
        pause: dict[str, JsonValue] = {**HANG, "deadline_s": 0.5}
        async with session.post("/v1/score", json=body(pause, EXACT), headers=LINES) as answer:
            assert answer.headers["Content-Type"] == "application/x-ndjson"
            results = await lines(answer)
    assert [result.id for result in results] == ["exact", "hang"]
    assert (results[0].reward, results[0].service_id) == (1.0, "rewards-0")
    assert results[1].error is not None
    assert results[1].error.kind == "infrastructure"


async def test_the_items_of_a_client_that_leaves_are_taken_back() -> None:
    async with serving() as (scorer, session):
        async with session.post("/v1/score", json=body(EXACT, HANG), headers=LINES) as answer:
            assert ScoreResult.model_validate_json(await answer.content.readline()).reward == 1.0
            assert scorer.pending == 2
        await session.close()
        assert await scorer.drain(timeout_s=50), "its deadline is later than this"


@pytest.mark.parametrize("headers", [{}, LINES])
async def test_a_refusal_has_its_status_in_either_form(headers: dict[str, str]) -> None:
    async with serving(max_pending_items=2) as (_, session), asyncio.TaskGroup() as tasks:
        holding = tasks.create_task(_post(session, body(HANG, {**HANG, "id": "b"}, deadline_s=50.0)))
        await _until_pending(session, 2)
        async with session.post("/v1/score", json=body(EXACT), headers=headers) as answer:
            assert answer.status == 429
            assert int(answer.headers["Retry-After"]) >= 1
            assert (await answer.json())["error"]["kind"] == "busy"
        holding.cancel()


async def test_a_connection_on_which_a_large_body_was_refused_unread_serves_the_next() -> None:
    async with serving(max_pending_items=1) as (_, session), asyncio.TaskGroup() as tasks:
        holding = tasks.create_task(_post(session, body(HANG, deadline_s=50.0)))
        await _until_pending(session, 1)
        one = aiohttp.TCPConnector(limit=1)
        async with aiohttp.ClientSession(base_url=session._base_url, connector=one) as other:
            for _ in range(3):
                async with other.post("/v1/score", json=body({**EXACT, "prompt": "x" * 90_000})) as answer:
                    assert (answer.status, (await answer.json())["error"]["kind"]) == (429, "busy")
        holding.cancel()


async def _post(session: aiohttp.ClientSession, asked: dict[str, JsonValue], **headers: str) -> bytes:
    async with session.post("/v1/score", json=asked, headers=headers) as answer:
        return await answer.read()


async def _until_pending(session: aiohttp.ClientSession, items: int) -> None:
    while f"headway_reward_service_pending_items {items}.0" not in await (await session.get("/metrics")).text():
        continue


async def test_a_repeated_key_gets_the_answer_of_the_first_in_either_form() -> None:
    async with serving() as (_, session):
        headers = {"Idempotency-Key": "k"}
        item: dict[str, JsonValue] = {"id": "p", "verifier": "process_id", "completion": ""}
        async with session.post("/v1/score", json=body(item), headers={**headers, **LINES}) as answer:
            (first,) = await lines(answer)
        whole = json.loads(await _post(session, body(item), **headers))
        assert whole["results"] == [json.loads(first.model_dump_json())], "the same latency: it was not judged again"
        async with session.post("/v1/score", json=body(item), headers={**headers, **LINES}) as answer:
            assert await lines(answer) == [first]
        async with session.post("/v1/score", json=body(EXACT), headers=headers) as answer:
            assert answer.status == 409
        metrics = await (await session.get("/metrics")).text()
    assert "headway_reward_service_repeated_requests_total 2.0" in metrics


async def test_an_answer_with_a_failure_of_the_infrastructure_is_not_repeated() -> None:
    async with serving() as (_, session):
        asked = body({**HANG, "deadline_s": 0.05})
        first, second = [json.loads(await _post(session, asked, **{"Idempotency-Key": "k"})) for _ in range(2)]
    assert first["results"][0]["latency_s"] != second["results"][0]["latency_s"]


def _reads(file: Path, *, id: str) -> dict[str, JsonValue]:
    return {"id": id, "verifier": "read_pipe", "completion": "", "arguments": {"file": str(file)}}


async def test_a_small_request_is_not_behind_all_items_of_a_large_one(tmp_path: Path) -> None:
    async with serving() as (_, session), asyncio.TaskGroup() as tasks:
        first, later, written = (tmp_path / name for name in ("first", "later", "written"))
        files = [written] * 501
        for place, pipe in ((0, first), (400, later)):
            os.mkfifo(pipe)
            files[place] = pipe
        written.write_text("1")
        *items, one = (_reads(file, id=str(number)) for number, file in enumerate(files))
        large = tasks.create_task(_post(session, body(*items)))
        await _until_pending(session, 500)
        asked = tasks.create_task(_post(session, body(one)))
        await _until_pending(session, 501)
        await asyncio.to_thread(first.write_text, "1")
        small = json.loads(await asked)
        assert small["results"][0]["reward"] is not None
        assert not large.done(), "one of its items waits for what is written next"
        await asyncio.to_thread(later.write_text, "1")
        assert len(json.loads(await large)["results"]) == 500


async def test_the_document_describes_the_body_and_both_forms_of_the_answer() -> None:
    async with serving() as (_, session):
        document = await (await session.get("/openapi.json")).json()
    post = document["paths"]["/v1/score"]["post"]
    reference = "#/components/schemas/"
    assert post["requestBody"]["content"]["application/json"]["schema"] == {"$ref": f"{reference}ScoreRequest"}
    forms = post["responses"]["200"]["content"]
    assert {kind: form["schema"]["$ref"].removeprefix(reference) for kind, form in forms.items()} == {
        "application/json": "ScoreResponse",
        "application/x-ndjson": "ScoreResult",
    }
    assert post["responses"]["4XX"]["content"]["application/json"]["schema"] == {"$ref": f"{reference}ErrorBody"}
    assert {parameter["name"] for parameter in post["parameters"]} >= {"Idempotency-Key"}
    schemas = document["components"]["schemas"]
    assert schemas["ScoreItem"]["required"] == ["id", "verifier", "completion"]
