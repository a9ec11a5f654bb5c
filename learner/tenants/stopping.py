"""Ends what clients wait for when the process is asked to stop: their polls would hold it up, and be cut off."""

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.http.refusals import RequestRefused, refused_answer
from services.process import Stop


class PollsUntilStop:
    """An application whose requests below `prefix` are answered with 503 at a stop, by which the SDK comes again."""

    def __init__(self, app: ASGIApp, *, stop: Stop, prefix: str) -> None:
        self._app, self._stop, self._prefix = app, stop, prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(self._prefix):
            await self._app(scope, receive, send)
            return
        begun = False

        async def noted(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        answering = asyncio.ensure_future(self._app(scope, receive, noted))
        stopping = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({answering, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if answering.done() or begun:
                await answering
                return
        finally:
            stopping.cancel()
            answering.cancel()
            await asyncio.wait([answering])
        refusal = RequestRefused(503, "stopping", "the learner stops; ask its next life", retry_after_s=1.0)
        await refused_answer(refusal)(scope, receive, send)
