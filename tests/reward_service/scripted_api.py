"""A service that is asked by POST, on a real socket, whose answers a test scripts."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web

JsonObject = dict[str, object]


@dataclass(frozen=True)
class Refusal:
    """An answer that is none."""

    status: int
    text: str = "scripted"
    headers: dict[str, str] = field(default_factory=dict)


HANG = "hang"
BREAK = "break"

Answer = JsonObject | Refusal | str


@dataclass
class ScriptedApi:
    """Answers with `script(number of earlier requests, body)`; a string that is neither HANG nor BREAK as it stands.

    With `hold` each request waits for it first.
    """

    script: Callable[[int, JsonObject], Answer]
    hold: asyncio.Event | None = None
    bodies: list[JsonObject] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    under_way: int = 0
    most_under_way: int = 0
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        number = len(self.bodies)
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        self.paths.append(request.path)
        self.times.append(asyncio.get_running_loop().time())
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        async with self.changed:
            self.changed.notify_all()
        try:
            if self.hold is not None:
                await self.hold.wait()
            return await self._answered(request, self.script(number, body))
        finally:
            self.under_way -= 1

    async def _answered(self, request: web.Request, answer: Answer) -> web.StreamResponse:
        if isinstance(answer, Refusal):
            return web.Response(status=answer.status, text=answer.text, headers=answer.headers)
        if answer == HANG:
            await self.ended.wait()
        if answer in (HANG, BREAK):
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        return web.Response(text=answer if isinstance(answer, str) else json.dumps(answer))

    async def requests_under_way(self, count: int) -> None:
        """Wait until there are so many."""
        async with self.changed:
            await self.changed.wait_for(lambda: self.under_way >= count)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        """Its address while it runs."""
        app = web.Application()
        app.router.add_post("/{path:.*}", self.handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            host, port = runner.addresses[0]
            yield f"http://{host}:{port}"
        finally:
            self.ended.set()
            await runner.cleanup()
