"""A program that runs in a place, and how it ended."""

import asyncio
import marshal
import math
import os
import time
from collections.abc import Mapping

from reward_service.sandbox.place import Place
from reward_service.sandbox.program import Ended, Program
from reward_service.sandbox.streams import Feed, Intake
from reward_service.verifier import InfrastructureError

_OPEN_FILES = 256

# Everything is dead by then, so what is in the pipes is all that comes.
_LAST_OUTPUT_S = 10.0

# Bubblewrap ends with 128 + N when the program was killed by signal N.
_SIGNALS = range(129, 193)


class RunningProgram:
    """Implements `Running`. Its wall-clock limit counts from here."""

    def __init__(
        self,
        *,
        place: Place,
        program: Program,
        handles: list[int],
        interpreters: Mapping[str, str],
        environment: Mapping[str, str],
        counts_processes: bool,
    ) -> None:
        command, stdin, stdout, stderr = handles
        self._place = place
        self._limits = program.limits
        self._command, self._stdin = Feed(command), Feed(stdin)
        self._stdout = Intake(stdout, most=self._limits.output_bytes, drain=False)
        self._stderr = Intake(stderr, most=self._limits.output_bytes, drain=True)
        self._timed_out = False
        self._command.send(
            _command(program, interpreters=interpreters, environment=environment, counts_processes=counts_processes)
        )
        self._command.finish()
        self._stdin.send(program.stdin)
        self._started = time.monotonic()
        self._timer = asyncio.get_running_loop().call_later(self._limits.wall_s, self._time_out)

    async def write(self, data: bytes, *, deadline: float) -> None:
        """Send to its standard input."""
        async with asyncio.timeout_at(deadline):
            await self._stdin.flushed()
            self._stdin.send(data)
            await self._stdin.flushed()

    async def readline(self, *, deadline: float) -> bytes:
        """The next line of its standard output."""
        async with asyncio.timeout_at(deadline):
            return await self._stdout.readline()

    async def ended(self) -> Ended:
        """Close its standard input and wait for its end."""
        self._stdin.finish()
        self._stdout.drain()
        status = await self._place.ended()
        wall_s = time.monotonic() - self._started
        try:
            async with asyncio.timeout(_LAST_OUTPUT_S):
                stdout, stderr = await self._stdout.ended(), await self._stderr.ended()
        except TimeoutError:
            raise InfrastructureError("the output of a program did not end with it") from None
        exit_code, number = _end(status)
        return Ended(
            exit_code=None if self._timed_out else exit_code,
            signal=9 if self._timed_out else number,
            stdout=stdout,
            stderr=stderr,
            stdout_cut=self._stdout.cut,
            stderr_cut=self._stderr.cut,
            timed_out=self._timed_out,
            wall_s=wall_s,
        )

    def close(self) -> None:
        """Close its pipes."""
        self._timer.cancel()
        for stream in (self._command, self._stdin, self._stdout, self._stderr):
            stream.close()

    def _time_out(self) -> None:
        self._timed_out = True
        self._place.kill()


def _end(status: int) -> tuple[int | None, int | None]:
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        return None, -code
    return (None, code - 128) if code in _SIGNALS else (code, None)


def _command(
    program: Program, *, interpreters: Mapping[str, str], environment: Mapping[str, str], counts_processes: bool
) -> bytes:
    """What `inside` reads. The format's second version is read by every Python."""
    limits = program.limits
    numbers = {
        "cpu_s": max(1, math.ceil(limits.cpu_s)),
        "memory_bytes": limits.memory_mib << 20,
        "disk_bytes": limits.disk_mib << 20,
        "open_files": _OPEN_FILES,
        # The namespace's first process counts.
        "processes": limits.processes + 1 if counts_processes else 0,
    }
    named = {**environment, **program.environment}
    return marshal.dumps((list(program.argv), dict(interpreters), dict(program.files), named, numbers), 2)
