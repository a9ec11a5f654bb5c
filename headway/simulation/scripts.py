"""Scripted environments and reward services: well, slow, hanging, failing, lying."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from env_service.environments.interface import Action, OfferedEnvironment, Step, Task, Verification
from headway.simulation.http import FakeListener, serve_http
from headway.simulation.world import active
from protocol.trajectories import Purpose
from services.process import Stop

NAME = "scripted"
_LETTERS = "abcdefgh"


@dataclass
class EnvironmentScript:
    """How the tasks behave, by their index. `slow_s` is how long a step takes at most."""

    tasks: int = 40
    evaluation_tasks: int = 4
    slow_s: float = 0.2
    hangs: set[int] = field(default_factory=set)
    raises: set[int] = field(default_factory=set)


class ScriptedTasks:
    """See TaskSource."""

    def __init__(self, script: EnvironmentScript) -> None:
        self._script = script

    @property
    def train_tasks(self) -> int:
        return self._script.tasks

    @property
    def evaluation_tasks(self) -> int:
        return self._script.evaluation_tasks

    def task(self, purpose: Purpose, index: int) -> Task:
        """A few letters that name the task."""
        if purpose == "train" and index in self._script.raises:
            raise ValueError(f"task {index} cannot be made")
        prompt = " ".join(_LETTERS[(index >> shift) % 8] for shift in (6, 3, 0))
        return Task(prompt=prompt, verification=Verification("scripted", {"task": index, "purpose": purpose}))


class ScriptedEnvironment:
    """See Environment."""

    def __init__(self, script: EnvironmentScript) -> None:
        self._script = script
        self._task: Task | None = None

    def reset(self, task: Task, seed: int) -> Any:
        """The task's prompt."""
        self._task = task
        return task.prompt

    async def step(self, action: Action) -> Step:
        """The end of the conversation, if it comes."""
        assert self._task is not None
        arguments = self._task.verification.arguments
        if arguments["purpose"] == "train" and arguments["task"] in self._script.hangs:
            await asyncio.Event().wait()
        await asyncio.sleep(active().random.random() * self._script.slow_s)
        return Step(verification=self._task.verification)


def environments(script: EnvironmentScript) -> Mapping[str, OfferedEnvironment]:
    """What an env_service offers."""
    offered = OfferedEnvironment(name=NAME, tasks=ScriptedTasks(script), start=lambda: ScriptedEnvironment(script))
    return {NAME: offered}


@dataclass
class RewardScript:
    """How a reward service behaves. `lies` is how many of its next rewards are absurd, `uniform` the share of equal
    ones.
    """

    latency_s: float = 0.05
    hanging: bool = False
    failing: bool = False
    lies: int = 0
    uniform: float = 0.1
    errors: float = 0.0

    def reward(self) -> dict[str, object]:
        """One item's reward, or its error."""
        random = active().random
        if self.lies > 0:
            self.lies -= 1
            return {"reward": 1e300}
        if random.random() < self.errors:
            return {"error": {"kind": "infrastructure", "message": "a worker died"}}
        return {"reward": 1.0 if random.random() < self.uniform else round(random.random(), 6)}


class RewardService:
    """`/readyz` and `/v1/score`, over the wire."""

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
            await asyncio.Event().wait()
        await asyncio.sleep(self._script.latency_s * (0.5 + active().random.random()))
        if scope["path"] == "/readyz":
            await _answer(send, {"ready": True})
        elif self._script.failing:
            await _answer(send, {"error": {"kind": "internal", "message": "broken"}}, status=500)
        else:
            await _answer(send, self._scored(json.loads(body)))

    def _scored(self, request: dict[str, Any]) -> dict[str, object]:
        results = [
            {"id": item["id"], "verifier": item["verifier"], "latency_s": 0.01, **self._script.reward()}
            for item in request["items"]
        ]
        return {"service_id": self._service_id, "results": results}


async def _answer(send: Any, body: dict[str, object], *, status: int = 200) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(body).encode(), "more_body": False})
