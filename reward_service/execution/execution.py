"""`POST /v1/execute`: programs of whoever has the service's token, for the tools of agents."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import APIRouter, Depends, Response

from protocol.execution import ExecuteAnswer, ExecuteRequest, ExecutionLimits, SessionEnded
from reward_service.execution.sessions import Sessions, TooManySessions
from reward_service.sandbox.opening import Sandboxes
from reward_service.sandbox.pool import SandboxPool, check_language
from reward_service.verifier.program import Ended, ExecutionConfig, Limits, Program
from reward_service.verifier.submission import InfrastructureError, UserError
from services.http.app import RequestRefused, json_answer, json_body

_RETRY_S = 1.0


class Execution:
    """Runs what requests ask for. Raises RequestRefused for what cannot be run, and when there are too many."""

    def __init__(self, *, sandbox: SandboxPool, sessions: Sessions, config: ExecutionConfig) -> None:
        self._sandbox = sandbox
        self._sessions = sessions
        self._config = config

    async def execute(self, request: ExecuteRequest) -> ExecuteAnswer:
        """Run it to its end."""
        try:
            limits = usual_limits(request.limits, self._config)
            if request.session is not None:
                called = await self._sessions.execute(request.session, request, limits=limits)
                return _answer(called.ended, started=called.started, over=called.over)
            if request.code is not None:
                check_language(request.language, self._config)
            self._check_room()
            return _answer(await self._sandbox.run(_program(request, limits)))
        except UserError as error:
            raise RequestRefused(422, "user", str(error)) from error
        except TooManySessions as error:
            raise RequestRefused(429, "busy", f"{error}: try again later", retry_after_s=_RETRY_S) from error
        except InfrastructureError as error:
            raise RequestRefused(503, "infrastructure", str(error), retry_after_s=_RETRY_S) from error

    async def end_session(self, name: str) -> SessionEnded:
        """End a session."""
        return SessionEnded(ended=await self._sessions.end(name))

    def _check_room(self) -> None:
        waiting = self._sandbox.waiting
        if self._sandbox.busy == self._sandbox.size and waiting >= self._config.max_waiting:
            message = f"{waiting} programs wait already (execution.max_waiting): try again later, or another service"
            raise RequestRefused(429, "busy", message, retry_after_s=_RETRY_S)


@asynccontextmanager
async def open_execution(sandboxes: Sandboxes | None, config: ExecutionConfig) -> AsyncIterator[Execution | None]:
    """What executes requests, with its sessions; nothing if there is no sandbox."""
    if sandboxes is None:
        yield None
        return
    async with Sessions(sandbox=sandboxes.sessions, config=config) as sessions:
        yield Execution(sandbox=sandboxes.programs, sessions=sessions, config=config)


def execution_routes(execution: Execution | None) -> APIRouter:
    """The routes; without a sandbox they refuse."""
    routes = APIRouter()

    @routes.post("/v1/execute", responses={200: {"model": ExecuteAnswer}})
    async def execute(request: Annotated[ExecuteRequest, Depends(json_body(ExecuteRequest))]) -> Response:
        """Run a program in the sandbox, within limits, or code in a session that keeps its state."""
        return json_answer(await _present(execution).execute(request))

    @routes.delete("/v1/sessions/{name}", responses={200: {"model": SessionEnded}})
    async def end_session(name: str) -> Response:
        """End a session and all that it started."""
        return json_answer(await _present(execution).end_session(name))

    return routes


def usual_limits(asked: ExecutionLimits, config: ExecutionConfig) -> Limits:
    """The limits that were asked for, and for what was not, the usual ones as far as the service grants them."""
    usual = Limits()
    return Limits(
        wall_s=asked.wall_s or min(usual.wall_s, config.max_wall_s),
        cpu_s=asked.cpu_s or min(usual.cpu_s, config.max_cpu_s),
        memory_mib=asked.memory_mib or min(usual.memory_mib, config.max_memory_mib),
        processes=asked.processes or min(usual.processes, config.max_processes),
        output_bytes=asked.output_bytes or min(usual.output_bytes, config.max_output_bytes),
        disk_mib=asked.disk_mib or min(usual.disk_mib, config.max_disk_mib),
    )


def _present(execution: Execution | None) -> Execution:
    if execution is None:
        raise RequestRefused(403, "no_sandbox", "this service runs no programs: its setting sandbox is 'off'")
    return execution


def _program(request: ExecuteRequest, limits: Limits) -> Program:
    files = {path: content.encode() for path, content in request.files.items()}
    argv = request.argv
    if request.code is not None:
        main = "main.py" if request.language == "python" else "main"
        files[main] = request.code.encode()
        argv = (request.language, main)
    return Program(argv=argv, files=files, stdin=request.stdin.encode(), environment=request.environment, limits=limits)


def _answer(ended: Ended, *, started: bool = False, over: bool = False) -> ExecuteAnswer:
    return ExecuteAnswer(
        exit_code=ended.exit_code,
        signal=ended.signal,
        stdout=ended.stdout.decode(errors="replace"),
        stderr=ended.stderr.decode(errors="replace"),
        stdout_cut=ended.stdout_cut,
        stderr_cut=ended.stderr_cut,
        timed_out=ended.timed_out,
        wall_s=ended.wall_s,
        session_started=started,
        session_ended=over,
    )
