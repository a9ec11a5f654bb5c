"""A generator that serves a teacher, as its client sees it: real HTTP, logprobs that a test can work out by hand."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
from fastapi import Depends, FastAPI, Response
from pydantic import SecretStr

from protocol.generation import LogprobsAnswer, LogprobsRequest, SequenceLogprobs
from protocol.status import Readiness
from services.http.app import create_app
from services.http.bodies import json_answer, json_body
from services.http.metrics import Metrics
from services.http.refusals import RequestRefused
from services.http.server import Listener, serve_http

TOKENIZER = "70ken1"
TOKEN = "let-me-in"


def logprob(token: int, position: int) -> float:
    """The teacher's logprob of a token at a position: no two alike, and neither depends on the request's form."""
    return float(np.float32(-token / 8 - position / 1024))


@dataclass
class ScriptedTeacher:
    """`script` is asked at each request, by the number of those before it, for what is to go wrong.

    An int is a status; "short" an answer of too few logprobs, "hang" none until the test ends, any other word the kind
    of a refusal of the text. `hold` is waited for before each good answer.
    """

    script: Callable[[int], int | str | None] = lambda _: None
    tokenizer: str = TOKENIZER
    version: str = "0.0"
    instance: str = ""
    token: str | None = None
    hold: asyncio.Event | None = None
    requests: list[LogprobsRequest] = field(default_factory=list)
    under_way: int = 0
    most_under_way: int = 0

    @asynccontextmanager
    async def running(self, *, port: int = 0) -> AsyncIterator[str]:
        """Its address while it runs."""
        with Listener(host="127.0.0.1", port=port) as listener:
            server = asyncio.create_task(serve_http(self._app(), listener, finish_s=0))
            try:
                yield listener.url
            finally:
                server.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await server

    def _app(self) -> FastAPI:
        app = create_app(
            service="generator",
            version="1",
            token=None if self.token is None else SecretStr(self.token),
            readiness=lambda: Readiness(ready=True),
            metrics=Metrics("generator"),
        )

        @app.post("/v1/logprobs")
        async def logprobs(asked: Annotated[LogprobsRequest, Depends(json_body(LogprobsRequest))]) -> Response:
            number = len(self.requests)
            self.requests.append(asked)
            self.under_way += 1
            self.most_under_way = max(self.most_under_way, self.under_way)
            try:
                return await self._answer(asked, self.script(number))
            finally:
                self.under_way -= 1

        return app

    async def _answer(self, asked: LogprobsRequest, trouble: int | str | None) -> Response:
        if isinstance(trouble, int):
            raise RequestRefused(trouble, "scripted", "as the test wants it")
        if trouble == "hang":
            await asyncio.Event().wait()
        if trouble not in (None, "short"):
            raise RequestRefused(422, str(trouble), "as the test wants it")
        if self.hold is not None:
            await self.hold.wait()
        cut = 1 if trouble == "short" else 0
        return json_answer(
            LogprobsAnswer(
                generator_id="teacher",
                instance=self.instance,
                policy_version=self.version,
                tokenizer=self.tokenizer,
                sequences=tuple(_scored(one[: len(one) - cut], top=asked.top) for one in asked.sequences),
            )
        )


def _scored(tokens: tuple[int, ...], *, top: int) -> SequenceLogprobs:
    """The likeliest tokens are 0, 1, 2, …, by what `logprob` says."""
    rows = range(1, len(tokens)) if top else ()
    return SequenceLogprobs(
        logprobs=tuple(logprob(token, at) for at, token in enumerate(tokens) if at),
        top_token_ids=tuple(tuple(range(top)) for _ in rows),
        top_logprobs=tuple(tuple(logprob(token, at) for token in range(top)) for at in rows),
    )
