"""The generator's HTTP routes: tokens in and out, with and without adapters, and weight sync."""

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Annotated, TypeVar

from fastapi import Depends, FastAPI, Request, Response
from starlette.routing import Route

from generator.adapter_sampling import AdapterSampling
from generator.feedback import relayed
from generator.logprobs import LogprobScoring
from generator.serving import Serving
from generator.weight_sync import WeightSync
from protocol.adapters import AdapterSampleRequest, OfferedAdapter
from protocol.feedback import Feedback
from protocol.fleet import INSTANCE_HEADER, Commit, JoinGroup, Prepare, Pull, Reprobe, SharedMemory
from protocol.generation import GenerateRequest, LogprobsRequest
from services.http.bodies import json_answer, json_body, streamed_answer
from services.http.client import HttpClient
from services.http.refusals import RequestRefused

T = TypeVar("T")
_START_RETRY_S = 30.0


def add_token_routes(app: FastAPI, *, serving: Serving, scoring: LogprobScoring) -> None:
    """`POST /v1/generate`, which answers with NDJSON, `POST /v1/logprobs`, and `GET /v1/state`."""

    @app.post("/v1/generate")
    async def generate(body: Annotated[GenerateRequest, Depends(json_body(GenerateRequest))]) -> Response:
        """Sample completions; the answer is a GeneratePart a line, as tokens are sampled."""
        serving.check(body)
        # From here on: a stream begins some turns of the loop later, and others are checked in between.
        return streamed_answer(serving.generate(body), within=serving.occupied())

    @app.post("/v1/logprobs")
    async def logprobs(
        request: Request, body: Annotated[LogprobsRequest, Depends(json_body(LogprobsRequest))]
    ) -> Response:
        """The logprobs of given tokens under one version of the weights."""
        return json_answer(await _cancelled_on_disconnect(request, scoring.answer(body)))

    @app.get("/v1/state")
    async def state() -> Response:
        """The served version, and how many requests are under way."""
        return json_answer(serving.state())


def add_adapter_routes(app: FastAPI, *, sampling: AdapterSampling) -> None:
    """`POST /v1/adapters/sample` and `/v1/adapters/offer`."""

    @app.post("/v1/adapters/sample")
    async def sample(
        request: Request, body: Annotated[AdapterSampleRequest, Depends(json_body(AdapterSampleRequest))]
    ) -> Response:
        """Sample completions with an adapter; all of them are in the answer."""
        return json_answer(await _cancelled_on_disconnect(request, sampling.sample(body)))

    @app.post("/v1/adapters/offer")
    async def offer(body: Annotated[OfferedAdapter, Depends(json_body(OfferedAdapter))]) -> Response:
        """Take the new version of an adapter in the place of a former one, if this generator holds one."""
        return json_answer(await sampling.offer(body))


def add_feedback_route(app: FastAPI, *, learner: str, client: HttpClient) -> None:
    """`POST /v1/feedback`."""

    @app.post("/v1/feedback")
    async def feedback(body: Annotated[Feedback, Depends(json_body(Feedback))]) -> Response:
        """Pass a user's reward for an answer on to the learner; kept once the learner says so."""
        return json_answer(await relayed(body, learner=learner, client=client))


def add_weight_routes(app: FastAPI, *, sync: WeightSync, instance: str) -> None:
    """`POST` below `/v1/weights`: a version comes by `/group` and `/prepare`, by `/host` and `/prepare`, or by `/pull`,
    and is served after `/commit`; `/probe` scores its probe, if the commit had no time for it. What is meant for
    another process than this `instance` is refused.
    """

    async def meant_for_this_process(request: Request) -> None:
        if (meant := request.headers.get(INSTANCE_HEADER, instance)) != instance:
            message = f"a weight sync for the process {meant} came to {instance}, which has taken its place since"
            raise RequestRefused(409, "another_process", message, field=INSTANCE_HEADER, expected=instance, got=meant)

    own = [Depends(meant_for_this_process)]

    @app.post("/v1/weights/group", dependencies=own)
    async def group(body: Annotated[JoinGroup, Depends(json_body(JoinGroup))]) -> Response:
        """Join the process group of a broadcast."""
        return json_answer(await sync.join(body))

    @app.post("/v1/weights/host", dependencies=own)
    async def host(body: Annotated[SharedMemory, Depends(json_body(SharedMemory))]) -> Response:
        """Tell the secret in a file of the learner's memory, if it is to be seen from here."""
        return json_answer(sync.host(body))

    @app.post("/v1/weights/prepare", dependencies=own)
    async def prepare(body: Annotated[Prepare, Depends(json_body(Prepare))]) -> Response:
        """Receive the broadcast of a version, or map it from the learner's memory, and stage it."""
        return json_answer(await sync.prepare(body))

    @app.post("/v1/weights/pull", dependencies=own)
    async def pull(body: Annotated[Pull, Depends(json_body(Pull))]) -> Response:
        """Download a version from the learner, and stage it."""
        return json_answer(await sync.pull(body))

    @app.post("/v1/weights/commit", dependencies=own)
    async def commit(body: Annotated[Commit, Depends(json_body(Commit))]) -> Response:
        """Load what is staged, and serve it as the new version."""
        return json_answer(await sync.commit(body))

    @app.post("/v1/weights/probe", dependencies=own)
    async def probe(body: Annotated[Reprobe, Depends(json_body(Reprobe))]) -> Response:
        """Score the probe of the version that is served, if its commit had no time for it."""
        return json_answer(await sync.probe(body))


async def _cancelled_on_disconnect(request: Request, work: Coroutine[None, None, T]) -> T:
    """The result of `work`, which is cancelled if the client goes away: nobody stays to read it."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise RequestRefused(499, "client_left", "the client closed the connection before it was answered")
        return working.result()
    finally:
        leaving.cancel()
        if not working.done():
            working.cancel()
            # An error of its end is nobody's any more, and is taken here, or asyncio would log it as never retrieved.
            await asyncio.gather(working, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    """Returns when the client has gone away; its body has been read before."""
    while (await request.receive())["type"] != "http.disconnect":
        continue


@contextmanager
def refused_while_starting(app: FastAPI) -> Iterator[None]:
    """Within it, a request for which `app` has no route yet is refused with 503, to come again, and not with 404."""

    async def refuse(request: Request) -> Response:
        message = f"this generator is starting its engine: try again in {_START_RETRY_S:g} s"
        raise RequestRefused(503, "starting", message, retry_after_s=_START_RETRY_S)

    route = Route("/{path:path}", refuse, methods=["GET", "POST"])
    app.router.routes.append(route)
    try:
        yield
    finally:
        app.router.routes.remove(route)
