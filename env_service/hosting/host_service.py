"""`env-service host`: one environment, for env_services elsewhere.

    env-service host mine:Maze --port 7340
    env-service host NAME --config RUN.toml --host 0.0.0.0 --token-file token --tls-cert-file … --tls-key-file …

POST /v1/environment ─▶ the conversation of this key ─▶ a child process ─▶ its reply
"""

import argparse
import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Response

from env_service.environments.imported import EnvironmentFault
from env_service.environments.interface import (
    Environment,
    EnvironmentFailed,
    EnvironmentUnavailable,
    OfferedEnvironment,
)
from env_service.environments.task_configs import ClassTasks
from env_service.hosting.hosted import HostedTasks, Hosting
from env_service.hosting.messages import HostCall, HostReply, HostUnavailable, description_of, fault_of, resolved
from env_service.hosting.remote import PATH
from services.config.models import HttpConfig
from services.cores import cores
from services.http.app import create_app
from services.http.bodies import json_answer, json_body
from services.http.metrics import Metrics
from services.http.server import Listener, serve_http
from services.http.waiting import Waiting
from services.process import Stop, WrongSettings
from services.rotating_secrets import RotatingSecret

_DEFAULT_PORT = 7340


@dataclass
class _KeptReply:
    environment: Environment
    used_at: float
    under_way: int = 0


class Conversations:
    """The conversations with one environment, by the keys that callers chose; idle ones are forgotten."""

    def __init__(self, offered: OfferedEnvironment, *, most: int, idle_s: float) -> None:
        self._offered = offered
        self._most = most
        self._idle_s = idle_s
        self._kept: dict[str, _KeptReply] = {}

    async def reply(self, call: HostCall) -> HostReply:
        """The reply to a call; failures of the environment are in it."""
        try:
            return await self._reply(call)
        except (EnvironmentFailed, EnvironmentUnavailable) as error:
            return HostReply(fault=fault_of(error))

    async def forget_idle(self) -> None:
        """Close conversations that nobody asks any more, until cancelled."""
        while True:
            await asyncio.sleep(self._idle_s / 4)
            before = time.monotonic() - self._idle_s
            for about in [key for key, kept in self._kept.items() if kept.used_at < before and not kept.under_way]:
                await self.reply(HostCall(kind="close", about=about))

    async def _reply(self, call: HostCall) -> HostReply:
        match call.kind:
            case "describe":
                own = isinstance(self._offered.tasks, HostedTasks)
                return HostReply(description=description_of(self._offered, own_tasks=own))
            case "task":
                assert call.task is not None, "a call for a task says which"
                return HostReply(task=await resolved(self._offered.tasks.task(call.task.purpose, call.task.index)))
            case "reset":
                return await self._reset(call)
            case "step":
                return await self._step(call)
            case "close":
                await self._close(call.about)
                return HostReply()

    async def _reset(self, call: HostCall) -> HostReply:
        if call.reset is None or call.about in self._kept:
            raise EnvironmentFailed("nonsense", "a conversation is begun once, with its task")
        if len(self._kept) >= self._most:
            raise HostUnavailable(f"the host has its {self._most} conversations already (--conversations)")
        kept = self._kept[call.about] = _KeptReply(self._offered.start(), time.monotonic(), under_way=1)
        environment: Any = kept.environment
        try:
            return HostReply(opening=await environment.reset(call.reset.task, call.reset.seed))
        except BaseException:
            self._kept.pop(call.about, None)
            raise
        finally:
            kept.under_way -= 1

    async def _step(self, call: HostCall) -> HostReply:
        kept = self._kept.get(call.about)
        if kept is None or call.action is None:
            raise HostUnavailable("the host does not know this conversation: it was started again, or forgot it")
        kept.used_at, kept.under_way = time.monotonic(), kept.under_way + 1
        environment: Any = kept.environment
        try:
            return HostReply(step=await environment.step(call.action))
        finally:
            kept.used_at, kept.under_way = time.monotonic(), kept.under_way - 1

    async def _close(self, about: str) -> None:
        kept = self._kept.pop(about, None)
        if kept is not None:
            environment: Any = kept.environment
            await environment.close()


def add_environment_route(app: FastAPI, conversations: Conversations) -> None:
    """Add the one route that there is."""

    @app.post(PATH, response_model=HostReply)
    async def environment(body: Annotated[HostCall, Depends(json_body(HostCall))]) -> Response:
        """A call to the environment; what goes wrong in it is in the reply."""
        return json_answer(await conversations.reply(body))


async def serve(
    entry: ClassTasks, http: HttpConfig, stop: Stop, *, workers: int, step_s: float, most: int, idle_s: float
) -> None:
    """Serve the environment of an entry until `stop`. Raises WrongSettings."""
    hosting = Hosting(workers=workers, environment_timeout_s=step_s)
    try:
        conversations = Conversations(hosting.offered(entry), most=most, idle_s=idle_s)
    except EnvironmentFault as error:
        raise WrongSettings(str(error)) from error
    waits = Waiting()
    app = create_app(
        service="environment-host",
        version=version("headway"),
        token=http.token,
        readiness=waits.readiness,
        metrics=Metrics("env-service"),
        max_body_bytes=http.max_body_bytes,
    )
    add_environment_route(app, conversations)
    async with hosting:
        with Listener(host=http.host, port=http.port, tls=http.tls) as listener:
            async with asyncio.TaskGroup() as tasks:
                loops = [tasks.create_task(serve_http(app, listener)), tasks.create_task(conversations.forget_idle())]
                waits.started()
                await stop.wait()
                for loop in loops:
                    loop.cancel()


def arguments(words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Of the command, and what is left for the config."""
    parser = argparse.ArgumentParser(
        prog="env-service",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=("host",))
    parser.add_argument("name", help="of an environment in the file, of a built-in one, or package.module:Class")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=_DEFAULT_PORT)
    parser.add_argument("--token-file", type=Path)
    for name in ("cert", "key", "client-ca"):
        parser.add_argument(f"--tls-{name}-file", type=Path)
    parser.add_argument("--isolation", choices=("workers", "process"), help="as of the entry; else workers")
    parser.add_argument("--workers", type=int, default=cores())
    parser.add_argument("--step-timeout-s", type=float, default=240.0)
    parser.add_argument("--conversations", type=int, default=4096)
    parser.add_argument("--idle-s", type=float, default=3600.0)
    return parser.parse_known_args(words)


def http_of(given: argparse.Namespace) -> HttpConfig:
    """The address and trust of a command. Raises ValueError for what others could reach without a token."""
    token = None if given.token_file is None else RotatingSecret(given.token_file)
    return HttpConfig(
        host=given.host,
        port=given.port,
        token=token,
        tls_cert_file=given.tls_cert_file,
        tls_key_file=given.tls_key_file,
        tls_client_ca_file=given.tls_client_ca_file,
    )


def isolated(entry: ClassTasks, given: argparse.Namespace) -> ClassTasks:
    """The entry, to run in child processes."""
    wanted = given.isolation or (entry.isolation if entry.isolation != "none" else "workers")
    return entry.model_copy(update={"isolation": wanted})
