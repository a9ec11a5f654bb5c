"""A scripted generator with adapters: its tokens tell whose weights sampled them, over the wire, with all its failures.

It fetches what it does not hold from the learner, as the real one does, and takes newer weights of a target that is
replaced between two tokens.
"""

import asyncio
import hashlib
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import Depends, Response
from safetensors.numpy import load

from protocol.adapters import (
    ADAPTER_FILES,
    AdapterSampleAnswer,
    AdapterSampleRequest,
    AdapterSequence,
    AdapterSpan,
    OfferAnswer,
    OfferedAdapter,
    adapter_name,
)
from protocol.status import Readiness
from services.http.bodies import json_answer, json_body
from services.http.client import HttpClient, ServiceError
from services.http.refusals import RequestRefused
from services.process import Stop
from simulation.actors.tenant_trainer import MARK
from simulation.world.clock import active
from simulation.world.http import FakeListener, serve_http
from simulation.world.routes import create_app

PORT = 7310
BASE_MARK = b"base"
_FETCH_S = 30.0
_VALUES = 64


def token_of(mark: bytes, prompt: tuple[int, ...], *, place: int, number: int) -> tuple[int, float]:
    """A token and its logprob, which float32 holds: that of a place of a sequence, sampled from the weights."""
    text = repr((prompt, place, number)).encode()
    digest = hashlib.blake2b(mark + text, digest_size=4).digest()
    return int.from_bytes(digest[:2], "little"), -(digest[2] % _VALUES + 1) / _VALUES


@dataclass
class StubAdapterGenerator:
    """A life of it. `token_s` is the mean time of a token."""

    name: str
    learner: str
    token_s: float
    _held: dict[str, tuple[int, bytes]] = field(default_factory=dict)

    async def serve(self, stop: Stop) -> None:
        """The life of its process."""
        async with HttpClient() as client, asyncio.TaskGroup() as tasks:
            with FakeListener(host="", port=PORT) as listener:
                serving = tasks.create_task(serve_http(self._app(client, tasks), listener))
                await stop.wait()
                serving.cancel()

    def _app(self, client: HttpClient, tasks: asyncio.TaskGroup) -> Any:
        app = create_app(readiness=lambda: Readiness(ready=True))

        @app.post("/v1/adapters/sample")
        async def sample(asked: Annotated[AdapterSampleRequest, Depends(json_body(AdapterSampleRequest))]) -> Response:
            return json_answer(await self._sample(client, asked))

        @app.post("/v1/adapters/offer")
        async def offer(offered: Annotated[OfferedAdapter, Depends(json_body(OfferedAdapter))]) -> Response:
            if offered.target_id in self._held:
                tasks.create_task(self._follow(client, offered))
            return json_answer(OfferAnswer(held=None))

        return app

    async def _follow(self, client: HttpClient, offered: OfferedAdapter) -> None:
        """It is fetched later, if it cannot be now."""
        try:
            await self._bring(client, offered)
        except RequestRefused:
            return

    async def _bring(self, client: HttpClient, offered: OfferedAdapter) -> None:
        held = self._held.get(offered.target_id)
        if held is not None and held[0] >= offered.version:
            return
        url = f"{self.learner}/v1/adapters/{offered.name}"
        try:
            files = [(await client.download(f"{url}/{file}", deadline_s=_FETCH_S))[0] for file in ADAPTER_FILES]
        except (ServiceError, TimeoutError) as error:
            raise RequestRefused(503, "adapter_not_fetched", str(error)) from error
        if adapter_name(files) != offered.name:
            raise RequestRefused(503, "adapter_not_fetched", f"{offered.name} is not what its name says")
        mark = bytes(load(files[1])[MARK].tobytes())
        held = self._held.get(offered.target_id)
        if held is None or held[0] < offered.version:
            self._held[offered.target_id] = offered.version, mark

    async def _sample(self, client: HttpClient, asked: AdapterSampleRequest) -> AdapterSampleAnswer:
        if asked.adapter is not None:
            await self._bring(client, asked.adapter)
        sequences = [await self._sequence(asked, number) for number in range(asked.n)]
        return AdapterSampleAnswer(generator_id=self.name, sequences=tuple(sequences))

    async def _sequence(self, asked: AdapterSampleRequest, number: int) -> AdapterSequence:
        tokens, logprobs, versions = [], [], []
        for place in range(asked.max_tokens):
            await asyncio.sleep(active().random.expovariate(1 / self.token_s))
            version, mark = (0, BASE_MARK) if asked.adapter is None else self._held[asked.adapter.target_id]
            token, logprob = token_of(mark, asked.prompt_token_ids, place=place, number=number)
            tokens.append(token)
            logprobs.append(logprob)
            versions.append(version)
        return AdapterSequence(
            token_ids=tuple(tokens),
            logprobs=tuple(logprobs),
            spans=tuple(_spans(versions)),
            finish_reason="length",
        )


def _spans(versions: list[int]) -> list[AdapterSpan]:
    starts = [place for place, version in enumerate(versions) if place == 0 or versions[place - 1] != version]
    ends = [*starts[1:], len(versions)]
    return [AdapterSpan(version=versions[start], start=start, end=end) for start, end in zip(starts, ends, strict=True)]
