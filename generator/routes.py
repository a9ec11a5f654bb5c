"""The generator's HTTP routes: tokens in and out, and weight sync."""

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Annotated, TypeVar

from fastapi import Depends, FastAPI, Request, Response
from starlette.routing import Route

from generator.adapter_sampling import AdapterSampling
from generator.logprobs import LogprobScoring
from generator.serving import Serving
from generator.weight_sync import WeightSync
from protocol.adapters import AdapterSampleRequest, OfferedAdapter
from protocol.fleet import Commit, JoinGroup, Prepare, Pull, Reprobe
from protocol.generation import GenerateRequest, LogprobsRequest
from services.http.app import RequestRefused, json_answer, json_body, streamed_answer

T = TypeVar("T")


def add_token_routes(app: FastAPI, *, serving: Serving, scoring: LogprobScoring) -> None:
    """`POST /v1/generate`, which answers with NDJSON, `POST /v1/logprobs`, and `GET /v1/state`."""

    @app.post("/v1/generate")
    async def generate(request: Annotated[GenerateRequest, Depends(json_body(GenerateRequest))]) -> Response:
        """Sample completions; the answer is a GeneratePart a line, as tokens are sampled."""
        serving.check(request)
        return streamed_answer(serving.generate(request))

    @app.post("/v1/logprobs")
    async def logprobs(
        request: Request, asked: Annotated[LogprobsRequest, Depends(json_body(LogprobsRequest))]
    ) -> Response:
        """The logprobs of given tokens under one version of the weights."""
        return json_answer(await _unless_left(request, scoring.answer(asked)))

    @app.get("/v1/state")
    async def state() -> Response:
        """The served version, and how many requests are under way."""
        return json_answer(serving.state())


def add_adapter_routes(app: FastAPI, *, sampling: AdapterSampling) -> None:
    """`POST /v1/adapters/sample` and `/v1/adapters/offer`."""

    @app.post("/v1/adapters/sample")
    async def sample(
        request: Request, asked: Annotated[AdapterSampleRequest, Depends(json_body(AdapterSampleRequest))]
    ) -> Response:
        """Sample completions with an adapter; all of them are in the answer."""
        return json_answer(await _unless_left(request, sampling.sample(asked)))

    @app.post("/v1/adapters/offer")
    async def offer(offered: Annotated[OfferedAdapter, Depends(json_body(OfferedAdapter))]) -> Response:
        """Replace a former version of a target, if this generator holds one."""
        return json_answer(await sampling.offer(offered))


def add_weight_routes(app: FastAPI, *, sync: WeightSync) -> None:
    """`POST /v1/weights/group` and `/prepare`, or `/pull`; then `/commit`, and `/probe` if that had no time for it."""

    @app.post("/v1/weights/group")
    async def group(request: Annotated[JoinGroup, Depends(json_body(JoinGroup))]) -> Response:
        """Join the process group of a broadcast."""
        return json_answer(await sync.join(request))

    @app.post("/v1/weights/prepare")
    async def prepare(request: Annotated[Prepare, Depends(json_body(Prepare))]) -> Response:
        """Receive the broadcast of a version, and stage it."""
        return json_answer(await sync.prepare(request))

    @app.post("/v1/weights/pull")
    async def pull(request: Annotated[Pull, Depends(json_body(Pull))]) -> Response:
        """Download a version from the learner, and stage it."""
        return json_answer(await sync.pull(request))

    @app.post("/v1/weights/commit")
    async def commit(request: Annotated[Commit, Depends(json_body(Commit))]) -> Response:
        """Load what is staged, and serve it as the new version."""
        return json_answer(await sync.commit(request))

    @app.post("/v1/weights/probe")
    async def probe(request: Annotated[Reprobe, Depends(json_body(Reprobe))]) -> Response:
        """Score the probe of the version that is served, to which its commit did not come."""
        return json_answer(await sync.probe(request))


async def _unless_left(request: Request, work: Coroutine[None, None, T]) -> T:
    """The result of `work`, which is cancelled if the client goes away: nobody stays to read it."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise RequestRefused(499, "client_left", "the client closed the connection before it was answered")
        return working.result()
    finally:
        leaving.cancel()
        if not working.done():
            working.cancel()
            await asyncio.wait([working])


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        continue


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
