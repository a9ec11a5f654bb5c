"""`source = "http://host:port"`: an environment that `env-service host` runs elsewhere.

options = { token_file = "token", tls_ca_file = "ca.pem" }       urls = [...] for several equal hosts, asked in turn
"""

import asyncio
import secrets
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Coroutine
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Annotated

from pydantic import Field, SecretStr, StringConstraints, ValidationError

from env_service.environments.imported import NumberedTasks
from env_service.environments.interface import (
    Action,
    EnvironmentFull,
    EnvironmentUnavailable,
    Opening,
    Step,
    Task,
    TaskSource,
)
from env_service.hosting.hosted import expected
from env_service.hosting.messages import Description, HostCall, HostReply, MakeTask, Reset, raise_fault
from protocol.trajectories import Purpose
from services.config.models import ConfigModel
from services.http.client import HttpClient, ServiceError, ServiceTimeout
from services.http.faults import fault_of, see_alive
from services.http.tls import TlsContext, TlsFiles, client_tls
from services.rotating_secrets import secret_of

PATH = "/v1/environment"
_BETWEEN_S = 0.1
_LIFE_EVERY_S = 5.0
_LIFE_MISSED = 3

Url = Annotated[str, StringConstraints(pattern=r"^https?://[^/]+/?$")]


class RemoteOptions(ConfigModel):
    """The hosts, and how both sides are believed."""

    urls: tuple[Url, ...] = Field(min_length=1, max_length=64, description="addresses of equal hosts, in turn")
    token_file: Path | None = Field(None, description="file of the hosts' bearer token")
    tls_ca_file: Path | None = Field(None, description="PEM file of the CA that signs the hosts' certificates")
    tls_cert_file: Path | None = Field(None, description="PEM file of the certificate that is shown to the hosts")
    tls_key_file: Path | None = Field(None, description="PEM file of its key")
    timeout_s: float = Field(300.0, gt=0, description="longest time of a call, longer than the host gives a step")
    start_timeout_s: float = Field(30.0, ge=0, description="how long the first host is waited for at the start")

    @property
    def token(self) -> SecretStr | None:
        """From its file, the same for all conversations. Raises SecretFileError before the first."""
        return None if self.token_file is None else secret_of(self.token_file)

    @property
    def tls(self) -> TlsContext | None:
        """Of its files, the same for all conversations. Raises TlsFileError before the first."""
        return _tls_of(TlsFiles(cert=self.tls_cert_file, key=self.tls_key_file, ca=self.tls_ca_file))


@lru_cache(maxsize=64)
def _tls_of(files: TlsFiles) -> TlsContext | None:
    return client_tls(files)


class RemoteEnvironment:
    """A conversation with an environment at one of the hosts, the first in turn that is there. That all are away is a
    failure of infrastructure.
    """

    _turns = count()

    def __init__(self, options: RemoteOptions) -> None:
        described = description_at(options.model_dump_json())
        self.rules, self.roles, self.metrics = described.rules, described.roles, described.metrics
        self._host = _Host(options, next(self._turns))
        self._about = secrets.token_hex(16)

    @staticmethod
    def tasks(options: RemoteOptions) -> TaskSource:
        """The tasks of the host."""
        described = description_at(options.model_dump_json())
        if described.own_tasks:
            return RemoteTasks(options, described)
        return NumberedTasks(seed=None, train_tasks=described.train_tasks, evaluation_tasks=described.evaluation_tasks)

    async def reset(self, task: Task, seed: int) -> Opening:
        """Raises EnvironmentFailed and EnvironmentUnavailable, as `step` does."""
        call = HostCall(kind="reset", about=self._about, reset=Reset(task=task, seed=seed))
        return expected((await self._host.begin(call)).opening, "reset")

    async def step(self, action: Action) -> Step:
        reply = await self._host.ask(HostCall(kind="step", about=self._about, action=action))
        return expected(reply.step, "step")

    async def close(self) -> None:
        """Have the conversation forgotten there; it is anyway, in time."""
        try:
            await self._host.ask(HostCall(kind="close", about=self._about))
        finally:
            await self._host.close()


class RemoteTasks:
    """Tasks that the host makes."""

    def __init__(self, options: RemoteOptions, described: Description) -> None:
        self._options = options
        self.train_tasks = described.train_tasks
        self.evaluation_tasks = described.evaluation_tasks

    async def task(self, purpose: Purpose, index: int) -> Task:
        """Raises EnvironmentFailed and EnvironmentUnavailable."""
        host = _Host(self._options, index)
        try:
            reply = await host.begin(HostCall(kind="task", task=MakeTask(purpose=purpose, index=index)))
            return expected(reply.task, "task")
        finally:
            await host.close()


class _HostAway(EnvironmentUnavailable):
    """Nobody answers at the address."""


class _Host:
    """The connection of one conversation. `number` says at which of the hosts it tries to begin."""

    def __init__(self, options: RemoteOptions, number: int) -> None:
        self._options = options
        first = number % len(options.urls)
        self._urls = [url.rstrip("/") for url in (*options.urls[first:], *options.urls[:first])]
        self._client: HttpClient | None = None

    async def begin(self, call: HostCall) -> HostReply:
        """The reply of the first host that is there, which is asked from here on. Raises what `ask` raises."""
        for _ in self._urls[1:]:
            try:
                return await self.ask(call)
            except _HostAway:
                self._urls = [*self._urls[1:], self._urls[0]]
        return await self.ask(call)

    async def ask(self, call: HostCall) -> HostReply:
        """The reply to a call. Raises EnvironmentFailed; EnvironmentUnavailable for a host that is away, or shows no
        sign of life while it is waited for; EnvironmentFull for one that died of the call, or is alive and silent.
        """
        if self._client is None:
            self._client = HttpClient(token=self._options.token, tls=self._options.tls)
            await self._client.__aenter__()
        try:
            # Not tried again: a step that arrived must not be made twice.
            asked = self._client.post(self._urls[0] + PATH, call, HostReply, deadline_s=self._options.timeout_s)
            reply = await self._while_alive(asked, self._client)
        except ServiceError as error:
            raise EnvironmentFull(f"the environment's host: {error}") from error
        raise_fault(reply)
        return reply

    async def _while_alive(self, asked: Coroutine[object, object, HostReply], client: HttpClient) -> HostReply:
        """The answer. Raises _HostAway where nobody takes the call up, or its host, asked for a sign of life, says
        nothing several times.
        """
        answer = asyncio.ensure_future(asked)
        misses = 0
        try:
            while not (await asyncio.wait([answer], timeout=_LIFE_EVERY_S))[0]:
                try:
                    await see_alive(client, self._urls[0])
                    misses = 0
                except ServiceError as error:
                    misses += 1
                    if misses >= _LIFE_MISSED:
                        raise _HostAway(f"the environment's host: {error}") from error
            return answer.result()
        except ServiceError as error:
            if fault_of(error) != "unavailable" or isinstance(error, ServiceTimeout):
                raise
            raise _HostAway(f"the environment's host: {error}") from error
        finally:
            if not answer.done():
                answer.cancel()
                await asyncio.gather(answer, return_exceptions=True)

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.__aexit__(None, None, None)


@lru_cache(maxsize=64)
def description_at(options_json: str) -> Description:
    """The first host's description of its environment. Raises ValueError if it is not there in time."""
    options = RemoteOptions.model_validate_json(options_json)
    until = time.monotonic() + options.start_timeout_s
    while True:
        try:
            return _described(options)
        except (urllib.error.URLError, OSError) as error:
            if isinstance(error, urllib.error.HTTPError) or time.monotonic() >= until:
                raise ValueError(
                    f"the environment's host at {options.urls[0]} cannot be asked: {error}; does `env-service host` "
                    "run there, and is token_file its token?"
                ) from error
        time.sleep(_BETWEEN_S)


def _described(options: RemoteOptions) -> Description:
    headers = {"Content-Type": "application/json"}
    if options.token is not None:
        headers["Authorization"] = f"Bearer {options.token.get_secret_value()}"
    body = HostCall(kind="describe").model_dump_json().encode()
    request = urllib.request.Request(options.urls[0].rstrip("/") + PATH, data=body, headers=headers)
    tls = options.tls
    context: ssl.SSLContext | None = None if tls is None else tls.current()
    with urllib.request.urlopen(request, timeout=10, context=context) as answer:
        raw = answer.read()
    try:
        reply = HostReply.model_validate_json(raw)
    except ValidationError as error:
        raise ValueError(f"{options.urls[0]} is no host of environments: {error}") from error
    raise_fault(reply)
    return expected(reply.description, "describe")
