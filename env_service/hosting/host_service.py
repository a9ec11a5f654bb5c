"""`env-service host`: one environment, for env_services elsewhere.

    env-service host mine:Maze --port 7340
    env-service host NAME --config RUN.toml --host 0.0.0.0 --token-file token --tls-cert-file … --tls-key-file …

POST /v1/environment ─▶ the conversation of this key ─▶ a child process ─▶ its reply
"""

import argparse
import asyncio
import logging
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
    EnvironmentFull,
    EnvironmentUnavailable,
    OfferedEnvironment,
)
from env_service.environments.task_configs import ClassTasks
from env_service.hosting.hosted import HostedTasks, Hosting
from env_service.hosting.messages import (
    HostCall,
    HostReply,
    HostUnavailable,
    Reset,
    description_of,
    fault_of,
    resolved,
)
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

logger = logging.getLogger(__name__)

_DEFAULT_PORT = 7340


@dataclass
class _KeptReply:
    environment: Environment
    used_at: float
    under_way: int = 0


@dataclass(frozen=True, kw_only=True)
class ConversationLimits:
    """Limits of a host. `most`: conversations at a time. One that was silent for `idle_s` seconds is forgotten, and
    where there is no place for a new one, the one that was silent for longest, if for `silent_s`: a caller that was
    killed closes none.
    """

    most: int = 4096
    idle_s: float = 3600.0
    silent_s: float = 300.0


class Conversations:
    """The conversations with one environment, by the keys that callers chose."""

    def __init__(self, offered: OfferedEnvironment, limits: ConversationLimits) -> None:
        self._offered = offered
        self._limits = limits
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
            await asyncio.sleep(self._limits.idle_s / 4)
            for about in self._silent_for(self._limits.idle_s):
                await self.reply(HostCall(kind="close", about=about))

    def _silent_for(self, seconds: float) -> list[str]:
        """Conversations that nobody has asked anything for so long, the most silent first."""
        before = time.monotonic() - seconds
        silent = (key for key, kept in self._kept.items() if kept.used_at < before and not kept.under_way)
        return sorted(silent, key=lambda key: self._kept[key].used_at)

    async def _makes_room(self) -> bool:
        for about in self._silent_for(self._limits.silent_s)[:1]:
            logger.warning(
                "no place for a new conversation: one that was silent for %.0f s is closed, as its caller is gone or "
                "slow (--silent-s); more places are --conversations, and `processes` of the entry",
                time.monotonic() - self._kept[about].used_at,
            )
            await self.reply(HostCall(kind="close", about=about))
            return True
        return False

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
        if len(self._kept) >= self._limits.most and not await self._makes_room():
            raise HostUnavailable(f"the host has its {self._limits.most} conversations already (--conversations)")
        try:
            return await self._begun(call.about, call.reset)
        except EnvironmentFull as error:
            # Of the pool, before anything was begun; a child process that is busy, or was killed, is another matter.
            if isinstance(error, HostUnavailable) or not await self._makes_room():
                raise
            return await self._begun(call.about, call.reset)

    async def _begun(self, about: str, reset: Reset) -> HostReply:
        kept = self._kept[about] = _KeptReply(self._offered.start(), time.monotonic(), under_way=1)
        environment: Any = kept.environment
        try:
            return HostReply(opening=await environment.reset(reset.task, reset.seed))
        except BaseException:
            self._kept.pop(about, None)
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
    entry: ClassTasks, http: HttpConfig, stop: Stop, *, workers: int, step_s: float, limits: ConversationLimits
) -> None:
    """Serve the environment of an entry until `stop`. Raises WrongSettings."""
    hosting = Hosting(workers=workers, environment_timeout_s=step_s)
    try:
        conversations = Conversations(hosting.offered(entry), limits)
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
    limits = ConversationLimits()
    parser.add_argument("--conversations", type=int, default=limits.most, help="at a time")
    parser.add_argument("--idle-s", type=float, default=limits.idle_s, help="one that was so silent is forgotten")
    parser.add_argument(
        "--silent-s", type=float, default=limits.silent_s, help="and one so silent, where a new one has no place"
    )
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


def limits_of(given: argparse.Namespace) -> ConversationLimits:
    """The limits of a command."""
    return ConversationLimits(most=given.conversations, idle_s=given.idle_s, silent_s=given.silent_s)


def isolated(entry: ClassTasks, given: argparse.Namespace) -> ClassTasks:
    """The entry, to run in child processes."""
    wanted = given.isolation or (entry.isolation if entry.isolation != "none" else "workers")
    return entry.model_copy(update={"isolation": wanted})
