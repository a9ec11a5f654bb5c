"""Reward services that do what a test says, on real sockets of the loopback address."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web

from protocol.rewards import ScoreError, ScoreItem, ScoreRequest, ScoreResponse, ScoreResult
from protocol.trajectories import ErrorKind


@dataclass(frozen=True)
class ArrivedRequest:
    """A request as it arrived, at `when` on the event loop's clock."""

    http: web.Request
    body: ScoreRequest
    when: float

    @property
    def texts(self) -> list[str]:
        return [item.completion for item in self.body.items]


Answer = Callable[[ArrivedRequest], Awaitable[web.StreamResponse]]


@dataclass
class ScriptedService:
    """Answers its requests with `script` in turn, and then with `always`; `under_way` are those without an answer."""

    script: deque[Answer] = field(default_factory=deque)
    always: Answer | None = None
    asked: list[ArrivedRequest] = field(default_factory=list)
    under_way: int = 0
    url: str = ""
    ready: Callable[[web.Request], Awaitable[web.Response]] | None = None

    async def handle(self, http: web.Request) -> web.StreamResponse:
        body = ScoreRequest.model_validate_json(await http.read())
        asked = ArrivedRequest(http, body, asyncio.get_running_loop().time())
        self.asked.append(asked)
        answer = self.script.popleft() if self.script else self.always or scores
        self.under_way += 1
        try:
            return await answer(asked)
        finally:
            self.under_way -= 1


def of(service_id: str, results: Sequence[ScoreResult]) -> web.Response:
    return web.Response(text=ScoreResponse(service_id=service_id, results=tuple(results)).model_dump_json())


def result(item: ScoreItem, *, id: str | None = None) -> ScoreResult:
    """The reward of a scripted service: the length of the completion."""
    return ScoreResult(id=id or item.id, verifier=item.verifier, reward=float(len(item.completion)), latency_s=0.25)


def failed(item: ScoreItem, *, kind: ErrorKind = "infrastructure") -> ScoreResult:
    error = ScoreError(kind=kind, message="scripted")
    return ScoreResult(id=item.id, verifier=item.verifier, latency_s=0.25, error=error)


async def scores(asked: ArrivedRequest) -> web.StreamResponse:
    """A reward for each item."""
    return of("scripted", [result(item) for item in asked.body.items])


def fails(*texts: str, kind: ErrorKind = "infrastructure") -> Answer:
    """An error for the items with these completions, a reward for the others."""

    async def answer(asked: ArrivedRequest) -> web.StreamResponse:
        return of(
            "scripted",
            [failed(item, kind=kind) if item.completion in texts else result(item) for item in asked.body.items],
        )

    return answer


def breaks_on(*texts: str) -> Answer:
    """500 for a request with one of these completions in it."""

    async def answer(asked: ArrivedRequest) -> web.StreamResponse:
        return await (status(500)(asked) if set(texts) & set(asked.texts) else scores(asked))

    return answer


def status(code: int, **headers: str) -> Answer:
    async def answer(_: ArrivedRequest) -> web.StreamResponse:
        return web.Response(status=code, text="scripted", headers={k.replace("_", "-"): v for k, v in headers.items()})

    return answer


def held(event: asyncio.Event, then: Answer = scores) -> Answer:
    """Answers once the event is set."""

    async def answer(asked: ArrivedRequest) -> web.StreamResponse:
        await event.wait()
        return await then(asked)

    return answer


async def breaks_off(asked: ArrivedRequest) -> web.StreamResponse:
    """The connection ends in the middle of the answer."""
    whole = (await scores(asked)).text  # type: ignore[attr-defined]
    response = web.StreamResponse(headers={"Content-Length": str(len(whole))})
    await response.prepare(asked.http)
    await response.write(whole[: len(whole) // 2].encode())
    assert asked.http.transport is not None
    asked.http.transport.abort()
    return response


def lines(event: asyncio.Event, *late: str, breaks: bool = False) -> Answer:
    """A result a line; those of the `late` completions once the event is set, or never, if it then `breaks`."""

    async def answer(asked: ArrivedRequest) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(asked.http)
        for item in asked.body.items:
            if item.completion not in late:
                await response.write(_line(item))
        await event.wait()
        if breaks:
            assert asked.http.transport is not None
            asked.http.transport.abort()
            return response
        for item in asked.body.items:
            if item.completion in late:
                await response.write(_line(item))
        await response.write_eof()
        return response

    return answer


def _line(item: ScoreItem) -> bytes:
    return result(item).model_copy(update={"service_id": "lines"}).model_dump_json().encode() + b"\n"


@asynccontextmanager
async def serving(*services: ScriptedService) -> AsyncIterator[list[str]]:
    """The addresses of the services. A request whose caller has gone is cancelled."""
    runners: list[web.AppRunner] = []
    try:
        for service in services:
            runners.append(runner := web.AppRunner(_app(service), shutdown_timeout=0.1, handler_cancellation=True))
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            host, port = runner.addresses[0]
            service.url = f"http://{host}:{port}"
        yield [service.url for service in services]
    finally:
        for runner in runners:
            await runner.cleanup()


def _app(service: ScriptedService) -> web.Application:
    async def ready(_: web.Request) -> web.Response:
        return web.Response(text='{"ready": true}')

    app = web.Application()
    app.router.add_post("/v1/score", service.handle)
    app.router.add_get("/readyz", service.ready or ready)
    return app
