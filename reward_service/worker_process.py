"""One worker process that answers a line with a line, and is killed when it does not."""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence

from reward_service.jobs import MAX_LINE_BYTES, Reply
from reward_service.verifier import InfrastructureError

logger = logging.getLogger(__name__)


class WorkerDied(Exception):
    """The process ended, or broke the exchange, without a reply."""


class WorkerProcess:
    """One process that serves one request at a time. It must be stopped after an exchange that did not complete.

    `command` is a module and its arguments, to which the id of this process is added. Its first line, a `Reply`, says
    that it has loaded what it needs, or why it cannot.
    """

    def __init__(self, *, command: Sequence[str], environment: Mapping[str, str], start_timeout_s: float) -> None:
        self._command = tuple(command)
        self._environment = dict(environment)
        self._start_timeout_s = start_timeout_s
        self._process: asyncio.subprocess.Process | None = None
        self._loaded = False
        self._start_deadline = 0.0

    @property
    def process_id(self) -> int | None:
        """Of the process, if there is one."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Start the process if there is none alive. Does not wait until it has loaded.

        Raises InfrastructureError if the system can start no process.
        """
        if self._process is not None and self._process.returncode is None:
            return
        await self.stop()
        try:
            self._process = await self._spawn()
        except OSError as error:
            raise InfrastructureError(f"cannot start a worker process: {error}") from error
        self._start_deadline = asyncio.get_running_loop().time() + self._start_timeout_s

    async def _spawn(self) -> asyncio.subprocess.Process:
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

        Raises InfrastructureError if it cannot load or takes too long, WorkerDied.
        """
        await self.start()
        if self._loaded:
            return
        try:
            async with asyncio.timeout_at(self._start_deadline):
                reply = await self._first_reply()
        except TimeoutError:
            await self.stop()
            raise InfrastructureError(f"a worker did not start in {self._start_timeout_s:g} s") from None
        except WorkerDied:
            await self.stop()
            raise
        if reply.error is not None:
            await self.stop()
            raise InfrastructureError(f"a worker could not load its verifier: {reply.error.message}")
        self._loaded = True

    async def exchange(self, line: bytes) -> bytes:
        """Send a line, given without its end, and wait for the reply. Raises WorkerDied."""
        pipe = None if self._process is None else self._process.stdin
        assert pipe is not None, "exchange before start"
        try:
            pipe.write(line + b"\n")
            await pipe.drain()
        except (OSError, RuntimeError) as error:  # uvloop raises RuntimeError for a pipe that has closed
            raise WorkerDied from error
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
        await process.wait()

    async def _first_reply(self) -> Reply:
        try:
            return Reply.model_validate_json(await self._read())
        except ValueError as error:
            raise WorkerDied from error

    async def _read(self) -> bytes:
        pipe = None if self._process is None else self._process.stdout
        assert pipe is not None, "read before start"
        try:
            line = await pipe.readline()
        except ValueError as error:  # a line beyond the limit
            raise WorkerDied from error
        if not line.endswith(b"\n"):
            raise WorkerDied
        return line


def worker_environment(*, inherit: bool, threads: int = 1) -> dict[str, str]:
    """What a worker sees: what it needs to import the same modules as the service, and no secret of the service."""
    own = {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "OMP_NUM_THREADS": str(threads),
        "LC_ALL": "C.UTF-8",
    }
    return {**os.environ, **own} if inherit else {"PATH": os.environ.get("PATH", os.defpath), **own}
