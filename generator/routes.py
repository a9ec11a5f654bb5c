"""The generator's HTTP routes: tokens in and out, and weight sync."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

from fastapi import Depends, FastAPI, Request, Response
from starlette.routing import Route

from generator.serving import Serving
from generator.weight_sync import WeightSync
from protocol.fleet import Commit, JoinGroup, Prepare, Pull
from protocol.generation import GenerateRequest
from services.http_app import RequestRefused, json_answer, json_body, streamed_answer


def add_token_routes(app: FastAPI, *, serving: Serving) -> None:
    """`POST /v1/generate`, which answers with NDJSON, and `GET /v1/state`."""

    @app.post("/v1/generate")
    async def generate(request: Annotated[GenerateRequest, Depends(json_body(GenerateRequest))]) -> Response:
        serving.check(request)
        return streamed_answer(serving.generate(request))

    @app.get("/v1/state")
    async def state() -> Response:
        return json_answer(serving.state())


def add_weight_routes(app: FastAPI, *, sync: WeightSync) -> None:
    """`POST /v1/weights/group` and `/prepare`, or `/pull`; then `/commit`."""

    @app.post("/v1/weights/group")
    async def group(request: Annotated[JoinGroup, Depends(json_body(JoinGroup))]) -> Response:
        return json_answer(await sync.join(request))

    @app.post("/v1/weights/prepare")
    async def prepare(request: Annotated[Prepare, Depends(json_body(Prepare))]) -> Response:
        return json_answer(await sync.prepare(request))

    @app.post("/v1/weights/pull")
    async def pull(request: Annotated[Pull, Depends(json_body(Pull))]) -> Response:
        return json_answer(await sync.pull(request))

    @app.post("/v1/weights/commit")
    async def commit(request: Annotated[Commit, Depends(json_body(Commit))]) -> Response:
        return json_answer(await sync.commit(request))


@contextmanager
def refused_while_starting(app: FastAPI) -> Iterator[None]:
    """Within it, whatever `app` has no route for is refused with 503, and not as something that will never be there."""

    async def refuse(request: Request) -> Response:
        raise RequestRefused(503, "starting", "this generator is starting its engine: try again in half a minute")

    route = Route("/{path:path}", refuse, methods=["GET", "POST"])
    app.router.routes.append(route)
    try:
        yield
    finally:
        app.router.routes.remove(route)
