"""Bodies of requests that are read as models, and answers of models: whole, or as a stream of lines."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Generic, TypeVar

from fastapi import Request, Response
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from protocol.status import ErrorBody
from services.http.refusals import RequestRefused, refusal_of

_BODY_S = 60.0
M = TypeVar("M", bound=BaseModel)


class JsonBody(Generic[M]):
    """A FastAPI dependency, made by `json_body`. `/openapi.json` names its model as the body of the request."""

    def __init__(self, model: type[M], *, deadline_s: float = _BODY_S) -> None:
        self.model = model
        self._deadline_s = deadline_s

    async def __call__(self, request: Request) -> M:
        """The body. Raises RequestRefused."""
        try:
            async with asyncio.timeout(self._deadline_s):
                raw = await request.body()
        except TimeoutError as error:
            sender = "the client" if request.client is None else f"{request.client.host}:{request.client.port}"
            message = f"{sender} did not send its body in {self._deadline_s:g} s"
            raise RequestRefused(408, "slow_body", message) from error
        except ClientDisconnect as error:
            raise RequestRefused(499, "client_left", "the client left before it had sent its body") from error
        try:
            return self.model.model_validate_json(raw)
        except ValidationError as error:
            raise refusal_of(error.errors(include_url=False, include_context=False), self.model) from error


def json_body(model: type[M], *, deadline_s: float = _BODY_S) -> JsonBody[M]:
    """A FastAPI dependency that reads the body as `model`: `body: Annotated[Ask, Depends(json_body(Ask))]`.

    Parses the bytes directly, which is faster than FastAPI's way over Python objects, and lets strict models
    take JSON's arrays as tuples. Refuses with 400 what is not JSON, and with 422 what is not the model.
    """
    return JsonBody(model, deadline_s=deadline_s)


def json_answer(body: BaseModel, *, status: int = 200) -> Response:
    """A model as a JSON answer, without FastAPI's second validation."""
    return Response(body.model_dump_json(), status_code=status, media_type="application/json")


def streamed_answer(
    parts: AsyncIterator[BaseModel | tuple[BaseModel, ...]], *, within: AbstractContextManager[None] | None = None
) -> Response:
    """Models as a streamed answer, one JSON object a line; those of a tuple are written in one piece. `within` is
    entered at once and left when the answer has ended.

    The status is sent before the first part, so a RequestRefused that `parts` raises later becomes a last line with an
    ErrorBody. Any other error breaks the connection. A generator is closed when the client goes away.
    """
    return _StreamedAnswer(parts, within=within or nullcontext())


class _StreamedAnswer(StreamingResponse):
    """Closes its generators itself: one that was cut off between two parts would wait for the garbage collector."""

    def __init__(
        self, parts: AsyncIterator[BaseModel | tuple[BaseModel, ...]], *, within: AbstractContextManager[None]
    ) -> None:
        self._within = ExitStack()
        self._within.enter_context(within)
        self._parts = parts
        self._lines = _lines(parts)
        super().__init__(self._lines, media_type="application/x-ndjson")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._within:
            try:
                await super().__call__(scope, receive, send)
            finally:
                await self._lines.aclose()
                if isinstance(self._parts, AsyncGenerator):
                    await self._parts.aclose()


async def _lines(parts: AsyncIterator[BaseModel | tuple[BaseModel, ...]]) -> AsyncGenerator[bytes, None]:
    try:
        async for some in parts:
            together = some if isinstance(some, tuple) else (some,)
            yield "".join([part.model_dump_json() + "\n" for part in together]).encode()
            # Writing to a client that left suspends nothing: without this, nobody could stop a ready producer.
            await asyncio.sleep(0)
    except RequestRefused as refusal:
        yield ErrorBody(error=refusal.problem).model_dump_json().encode() + b"\n"
