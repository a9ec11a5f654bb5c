"""`source = "openenv"`: an environment of an OpenEnv server (0.8), which runs in a virtual environment of its own.

options = { urls = ["ws://127.0.0.1:8000"], action_field = "guess", opening = "Guess a number from 0 to 31." }

One conversation is one WebSocket connection, hence one session of the server. It is told of its reset (with the task's
seed) and of each action; an observation becomes text by a template. That a server is away, full, or goes away is a
failure of infrastructure.
"""

import json
from collections.abc import Mapping
from itertools import count
from typing import Annotated, Any, Literal

import aiohttp
from pydantic import BaseModel, ConfigDict, Field, JsonValue, StringConstraints, ValidationError

from env_service.environments.interface import (
    Action,
    ChatMessage,
    EnvironmentFailed,
    EnvironmentFull,
    EnvironmentUnavailable,
    Opening,
    Step,
    Task,
)
from env_service.environments.rules import Rules
from protocol.codec import describe
from services.config.models import ConfigModel

_MAX_BYTES = 16 << 20
_SEEDS = 1 << 31
_PASSING = ("CAPACITY_REACHED", "FACTORY_ERROR", "SESSION_ERROR")
_INVALID = ("VALIDATION_ERROR", "INVALID_JSON")

Url = Annotated[str, StringConstraints(pattern=r"^wss?://[^/]+(/.*)?$")]


class OpenEnvOptions(ConfigModel):
    """The server, and how its observations and actions become text."""

    urls: tuple[Url, ...] = Field(min_length=1, max_length=64, description="addresses of equal servers, in turn")
    system_prompt: str = Field("", description="a system message before the opening; empty for none")
    opening: str = Field(
        "{observation}", description="the first message; {name} is a field of the observation, {observation} all of it"
    )
    template: str = Field("{observation}", description="what each step says")
    action_field: str = Field(
        "", description="the field of the action that the policy's text is; if empty, it writes the action as JSON"
    )
    action: dict[str, JsonValue] = Field(default_factory=dict, description="fields that every action has")
    connect_timeout_s: float = Field(10.0, gt=0, description="longest time to connect, in seconds")


class _ServerAnswer(BaseModel):
    """A server's answer to a reset or a step."""

    model_config = ConfigDict(extra="ignore")

    observation: dict[str, JsonValue]
    reward: float | None = None
    done: bool = False


class _ServerProblem(BaseModel):
    model_config = ConfigDict(extra="ignore")

    message: str = ""
    code: str = ""
    errors: JsonValue = None


class _ServerMessage(BaseModel):
    model_config = ConfigDict(extra="ignore")

    type: Literal["observation", "error"]
    data: dict[str, Any]


class OpenEnvEnvironment:
    """A session of an OpenEnv server."""

    _turns = count()

    def __init__(self, options: OpenEnvOptions) -> None:
        self._options = options
        self._url = options.urls[next(self._turns) % len(options.urls)].rstrip("/")
        self.rules = Rules(action="text" if options.action_field else "json")
        _check_templates(options)
        self._session: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._field_type: object = None
        self._rewarded = False

    async def reset(self, task: Task, seed: int) -> Opening:
        """Raises EnvironmentUnavailable if the server is away or full, EnvironmentFailed if its environment raises."""
        await self._connect()
        seen = await self._ask("reset", {"seed": task.seed % _SEEDS})
        opening = ChatMessage("user", _shown(self._options.opening, seen))
        system = self._options.system_prompt
        return Opening((ChatMessage("system", system), opening) if system else (opening,))

    async def step(self, action: Action) -> Step:
        """An action that does not fit the server's schema is invalid, and is not played."""
        try:
            seen = await self._ask("step", {**self._options.action, **self._fields(action)})
        except _Invalid as invalid:
            return Step((ChatMessage("user", f"Not an action: {invalid}"),), invalid=True)
        self._rewarded = self._rewarded or seen.reward is not None
        reward = 0.0 if seen.reward is None else seen.reward
        if seen.done:
            await self.close()
            if not self._rewarded:
                raise EnvironmentFailed(
                    "nonsense",
                    f"the OpenEnv server at {self._url} ended the session without a reward in any of its steps; "
                    "expected a number in one of them: its environment sets `reward` of the observation",
                )
            return Step(reward=reward, stop="done")
        return Step((ChatMessage("user", _shown(self._options.template, seen)),), reward=reward)

    async def close(self) -> None:
        """End the session."""
        socket, session, self._socket, self._session = self._socket, self._session, None, None
        try:
            if socket is not None and not socket.closed:
                await socket.send_json({"type": "close"})
                await socket.close()
        except (aiohttp.ClientError, OSError):
            pass  # it is gone, as was wanted
        finally:
            if session is not None:
                await session.close()

    async def _connect(self) -> None:
        """The socket, and the type of the action's field."""
        limit = aiohttp.ClientTimeout(total=None, sock_connect=self._options.connect_timeout_s)
        self._session = aiohttp.ClientSession(timeout=limit)
        path = "" if self._url.endswith("/ws") else "/ws"
        try:
            if self._options.action_field:
                self._field_type = await self._type_of_field()
            self._socket = await self._session.ws_connect(f"{self._url}{path}", max_msg_size=_MAX_BYTES)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            await self.close()
            raise EnvironmentUnavailable(
                f"the OpenEnv server at {self._url} does not take the connection: {error or type(error).__name__}; "
                "is it running?"
            ) from error

    async def _type_of_field(self) -> object:
        assert self._session is not None, "a session before a request"
        address = "http" + self._url.removeprefix("ws").removesuffix("/ws") + "/schema"
        async with self._session.get(address) as answer:
            schema = await answer.json()
        fields = schema.get("action", {}).get("properties", {}) if isinstance(schema, dict) else {}
        name = self._options.action_field
        if name not in fields:
            known = ", ".join(sorted(fields)) or "none"
            raise EnvironmentFailed(
                "nonsense", f"action_field: the actions of {self._url} have no field {name!r}; they have {known}"
            )
        return fields[name].get("type")

    def _fields(self, action: Action) -> Mapping[str, JsonValue]:
        """The fields of the policy's text. Raises _Invalid."""
        name = self._options.action_field
        if not name:
            if not isinstance(action.value, dict):
                raise _Invalid("expected a JSON object with the fields of an action")
            return action.value
        text = (action.value if isinstance(action.value, str) else action.text).strip()
        if self._field_type in ("string", None):
            return {name: text}
        try:
            return {name: json.loads(text)}
        except ValueError:
            raise _Invalid(f"expected a value of type {self._field_type}") from None

    async def _ask(self, kind: str, data: Mapping[str, JsonValue]) -> _ServerAnswer:
        if self._socket is None:
            raise EnvironmentFailed("nonsense", "the session was asked after its end")
        try:
            await self._socket.send_json({"type": kind, "data": data})
            answer = await self._socket.receive()
        except (aiohttp.ClientError, OSError) as error:
            raise EnvironmentFull(f"the OpenEnv server at {self._url} went away: {error}") from error
        if answer.type is not aiohttp.WSMsgType.TEXT:
            raise EnvironmentFull(f"the OpenEnv server at {self._url} ended the session in a {kind}")
        return self._read(answer.data, kind)

    def _read(self, text: str, kind: str) -> _ServerAnswer:
        try:
            message = _ServerMessage.model_validate_json(text)
            if message.type == "observation":
                return _ServerAnswer.model_validate(message.data)
            problem = _ServerProblem.model_validate(message.data)
        except ValidationError as error:
            raise EnvironmentFailed(
                "nonsense", f"the OpenEnv server at {self._url} answers a {kind} with what is none: {describe(error)}"
            ) from error
        if problem.code in _PASSING:
            raise EnvironmentFull(f"the OpenEnv server at {self._url}: {problem.code}: {problem.message}")
        if problem.code in _INVALID and kind == "step":
            raise _Invalid(_complaint(problem))
        raise EnvironmentFailed(
            "raised", f"the OpenEnv server at {self._url} failed in a {kind}: {problem.code}: {problem.message}"
        )


class _Invalid(ValueError):
    """An action that is none; the text goes to the policy."""


def _complaint(problem: _ServerProblem) -> str:
    """The fields that do not fit, in few words."""
    rows = problem.errors if isinstance(problem.errors, list) else []
    said = [
        f"{'.'.join(map(str, where)) if isinstance(where := row.get('loc'), list) else ''}: {row.get('msg', '')}"
        for row in rows[:3]
        if isinstance(row, dict)
    ]
    return "; ".join(said) or problem.message


def _shown(template: str, seen: _ServerAnswer) -> str:
    fields = {key: value if isinstance(value, str) else json.dumps(value) for key, value in seen.observation.items()}
    whole = json.dumps(seen.observation, ensure_ascii=False)
    try:
        return template.format_map({**fields, "observation": whole})
    except KeyError as error:
        known = ", ".join(sorted(fields)) or "none"
        raise EnvironmentFailed(
            "nonsense", f"the template names {error.args[0]!r}; the observation has the fields {known}"
        ) from None


def _check_templates(options: OpenEnvOptions) -> None:
    """Raises ValueError for one that is no template."""
    for template in (options.opening, options.template):
        try:
            template.format_map(_Anything())
        except (ValueError, IndexError, AttributeError) as error:
            raise ValueError(f"{template!r} is no template: {error}; write {{{{ and }}}} for braces") from error


class _Anything(dict[str, str]):
    def __missing__(self, key: str) -> str:
        return ""
