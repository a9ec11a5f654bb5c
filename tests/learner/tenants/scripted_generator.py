"""A generator with adapters, as the learner sees it: real HTTP, and tokens that a test can work out by hand."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, FastAPI, Request, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from protocol.adapters import (
    AdapterSampleAnswer,
    AdapterSampleRequest,
    AdapterSequence,
    AdapterSpan,
    LikeliestTokens,
    OfferAnswer,
    OfferedAdapter,
)
from protocol.status import Readiness
from services.http.app import create_app
from services.http.bodies import json_answer, json_body
from services.http.metrics import Metrics
from services.http.refusals import RequestRefused
from services.http.server import Listener, serve_http

SAMPLED = (7, 8, 9)


@dataclass
class ScriptedAdapterGenerator:
    """`script` is asked at each sample, by the number of those before it, for what is to go wrong.

    An int is a status, "unfit" an adapter that cannot be loaded, "short" an answer without its last logprob, "abort" a
    completion that was cut off, "hang" no answer. `spans`: version, start and end of each; the version of the request
    for all of it if there are none.
    """

    script: Callable[[int], int | str | None] = lambda _: None
    spans: Sequence[tuple[int, int, int]] = ()
    hold: asyncio.Event | None = None
    asked: list[AdapterSampleRequest] = field(default_factory=list)
    offers: list[OfferedAdapter] = field(default_factory=list)
    hold_offers: asyncio.Event | None = None
    left: asyncio.Event = field(default_factory=asyncio.Event)
    frozen: bool = False
    """It takes connections, and answers nothing."""

    @asynccontextmanager
    async def running(self, *, port: int = 0) -> AsyncIterator[str]:
        """Its address while it runs."""
        with Listener(host="127.0.0.1", port=port) as listener:
            server = asyncio.create_task(serve_http(self._unless_frozen(self._app()), listener, finish_s=0))
            try:
                yield listener.url
            finally:
                server.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await server

    def _unless_frozen(self, app: ASGIApp) -> ASGIApp:
        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            while self.frozen and (await receive())["type"] != "http.disconnect":
                continue
            await app(scope, receive, send)

        return answer

    def _app(self) -> FastAPI:
        app = create_app(
            service="generator",
            version="1",
            token=None,
            readiness=lambda: Readiness(ready=True),
            metrics=Metrics("generator"),
        )

        @app.post("/v1/adapters/sample")
        async def sample(
            request: Request, asked: Annotated[AdapterSampleRequest, Depends(json_body(AdapterSampleRequest))]
        ) -> Response:
            self.asked.append(asked)
            trouble = self.script(len(self.asked) - 1)
            if isinstance(trouble, int):
                raise RequestRefused(trouble, "scripted", "as the test wants it", retry_after_s=0.1)
            if trouble == "unfit":
                raise RequestRefused(503, "adapter_not_loaded", "it does not fit")
            if trouble == "hang":
                while (await request.receive())["type"] != "http.disconnect":
                    continue
                self.left.set()
            if self.hold is not None:
                await self.hold.wait()
            return json_answer(self._answer(asked, trouble))

        @app.post("/v1/adapters/offer")
        async def offer(offered: Annotated[OfferedAdapter, Depends(json_body(OfferedAdapter))]) -> Response:
            self.offers.append(offered)
            if self.hold_offers is not None:
                await self.hold_offers.wait()
            return json_answer(OfferAnswer(held=None))

        return app

    def _answer(self, asked: AdapterSampleRequest, trouble: str | None) -> AdapterSampleAnswer:
        tokens = SAMPLED[: asked.max_tokens]
        held = 0 if asked.adapter is None else asked.adapter.version
        spans = self.spans or ((held, 0, len(tokens)),)
        sequence = AdapterSequence(
            token_ids=tokens,
            logprobs=tuple(-token / 8 for token in tokens)[: len(tokens) - (trouble == "short")],
            spans=tuple(AdapterSpan(version=version, start=start, end=end) for version, start, end in spans),
            finish_reason="abort" if trouble == "abort" else "stop" if len(tokens) == len(SAMPLED) else "length",
            top=_top(len(tokens), asked.top_of_samples),
        )
        places = len(asked.prompt_token_ids) - 1
        return AdapterSampleAnswer(
            generator_id="scripted",
            sequences=(sequence,) * asked.n,
            prompt_logprobs=tuple(-float(place) for place in range(1, places + 1)) if asked.prompt_logprobs else (),
            top_of_prompt=_top(places, asked.top_of_prompt),
        )


def _top(places: int, count: int) -> LikeliestTokens | None:
    """The likeliest tokens are 0, 1, 2, …, at each place."""
    if not count:
        return None
    logprobs = tuple(-float(token) for token in range(count))
    return LikeliestTokens(token_ids=(tuple(range(count)),) * places, logprobs=(logprobs,) * places)
