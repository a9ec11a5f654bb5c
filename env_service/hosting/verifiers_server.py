"""`source = "verifiers"`: an environment of verifiers 0.4, whose env server runs in a virtual environment of its own.

options = { addresses = ["tcp://127.0.0.1:5600"], train_file = "tasks.jsonl" }

    task ─▶ run, with the session's address and key ─▶ env server: its harness asks the policy by that address
    deltas of the trace ◀─────────────────────────────┘   the reward stands in the last of them

The policy is asked like by any agent (env_service/agents), so tokens, logprobs and versions are recorded here.
"""

import asyncio
import logging
import secrets
from itertools import count
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue, StringConstraints, ValidationError

from env_service.environments.interface import (
    AgentClient,
    AgentResult,
    EnvironmentFailed,
    EnvironmentFull,
    EnvironmentUnavailable,
    Task,
    TaskSource,
)
from env_service.environments.rules import Rules
from env_service.environments.task_files import OBJECT, tasks_of_files
from protocol.codec import MalformedMessage, describe, pack_value, unpack_value
from protocol.trajectories import Purpose
from services.config.models import ConfigModel
from services.zmq.plain import PlainDealer
from services.zmq.sockets import SendTimeout

logger = logging.getLogger(__name__)

_PASSING = ("ProviderError", "InterceptionError", "TunnelError", "SandboxError", "ToolsetError")
_NO_KEY = "HEADWAY_NO_SUCH_VARIABLE"
"""Keys go there by the name of a variable of the server's; the session's goes in a header instead."""

Address = Annotated[str, StringConstraints(pattern=r"^(tcp|ipc)://.+$")]
ModelT = TypeVar("ModelT", bound=BaseModel)


class VerifiersOptions(ConfigModel):
    """The env server, and the tasks that it is sent."""

    addresses: tuple[Address, ...] = Field(min_length=1, max_length=64, description="of equal env servers, in turn")
    train_file: Path = Field(description="a line of JSON for each task, as examples/verifiers/serve.py writes them")
    evaluation_file: Path | None = Field(None, description="the same, of evaluation tasks")
    connect_timeout_s: float = Field(10.0, gt=0, description="longest wait for the server's first sign of life")
    silence_s: float = Field(30.0, gt=0, description="a server that does not answer for so long counts as away")


class _Trouble(BaseModel):
    model_config = ConfigDict(extra="ignore")

    type: str = "Error"
    message: str = ""
    traceback: str | None = None


class _Worth(BaseModel):
    model_config = ConfigDict(extra="ignore")

    score: float
    weight: float = 1.0


class _Trace(BaseModel):
    """The known part of a trace: fields come with deltas, each over the one before."""

    model_config = ConfigDict(extra="ignore")

    rewards: dict[str, _Worth | None] = Field(default_factory=dict)
    metrics: dict[str, float | None] = Field(default_factory=dict)
    ok: bool = True
    stop_condition: str | None = None


class _Answer(BaseModel):
    model_config = ConfigDict(extra="ignore")

    success: bool = True
    error: str | None = None
    head: dict[str, Any] | None = None


class VerifiersAgent:
    """An episode at an env server."""

    _turns = count()

    rules = Rules(max_turns=256)

    def __init__(self, options: VerifiersOptions) -> None:
        self._options = options
        self._address = options.addresses[next(self._turns) % len(options.addresses)]

    @staticmethod
    def tasks(options: VerifiersOptions) -> TaskSource:
        """The rows of the files. Raises ValueError with file and line."""
        return tasks_of_files(options.train_file, options.evaluation_file, _row)

    async def run(self, task: Task, client: AgentClient) -> AgentResult:
        """Raises EnvironmentUnavailable if the server is away or goes away, EnvironmentFailed for what it reports."""
        request: dict[str, JsonValue] = {
            "task_data": dict(task.data),
            "client": {
                "type": "eval",
                "base_url": client.base_url,
                "api_key_var": _NO_KEY,
                "headers": {"x-session-key": client.key},
            },
            "model": client.model,
            "sampling": {},
        }
        with PlainDealer(self._address) as server:
            episode = _Episode(server, self._address, self._options)
            await episode.alive()
            return await episode.run(request)


class _Episode:
    """A run, and the signs of life of the server that has it."""

    def __init__(self, server: PlainDealer, address: str, options: VerifiersOptions) -> None:
        self._server = server
        self._named = f"the env server at {address}"
        self._options = options
        self._id = secrets.token_hex(16).encode()
        self._traces: dict[str, dict[str, Any]] = {}
        self._troubles: list[_Trouble] = []

    async def alive(self) -> None:
        """Wait for a sign of life."""
        await self._ask_for_life()
        try:
            async with asyncio.timeout(self._options.connect_timeout_s):
                await self._server.receive()
        except TimeoutError:
            raise EnvironmentUnavailable(
                f"{self._named} does not answer within {self._options.connect_timeout_s:g} s; is it running?"
            ) from None

    async def run(self, request: dict[str, JsonValue]) -> AgentResult:
        """The episode's result; it is cancelled there if it is here."""
        answered = False
        await self._send(self._id, b"run", pack_value(request))
        try:
            answer = await self._answer()
            answered = True
        finally:
            if not answered:
                await self._cancel()
        return self._result(answer)

    async def _answer(self) -> _Answer:
        clock = asyncio.get_running_loop().time
        heard = clock()
        while True:
            try:
                async with asyncio.timeout(self._options.silence_s / 4):
                    frames = await self._server.receive()
            except TimeoutError:
                if clock() - heard >= self._options.silence_s:
                    raise EnvironmentFull(f"{self._named} has been silent: it died, or it hangs") from None
                await self._ask_for_life()
                continue
            heard = clock()
            if len(frames) == 3 and frames[0] == self._id:
                body = self._body(frames[2])
                if frames[1] == b"reply":
                    return self._checked(_Answer, body)
                self._take(body)

    def _take(self, delta: dict[str, Any]) -> None:
        name = str(delta.get("trace", ""))
        if delta.get("discard"):
            self._traces.pop(name, None)
            return
        self._traces.setdefault(name, {}).update(delta.get("set") or {})
        self._troubles += [self._checked(_Trouble, each) for each in delta.get("errors") or ()]

    def _result(self, answer: _Answer) -> AgentResult:
        if not answer.success:
            raise EnvironmentFailed("raised", f"{self._named}: {answer.error}")
        traces = [self._checked(_Trace, fields) for fields in self._traces.values()]
        of_episode = (answer.head or {}).get("errors") or ()
        troubles = [*self._troubles, *(self._checked(_Trouble, each) for each in of_episode)]
        if not traces or not all(trace.ok for trace in traces):
            self._fail(troubles)
        rewards = [worth for trace in traces for worth in trace.rewards.values()]
        if not rewards or not all(rewards):
            self._fail(troubles)
        metrics = {key: value for trace in traces for key, value in trace.metrics.items() if value is not None}
        parts = {key: worth.score for trace in traces for key, worth in trace.rewards.items() if worth is not None}
        return AgentResult(
            reward=sum(worth.score * worth.weight for worth in rewards if worth is not None),
            metrics={**parts, **metrics},
            stop=traces[-1].stop_condition or "finished",
        )

    def _fail(self, troubles: list[_Trouble]) -> NoReturn:
        if not troubles:
            raise EnvironmentFailed("nonsense", f"{self._named} gives no reward, and no reason for that")
        last = troubles[-1]
        text = f"{self._named}: {last.type}: {last.message}"[:2000]
        if last.type in _PASSING:
            raise EnvironmentFull(text)
        raise EnvironmentFailed("raised", text, traceback=last.traceback or "")

    async def _ask_for_life(self) -> None:
        await self._send(secrets.token_hex(16).encode(), b"health", pack_value({}))

    async def _cancel(self) -> None:
        request = pack_value({"request_id": self._id.decode()})
        try:
            await self._send(secrets.token_hex(16).encode(), b"cancel", request)
        except EnvironmentUnavailable as error:  # what ended the episode here, such as a cancellation, counts
            logger.info("an episode could not be cancelled: %s", error)

    async def _send(self, *frames: bytes) -> None:
        try:
            await self._server.send(*frames)
        except SendTimeout as error:
            raise EnvironmentUnavailable(f"{self._named} is away: {error}") from error

    def _body(self, data: bytes) -> dict[str, Any]:
        try:
            body = unpack_value(data)
        except MalformedMessage as error:
            raise EnvironmentFailed("nonsense", f"{self._named} sends nonsense: {error}") from error
        if not isinstance(body, dict):
            raise EnvironmentFailed("nonsense", f"{self._named} sends {type(body).__name__}, expected a map")
        return body

    def _checked(self, model: type[ModelT], fields: object) -> ModelT:
        try:
            return model.model_validate(fields)
        except ValidationError as error:
            raise EnvironmentFailed("nonsense", f"{self._named} sends nonsense: {describe(error)}") from error


def _row(number: int, text: str, purpose: Purpose) -> Task:
    return Task(data=OBJECT.validate_json(text), seed=number - 1, purpose=purpose)
