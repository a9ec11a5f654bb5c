"""Results as they finish, one JSON object a line."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from protocol.rewards import ScoreResult
from services.http_app import streamed_answer

LINES = "application/x-ndjson"


class StreamedResults(Response):
    """An answer whose lines are what `opened` yields.

    A RequestRefused while it is opened is the answer's status. It is left when all is sent or the client has gone.
    """

    media_type = LINES

    def __init__(self, opened: AbstractAsyncContextManager[AsyncIterator[ScoreResult]]) -> None:
        super().__init__()
        self._opened = opened

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Open, send, close."""
        async with self._opened as results:
            await streamed_answer(results)(scope, receive, send)
