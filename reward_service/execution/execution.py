"""`POST /v1/execute`: programs of whoever has the service's token, for the tools of agents; once, or in a session.

Sessions are sandboxes that keep the state of an interpreter between calls:

    call -> the session's queue (bounded) -> its task -> the interpreter inside -> the answer

Each session is a task. It waits for a call (until its idle time or its end is over), and for the answer inside (until
the call's wall-clock limit); either end kills the sandbox, and calls that wait are told.
"""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Annotated, Self

from fastapi import APIRouter, Depends, Response
from pydantic import BaseModel, ConfigDict, ValidationError

import reward_service.execution.session_inside as session_inside
from protocol.rewards import ExecuteAnswer, ExecuteRequest, ExecutionLimits, SessionEnded
from reward_service.sandbox.pool import (
    SESSION_LINE_FACTOR,
    Sandboxes,
    SandboxPool,
    check_files,
    check_language,
    check_limits,
)
from reward_service.verifier.program import ExecutionConfig, Program, RunEnd, RunLimits, Running
from reward_service.verifier.submission import InfrastructureError, UserError, VerifierError
from services.http.bodies import json_answer, json_body
from services.http.refusals import RequestRefused

logger = logging.getLogger(__name__)

_MAX_CALLS = 16
_FILE = ".session.py"
_RETRY_S = 1.0


@dataclass(frozen=True, kw_only=True)
class CallEnded:
    """End of one call of a session, and what became of the session."""

    ended: RunEnd
    started: bool
    over: bool


@dataclass(frozen=True, kw_only=True)
class _SessionCall:
    request: ExecuteRequest
    limits: RunLimits
    starts: bool
    answer: asyncio.Future[CallEnded]


@dataclass(kw_only=True)
class _Session:
    language: str
    calls: asyncio.Queue[_SessionCall] = field(default_factory=lambda: asyncio.Queue(maxsize=_MAX_CALLS))
    task: asyncio.Task[None] | None = None


class _Reply(BaseModel):
    """A reply of `session_inside`; output as Latin-1, one character a byte."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    exit_code: int
    over: bool
    stdout: str
    stderr: str


class TooManySessions(Exception):
    """No more sessions, or calls of one, are taken for now."""


class ExecutionSessions:
    """The sessions of a service by name. A context manager: leaving it ends them all."""

    def __init__(self, *, sandbox: SandboxPool, config: ExecutionConfig) -> None:
        self._sandbox = sandbox
        self._config = config
        self._commands = {given.name: str(given.path) for given in config.interpreters}
        self._sessions: dict[str, _Session] = {}
        self._group = asyncio.TaskGroup()

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for session in self._sessions.values():
            if session.task is not None:
                session.task.cancel()
        await self._group.__aexit__(kind, error, traceback)

    @property
    def count(self) -> int:
        """Sessions that live."""
        return len(self._sessions)

    async def execute(self, name: str, request: ExecuteRequest, *, limits: RunLimits) -> CallEnded:
        """Run code in the session of that name, which is started if there is none.

        Raises UserError, InfrastructureError, and TooManySessions.
        """
        check_language(request.language, self._config)
        check_limits(limits, self._config)
        check_files({path: content.encode() for path, content in request.files.items()}, limits)
        session = self._sessions.get(name)
        starts = session is None
        if session is None:
            session = self._start(name, request, limits=limits)
        elif session.language != request.language:
            raise UserError(f"session {name!r} runs {session.language}, got code in {request.language}")
        answer: asyncio.Future[CallEnded] = asyncio.get_running_loop().create_future()
        try:
            session.calls.put_nowait(_SessionCall(request=request, limits=limits, starts=starts, answer=answer))
        except asyncio.QueueFull:
            raise TooManySessions(f"{_MAX_CALLS} calls of session {name!r} wait already") from None
        return await answer

    async def end(self, name: str) -> bool:
        """End a session; whether there was one."""
        session = self._sessions.get(name)
        if session is None or session.task is None:
            return False
        session.task.cancel()
        await asyncio.wait([session.task])
        return True

    def _start(self, name: str, request: ExecuteRequest, *, limits: RunLimits) -> _Session:
        if len(self._sessions) >= self._config.max_sessions:
            raise TooManySessions(f"{len(self._sessions)} sessions live already (execution.max_sessions)")
        session = self._sessions[name] = _Session(language=request.language)
        session.task = self._group.create_task(self._live(name, session, limits), name=f"session {name}")
        return session

    async def _live(self, name: str, session: _Session, limits: RunLimits) -> None:
        reason: Exception = InfrastructureError(f"session {name!r} has ended; its state is lost")
        try:
            async with self._sandbox.open(self._program(session.language, limits)) as running:
                try:
                    await self._serve(name, session, running)
                finally:
                    # Before the sandbox is cleared, which takes a moment.
                    self._forget(name, session)
        except VerifierError as error:
            reason = error
        except TimeoutError:
            logger.info("session %s reached its time limit and is closed", name)
        finally:
            self._forget(name, session)
            while not session.calls.empty():
                call = session.calls.get_nowait()
                if not call.answer.done():
                    call.answer.set_exception(reason)

    def _forget(self, name: str, session: _Session) -> None:
        """From here on, a call of that name starts another session."""
        if self._sessions.get(name) is session:
            del self._sessions[name]

    async def _serve(self, name: str, session: _Session, running: Running) -> None:
        """Answer calls until the session is over. Raises TimeoutError when no call comes."""
        loop = asyncio.get_running_loop()
        last = loop.time() + self._config.session_s
        over = False
        while not over:
            async with asyncio.timeout_at(min(last, loop.time() + self._config.session_idle_s)):
                call = await session.calls.get()
            try:
                ended, over = await _exchange(call, running)
            except BaseException as error:
                self._forget(name, session)
                if not call.answer.done():
                    failed = error if isinstance(error, VerifierError) else InfrastructureError("the session has ended")
                    call.answer.set_exception(failed)
                raise
            if over:
                self._forget(name, session)
            if not call.answer.done():
                call.answer.set_result(CallEnded(ended=ended, started=call.starts, over=over))

    def _program(self, language: str, limits: RunLimits) -> Program:
        source = Path(str(session_inside.__file__)).read_bytes()
        command = self._commands.get(language, "")
        return Program(
            argv=("python", _FILE, language, command, str(self._config.max_output_bytes)),
            files={_FILE: source},
            limits=RunLimits(
                wall_s=self._config.session_s,
                cpu_s=self._config.session_s,
                memory_mib=limits.memory_mib,
                processes=limits.processes,
                output_bytes=self._config.max_output_bytes * SESSION_LINE_FACTOR,
                disk_mib=limits.disk_mib,
            ),
        )


async def _exchange(call: _SessionCall, running: Running) -> tuple[RunEnd, bool]:
    """Makes a call; True if it was the last. Raises UserError if the code has broken the exchange."""
    asked = {"code": call.request.code, "files": call.request.files, "stdin": call.request.stdin}
    started = time.monotonic()
    deadline = asyncio.get_running_loop().time() + call.limits.wall_s
    try:
        await running.write(json.dumps(asked).encode() + b"\n", deadline=deadline)
        line = await running.readline(deadline=deadline)
    except TimeoutError:
        return _killed(call.limits, timed_out=True), True
    if not line.endswith(b"\n"):
        return _killed(call.limits, timed_out=False), True
    try:
        reply = _Reply.model_validate_json(line)
    except ValidationError:
        raise UserError("the code broke the exchange of its session, which has ended") from None
    most = call.limits.output_bytes
    stdout, stderr = (text.encode("latin-1", errors="replace") for text in (reply.stdout, reply.stderr))
    ended = RunEnd(
        exit_code=reply.exit_code,
        signal=None,
        stdout=stdout[:most],
        stderr=stderr[:most],
        stdout_cut=len(stdout) > most,
        stderr_cut=len(stderr) > most,
        wall_s=time.monotonic() - started,
    )
    return ended, reply.over


def _killed(limits: RunLimits, *, timed_out: bool) -> RunEnd:
    wall_s = limits.wall_s if timed_out else 0.0
    return RunEnd(exit_code=None, signal=9, stdout=b"", stderr=b"", timed_out=timed_out, wall_s=wall_s)


class Execution:
    """Runs what requests ask for. Raises RequestRefused for what cannot be run, and when there are too many."""

    def __init__(self, *, sandbox: SandboxPool, sessions: ExecutionSessions, config: ExecutionConfig) -> None:
        self._sandbox = sandbox
        self._sessions = sessions
        self._config = config
        self._waiting = 0
        """Calls whose program waits for a place. Those of verifiers, which wait too, are bounded by their items."""

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
            return _answer(await self._run(_program(request, limits)))
        except UserError as error:
            raise RequestRefused(422, "user", str(error)) from error
        except TooManySessions as error:
            raise RequestRefused(429, "busy", f"{error}: try again later", retry_after_s=_RETRY_S) from error
        except InfrastructureError as error:
            raise RequestRefused(503, "infrastructure", str(error), retry_after_s=_RETRY_S) from error

    async def end_session(self, name: str) -> SessionEnded:
        """End a session."""
        return SessionEnded(ended=await self._sessions.end(name))

    async def _run(self, program: Program) -> RunEnd:
        waits = True

        def waits_no_more() -> None:
            nonlocal waits
            self._waiting -= waits
            waits = False

        self._waiting += 1
        try:
            return await self._sandbox.run(program, on_turn=waits_no_more)
        finally:
            waits_no_more()

    def _check_room(self) -> None:
        if self._sandbox.busy == self._sandbox.size and self._waiting >= self._config.max_waiting:
            message = (
                f"{self._waiting} programs wait already (execution.max_waiting): try again later, or another service"
            )
            raise RequestRefused(429, "busy", message, retry_after_s=_RETRY_S)


@asynccontextmanager
async def open_execution(sandboxes: Sandboxes | None, config: ExecutionConfig) -> AsyncIterator[Execution | None]:
    """Opens what executes requests, with its sessions; nothing if there is no sandbox."""
    if sandboxes is None:
        yield None
        return
    async with ExecutionSessions(sandbox=sandboxes.sessions, config=config) as sessions:
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


def usual_limits(asked: ExecutionLimits, config: ExecutionConfig) -> RunLimits:
    """The limits that were asked for, and for what was not, the usual ones as far as the service grants them."""
    usual = RunLimits()
    return RunLimits(
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


def _program(request: ExecuteRequest, limits: RunLimits) -> Program:
    files = {path: content.encode() for path, content in request.files.items()}
    argv = request.argv
    if request.code is not None:
        main = "main.py" if request.language == "python" else "main"
        files[main] = request.code.encode()
        argv = (request.language, main)
    return Program(argv=argv, files=files, stdin=request.stdin.encode(), environment=request.environment, limits=limits)


def _answer(ended: RunEnd, *, started: bool = False, over: bool = False) -> ExecuteAnswer:
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
