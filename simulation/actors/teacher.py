"""Scripted teachers: a logprob for each token of a sequence, which tells the tokens before it and the token itself."""

import asyncio
import json
from typing import Any

from services.process import Stop
from simulation.actors.engine import context_of
from simulation.world.clock import active
from simulation.world.http import FakeListener, serve_http

_LATENCY_S = 0.05
_VALUES = 1 << 12


def taught(context: int) -> float:
    """The logprob of the last token of a context, which has this checksum; float32 holds it as it is."""
    return -(context % _VALUES + 1) / _VALUES


class StubTeacher:
    """`/readyz` and `/v1/logprobs` of a generator whose weights stay as they are."""

    async def serve(self, stop: Stop) -> None:
        """The life of its process."""
        with FakeListener(host="", port=7310) as listener:
            serving = asyncio.ensure_future(serve_http(self, listener))
            await stop.wait()
            serving.cancel()

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        body = (await receive())["body"]
        await asyncio.sleep(_LATENCY_S * (0.5 + active().random.random()))
        answer = {"ready": True} if scope["path"] == "/readyz" else _scored(json.loads(body)["sequences"])
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": json.dumps(answer).encode(), "more_body": False})


def _scored(sequences: list[list[int]]) -> dict[str, object]:
    rows = [{"logprobs": _logprobs(sequence)} for sequence in sequences]
    return {"generator_id": "teacher", "policy_version": "1.0", "tokenizer": "", "sequences": rows}


def _logprobs(sequence: list[int]) -> list[float]:
    """Of all tokens but the first."""
    found, context = [], context_of(sequence[:1])
    for token in sequence[1:]:
        context = context_of((token,), context)
        found.append(taught(context))
    return found
