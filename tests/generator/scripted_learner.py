"""A learner that serves packed buckets over HTTP, and can damage, withhold or cut off its chunks."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import xxhash
from fastapi import FastAPI, Response

from protocol.fleet import CHUNK_HASH_HEADER, PullPlan
from protocol.status import Readiness
from services.http.app import create_app
from services.http.bodies import json_answer
from services.http.metrics import Metrics
from services.http.refusals import RequestRefused
from services.http.server import Listener, serve_http
from tests.generator.conftest import SentBucket

CHUNK_BYTES = 50_000


@dataclass
class ScriptedDownloads:
    """`spoil` is asked at each chunk, by the number of chunks asked for before: "damage", "fail", "hang" or nothing."""

    buckets: Sequence[SentBucket]
    version: str
    spoil: Callable[[int], str] = lambda _: ""
    url: str = ""
    asked: int = 0
    hanging: asyncio.Event = field(default_factory=asyncio.Event)

    @asynccontextmanager
    async def running(self) -> AsyncIterator["ScriptedDownloads"]:
        with Listener(host="127.0.0.1", port=0) as listener:
            self.url = listener.url
            server = asyncio.create_task(serve_http(self._app(), listener, finish_s=0))
            try:
                yield self
            finally:
                server.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await server

    def _app(self) -> FastAPI:
        app = create_app(
            service="learner",
            version="1",
            token=None,
            readiness=lambda: Readiness(ready=True),
            metrics=Metrics("learner"),
        )

        @app.get("/v1/weights/{version}/plan")
        async def plan(version: str) -> Response:
            if version != self.version:
                raise RequestRefused(404, "not_kept", f"version {version} is not kept here")
            specs = tuple(bucket.spec for bucket in self.buckets)
            return json_answer(PullPlan(version=version, chunk_bytes=CHUNK_BYTES, buckets=specs))

        @app.get("/v1/weights/{version}/buckets/{index}")
        async def chunk(version: str, index: int, offset: int, length: int) -> Response:
            spoil, self.asked = self.spoil(self.asked), self.asked + 1
            if spoil == "hang":
                self.hanging.set()
                await asyncio.Event().wait()
            if spoil == "fail":
                return Response("broken", status_code=500)
            data = self.buckets[index].payload.numpy().tobytes()[offset : offset + length]
            headers = {CHUNK_HASH_HEADER: xxhash.xxh3_64_hexdigest(data)}
            sent = bytes([data[0] ^ 1]) + data[1:] if spoil == "damage" else data
            return Response(sent, media_type="application/octet-stream", headers=headers)

        return app
