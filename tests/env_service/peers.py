"""Scripted generators, reward services and a learner, on real sockets of the loopback address."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from aiohttp import web

from protocol.generation import GeneratePart, GenerateRequest, Sampling
from protocol.messages import Fleet, Hello, Lease, LeaseGrant, Message, ServingGenerator, Welcome
from protocol.rewards import ScoreError, ScoreRequest, ScoreResponse, ScoreResult
from protocol.trajectories import ErrorKind, Purpose, VersionSpan
from services.zmq.sockets import RouterSocket

END = 12
M = TypeVar("M", bound=Message)


def part(index: int, tokens: Sequence[int], *, version: str = "1.3", last: bool = True) -> GeneratePart:
    """A part that stamps all of its tokens with one version."""
    return GeneratePart(
        index=index,
        token_ids=tuple(tokens),
        behavior_logprobs=tuple(-0.5 for _ in tokens),
        version_spans=(VersionSpan(version=version, start=0, end=len(tokens)),),
        finish_reason="stop" if last else None,
    )


@dataclass
class ScriptedCompletions:
    """Answers each request with `script(request)`: parts, or a status; `None` as a part breaks the connection."""

    script: Callable[[GenerateRequest], Sequence[GeneratePart | None] | int]
    requests: list[GenerateRequest] = field(default_factory=list)
    hold: asyncio.Event | None = None
    holds: Callable[[GenerateRequest], bool] = lambda _: True
    url: str = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        asked = GenerateRequest.model_validate_json(await request.read())
        self.requests.append(asked)
        answer = self.script(asked)
        if isinstance(answer, int):
            body = {"error": {"kind": "test", "message": f"scripted {answer}"}}
            return web.Response(status=answer, text=json.dumps(body))
        response = web.StreamResponse()
        await response.prepare(request)
        for each in answer:
            if each is None:
                assert request.transport is not None
                request.transport.abort()
                return response
            await response.write(each.model_dump_json().encode() + b"\n")
        if self.hold is not None and self.holds(asked):
            await self.hold.wait()
        await response.write_eof()
        return response


@dataclass
class ScriptedRewards:
    """Answers with `score(completion, arguments)`, last item first; a string is an error of kind `error_kind`.

    `statuses` are answered first, if given.
    """

    score: Callable[[str, dict[str, object]], float | str]
    error_kind: ErrorKind = "data"
    statuses: list[int] = field(default_factory=list)
    requests: list[ScoreRequest] = field(default_factory=list)
    url: str = ""
    service_id: str = "judge"
    explanation: str = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        asked = ScoreRequest.model_validate_json(await request.read())
        self.requests.append(asked)
        if self.statuses:
            return web.Response(status=self.statuses.pop(0), text="scripted")
        results = []
        for item in reversed(asked.items):
            said = self.score(item.completion, dict(item.arguments))
            error = ScoreError(kind=self.error_kind, message=said) if isinstance(said, str) else None
            reward = None if isinstance(said, str) else said
            results.append(
                ScoreResult(
                    id=item.id,
                    verifier=item.verifier,
                    reward=reward,
                    latency_s=0.0,
                    error=error,
                    explanation=self.explanation,
                )
            )
        return web.Response(text=ScoreResponse(service_id=self.service_id, results=tuple(results)).model_dump_json())


@asynccontextmanager
async def served(
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]], path: str, *, port: int = 0
) -> AsyncIterator[str]:
    """The address of a server with one POST route and a ready answer on /readyz."""

    async def ready(_: web.Request) -> web.Response:
        return web.Response(text='{"ready": true}')

    app = web.Application()
    app.router.add_post(path, handler)
    app.router.add_get("/readyz", ready)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", port, reuse_address=True)
        await site.start()
        host, port = runner.addresses[0]
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


def lease(
    lease_id: int = 0,
    *,
    incarnation: int = 1,
    attempt: int = 0,
    purpose: Purpose = "train",
    environment: str = "addition",
    task_index: int = 0,
    group_size: int = 2,
) -> Lease:
    """A lease with plain sampling."""
    return Lease(
        incarnation=incarnation,
        lease_id=lease_id,
        attempt=attempt,
        purpose=purpose,
        environment=environment,
        task_index=task_index,
        seed=7,
        group_size=group_size,
        sampling=Sampling(max_tokens=4),
        timeout_s=30.0,
    )


def serving(name: str, url: str) -> ServingGenerator:
    return ServingGenerator(generator_id=name, url=url, policy_version="1.3")


@asynccontextmanager
async def hanging(connections: list[asyncio.StreamWriter]) -> AsyncIterator[str]:
    """The address of a process that is stopped: connections are made, and nothing is ever answered."""
    server = await asyncio.start_server(lambda _, writer: connections.append(writer), "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for connection in connections:
            connection.close()


async def eventually(condition: Callable[[], object], *, within_s: float = 60.0) -> None:
    """Return when the condition holds."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110  what is waited for has no event of its own
            await asyncio.sleep(0.005)


class ScriptedLearner:
    """The learner's side of the conversation, said step by step by the test."""

    def __init__(self, router: RouterSocket) -> None:
        self.router = router
        self.seen: list[Message] = []
        self.peer: str | None = None
        self.answer: Welcome | None = None

    async def expect(self, kind: type[M], *, within_s: float = 60.0) -> M:
        """The next message of a kind; others before it are only kept in `seen`, but that a hello is answered."""
        async with asyncio.timeout(within_s):
            while True:
                self.peer, message = await self.router.receive()
                self.seen.append(message)
                if isinstance(message, kind):
                    return message
                if isinstance(message, Hello) and self.answer is not None:
                    await self.say(self.answer)

    async def say(self, *messages: Message) -> None:
        assert self.peer is not None, "nobody has spoken yet"
        for message in messages:
            await self.router.send(self.peer, message)

    async def welcome(
        self, *generators: ServingGenerator, incarnation: int = 1, run: str = "r", heartbeat_every_s: float = 0.1
    ) -> Hello:
        """Wait for a hello and answer it."""
        hello = await self.expect(Hello)
        self.answer = Welcome(run=run, incarnation=incarnation, heartbeat_every_s=heartbeat_every_s)
        await self.say(self.answer, Fleet(generators=generators))
        return hello

    async def grant(self, *leases: Lease) -> None:
        await self.say(LeaseGrant(leases=leases))
