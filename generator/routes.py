"""The generator's HTTP routes: tokens in and out, and weight sync."""

from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import Depends, FastAPI, Response
from fastapi.responses import StreamingResponse

from generator.engine import EngineGone
from generator.serving import Serving
from generator.weight_sync import WeightSync
from protocol.fleet import Commit, JoinGroup, Prepare
from protocol.generation import GenerateRequest
from protocol.http import ErrorBody, ErrorDetail
from services.http_app import json_answer, json_body


def add_token_routes(app: FastAPI, *, serving: Serving) -> None:
    """`POST /v1/generate`, which answers with NDJSON, and `GET /v1/state`."""

    @app.post("/v1/generate")
    async def generate(request: Annotated[GenerateRequest, Depends(json_body(GenerateRequest))]) -> Response:
        serving.check(request)
        return StreamingResponse(_lines(serving, request), media_type="application/x-ndjson")

    @app.get("/v1/state")
    async def state() -> Response:
        return json_answer(serving.state())


def add_weight_routes(app: FastAPI, *, sync: WeightSync) -> None:
    """`POST /v1/weights/group`, `/prepare` and `/commit`, in this order."""

    @app.post("/v1/weights/group")
    async def group(request: Annotated[JoinGroup, Depends(json_body(JoinGroup))]) -> Response:
        return json_answer(await sync.join(request))

    @app.post("/v1/weights/prepare")
    async def prepare(request: Annotated[Prepare, Depends(json_body(Prepare))]) -> Response:
        return json_answer(await sync.prepare(request))

    @app.post("/v1/weights/commit")
    async def commit(request: Annotated[Commit, Depends(json_body(Commit))]) -> Response:
        return json_answer(await sync.commit(request))


async def _lines(serving: Serving, request: GenerateRequest) -> AsyncIterator[bytes]:
    parts = serving.generate(request)
    try:
        async for part in parts:
            yield part.model_dump_json().encode() + b"\n"
    except (EngineGone, ValueError) as error:
        # The status was sent with the first part: what went wrong can only be said in a line.
        detail = ErrorDetail(kind="engine", message=f"request {request.request_id}: {error}")
        yield ErrorBody(error=detail).model_dump_json().encode() + b"\n"
