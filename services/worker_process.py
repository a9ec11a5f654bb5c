"""A process of ours that does one thing after the other for its parent: lines in, lines out, over its standard pipes.

    parent: WorkerProcess ── a line ─▶ child: serve_lines ─▶ its answer, a line
                 └─ no answer in time: killed with all that it has started

What the child's code prints goes to the parent's standard error: the pipes are out of its reach. It dies with its
parent. Nothing but text passes, so that a child which was taken over cannot do more than answer nonsense.
"""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import BinaryIO, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from services.process import describe_error, parent_death_signal, seal_descriptors, signal_name

MAX_LINE_BYTES = 1 << 22

T = TypeVar("T")

logger = logging.getLogger(__name__)

_LAST_WORDS_S = 2.0
_MAX_CHARS = 1000


class WorkerUnavailable(Exception):
    """The system can start no process, or it cannot load what it needs, or takes too long for that."""


class WorkerDied(Exception):
    """The process ended, or broke the exchange, without an answer; the text says how."""


class Loading(BaseModel):
    """A worker's first line: that it has loaded what it needs, or what the problem is."""

    model_config = ConfigDict(extra="forbid")

    problem: str = ""


class WorkerProcess:
    """A process that serves one request at a time. It must be stopped after an exchange that did not complete.

    `command` is a module and its arguments, to which the id of this process is added. `what` it loads stands in errors.
    """

    def __init__(
        self,
        *,
        command: Sequence[str],
        environment: Mapping[str, str],
        start_timeout_s: float,
        what: str = "what it needs",
    ) -> None:
        self._command = tuple(command)
        self._environment = dict(environment)
        self._start_timeout_s = start_timeout_s
        self._what = what
        self._process: asyncio.subprocess.Process | None = None
        self._loaded = False
        self._start_deadline = 0.0

    @property
    def process_id(self) -> int | None:
        """Of the process, if there is one."""
        return None if self._process is None else self._process.pid

    @property
    def is_alive(self) -> bool:
        """True if it was started and has not ended, as far as is known."""
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Start the process if there is none alive. Does not wait until it has loaded.

        Raises WorkerUnavailable if the system can start no process.
        """
        if self.is_alive:
            return
        await self.stop()
        try:
            self._process = await self._spawn()
        except OSError as error:
            raise WorkerUnavailable(f"cannot start a worker process: {error}") from error
        self._start_deadline = asyncio.get_running_loop().time() + self._start_timeout_s

    async def _spawn(self) -> asyncio.subprocess.Process:
        seal_descriptors()
        return await asyncio.create_subprocess_exec(
            # -P: a folder named like one of our packages in the working directory must not be imported.
            *(sys.executable, "-P", "-m", *self._command, str(os.getpid())),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=self._environment,
            start_new_session=True,
            limit=MAX_LINE_BYTES,
        )

    async def ready(self) -> None:
        """Wait until the process has loaded. May be cancelled and called again: it goes on loading.

        Raises WorkerUnavailable if it cannot load or takes too long, WorkerDied.
        """
        await self.start()
        if self._loaded:
            return
        try:
            async with asyncio.timeout_at(self._start_deadline):
                problem = await self._problem()
        except TimeoutError:
            await self.stop()
            raise WorkerUnavailable(f"a worker did not start in {self._start_timeout_s:g} s") from None
        except WorkerDied:
            await self.stop()
            raise
        if problem:
            await self.stop()
            raise WorkerUnavailable(f"a worker could not load {self._what}: {problem}")
        self._loaded = True

    async def exchange(self, line: bytes) -> bytes:
        """Send a line, given without its end, and wait for the answer. Raises WorkerDied."""
        pipe = None if self._process is None else self._process.stdin
        assert pipe is not None, "exchange before start"
        try:
            pipe.write(line + b"\n")
            await pipe.drain()
        except (OSError, RuntimeError) as error:  # uvloop raises RuntimeError for a pipe that has closed
            raise WorkerDied(await self._ending()) from error
        return await self._read()

    async def stop(self) -> None:
        """Kill the process, and what it has started, and wait for its end."""
        process, self._process, self._loaded = self._process, None, False
        if process is None:
            return
        if process.returncode is None:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                logger.debug("worker %d had ended by itself", process.pid)
        else:
            _kill_orphans(process.pid)
        await process.wait()

    async def _problem(self) -> str:
        line = await self._read()
        try:
            return Loading.model_validate_json(line).problem
        except ValidationError as error:
            raise WorkerDied("its first line is none of ours") from error

    async def _read(self) -> bytes:
        pipe = None if self._process is None else self._process.stdout
        assert pipe is not None, "read before start"
        try:
            line = await pipe.readline()
        except ValueError as error:
            raise WorkerDied(f"its answer is longer than {MAX_LINE_BYTES} bytes") from error
        if not line.endswith(b"\n"):
            raise WorkerDied(await self._ending())
        return line

    async def _ending(self) -> str:
        """Description of the end of the process, whose pipe has closed."""
        process = self._process
        assert process is not None, "an end without a beginning"
        try:
            async with asyncio.timeout(_LAST_WORDS_S):
                code = await process.wait()
        except TimeoutError:
            return "it closed its pipes"
        return f"it ended with exit code {code}" if code >= 0 else f"it was ended by {signal_name(-code)}"


def _kill_orphans(group: int) -> None:
    """Kills what a process that was waited for has left behind in its group.

    The number of a group is not given to anybody else while it has members. Once it has none it may be, and a process
    of that number is a stranger then.
    """
    try:
        os.kill(group, 0)
    except ProcessLookupError:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    except PermissionError:
        return


def worker_environment(*, inherit: bool, threads: int = 1) -> dict[str, str]:
    """Environment of a worker: what it needs to import the same modules as its parent, and no secret of it unless it is
    to `inherit` the parent's variables.
    """
    own = {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "OMP_NUM_THREADS": str(threads),
        "LC_ALL": "C.UTF-8",
    }
    return {**os.environ, **own} if inherit else {"PATH": os.environ.get("PATH", os.defpath), **own}


def serve_lines(
    *,
    parent: int,
    load: Callable[[], T],
    answer: Callable[[T, bytes], bytes],
    describe: Callable[[Exception], str] = describe_error,
) -> None:
    """The life of a worker process: `load`, say whether that went well, answer lines until the input ends.

    It is killed with the process `parent`. What `answer` raises ends it.
    """
    parent_death_signal(signal.SIGKILL)
    if os.getppid() != parent:
        return
    lines, replies = private_pipes()
    try:
        loaded = load()
    except Exception as error:  # noqa: BLE001  loading runs code of others, and the parent must hear why it failed
        problem = describe(error)[:_MAX_CHARS].encode(errors="replace").decode()
        _send(replies, Loading(problem=problem).model_dump_json().encode())
        return
    _send(replies, Loading().model_dump_json().encode())
    for line in lines:
        _send(replies, answer(loaded, line))


def private_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Move the pipes off descriptors 0 and 1, so that code which prints or reads does not break the exchange."""
    lines, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    return lines, replies


def _send(replies: BinaryIO, line: bytes) -> None:
    replies.write(line + b"\n")
    replies.flush()
