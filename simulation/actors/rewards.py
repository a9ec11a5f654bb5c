"""Scripted reward services: well, slow, hanging, failing, lying; their answers whole or as they come."""

import asyncio
import json
import zlib
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from protocol.model import PROTOCOL_VERSION
from protocol.status import Status
from services.process import Stop
from simulation.actors.environment import is_uniform
from simulation.world.clock import active
from simulation.world.http import FakeListener, serve_http

ABSURD = 1e3
"""Rewards beyond this, to either side, are ones that a learner was told to train nothing on."""
_LIES = (1e300, -1e300, 1e4, -1e4)
"""No float32 holds some of them."""
_CLIENT_IS_GONE_S = 300.0
"""No client waits for so long: its request is not kept for ever, as one of a real service is not."""
_LINES = "application/x-ndjson"
_STALL = 20.0
"""So many times longer a slow answer takes."""


@dataclass
class RewardScript:
    """Behaviour of a reward service. `lies` is the number of its next rewards that are absurd, `uniform` the share of
    equal ones.
    """

    latency_s: float = 0.05
    stalls: float = 0.0
    """Share of the requests, and of the results of an answer that comes in parts, that are slow."""
    hanging: bool = False
    failing: bool = False
    lies: int = 0
    uniform: float = 0.1
    errors: float = 0.0
    unjudged: Collection[int] = ()
    """Tasks whose completions no verifier can judge."""

    def judge(self, *, task: int, completion: str) -> dict[str, object]:
        """Judges an item: its reward, or its error."""
        from simulation.actors.trainer import Trainers  # deferred: it checks rewards with this module

        if self.lies > 0:
            self.lies -= 1
            active().part(Trainers).absurd += 1
            return {"reward": active().random.choice(_LIES)}
        if task in self.unjudged:
            active().part(Trainers).unjudged.add((task, completion))
            return {"error": {"kind": "data", "message": "the task's answer cannot be read"}}
        if active().random.random() < self.errors:
            active().part(Trainers).erred[task, completion] += 1
            return {"error": {"kind": "infrastructure", "message": "a worker died"}}
        return {"reward": reward_of(task=task, completion=completion, uniform=self.uniform)}

    def takes_s(self) -> float:
        """Seconds until something is judged."""
        random = active().random
        seconds = self.latency_s * (0.5 + random.random())
        return seconds * _STALL if self.stalls and random.random() < self.stalls else seconds


def reward_of(*, task: int, completion: str, uniform: float) -> float:
    """The true reward of a completion: all of some tasks' are equal, and those of the others tell them apart."""
    if is_uniform(task, share=uniform):
        return 1.0
    return round(zlib.crc32(f"{task} {completion}".encode()) / (1 << 32), 6)


class StubRewardService:
    """`/readyz`, `/v1/status` and `/v1/score`, over the wire."""

    def __init__(self, script: RewardScript, *, service_id: str) -> None:
        self._script = script
        self._service_id = service_id

    async def serve(self, stop: Stop) -> None:
        """The life of its process."""
        with FakeListener(host="", port=7320) as listener:
            serving = asyncio.ensure_future(serve_http(self, listener))
            await stop.wait()
            serving.cancel()

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        body = (await receive())["body"]
        if self._script.hanging:
            await asyncio.sleep(_CLIENT_IS_GONE_S)
            return
        await asyncio.sleep(self._script.takes_s())
        if scope["path"] == "/readyz":
            await _answer(send, {"ready": True})
        elif self._script.failing:
            await _answer(send, {"error": {"kind": "internal", "message": "broken"}}, status=500)
        elif scope["path"] == "/v1/status":
            await _answer(send, self._status())
        elif (b"accept", _LINES.encode()) in scope["headers"]:
            await self._in_parts(send, json.loads(body)["items"])
        else:
            await _answer(send, {"service_id": self._service_id, "results": self._results(json.loads(body)["items"])})

    def _status(self) -> dict[str, object]:
        status = Status(
            id=self._service_id, service="reward-service", version="0", protocol_version=PROTOCOL_VERSION, pid=1,
            host=self._service_id, uptime_s=0.0, stopping=False, waits=(), failures=(),
        )  # fmt: skip
        return status.model_dump(mode="json")

    async def _in_parts(self, send: Any, items: list[dict[str, Any]]) -> None:
        """A line for each item, in any order; the first ones may come long before the last."""
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", _LINES.encode())]})
        for item in active().random.sample(items, len(items)):
            line = json.dumps({**self._results([item])[0], "service_id": self._service_id}) + "\n"
            await send({"type": "http.response.body", "body": line.encode(), "more_body": True})
            await asyncio.sleep(self._script.takes_s())
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _results(self, items: list[dict[str, Any]]) -> list[dict[str, object]]:
        return [
            {"id": item["id"], "verifier": item["verifier"], "latency_s": 0.01, **self._judged(item)} for item in items
        ]

    def _judged(self, item: dict[str, Any]) -> dict[str, object]:
        return self._script.judge(task=item["arguments"]["task"], completion=item["completion"])


async def _answer(send: Any, body: dict[str, object], *, status: int = 200) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(body).encode(), "more_body": False})
