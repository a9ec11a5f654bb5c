"""A place for a program, on the service's side: the keeper of its sandbox, the program that runs in it, and its end.

offered (a sandbox waits) -> taken by a program -> ended -> the next is offered
"""

import asyncio
import json
import logging
import marshal
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import reward_service.sandbox.supervisor as keeper
from reward_service.verifier.program import NeverBegan, Program, RunEnd
from reward_service.verifier.submission import InfrastructureError
from services.isolation.cgroups import ControlGroup, Parents
from services.isolation.keeping import close_all, received, start_of
from services.isolation.streams import PipeReader, PipeWriter
from services.process import seal_descriptors

logger = logging.getLogger(__name__)

START_S = 90.0
_STOP_S = 20.0

# Of a sandbox: command, stdin, stdout, stderr.
_HANDLES = 4

# Beside the program, its group holds the keeper, bubblewrap and the first process of the namespace.
_OWN_PROCESSES = 4
_OWN_MEMORY = 32 << 20
_OPEN_FILES = 256
# Everything is dead by then, so what is in the pipes is all that comes.
_LAST_OUTPUT_S = 10.0
# Bubblewrap ends with 128 + N when the program was killed by signal N.
_SIGNALS = range(129, 193)


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Launch of sandboxes by keepers. `mounts`: folders that their user could not reach, and where they see them."""

    isolated: bool
    command: Sequence[str]
    options: Sequence[str]
    filter: bytes
    environment: dict[str, str]
    disk_mib: int
    mounts: Sequence[tuple[str, str]] = ()


class SandboxSlot:
    """A place, used by one program at a time. `uid` is the user that it drops to, of None stays the service's."""

    def __init__(self, *, launch: Launch, name: str, uid: int | None, parents: Parents | None) -> None:
        self._launch = launch
        self._name = name
        self._uid = uid
        self._parents = parents
        self._group: ControlGroup | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._control: socket.socket | None = None
        self._offer: asyncio.Future[list[int]] | None = None
        self._end: asyncio.Future[keeper.SandboxReport] | None = None
        self._memory_kills = 0

    async def start(self) -> None:
        """Start its keeper if there is none. Does not wait for a sandbox. Raises InfrastructureError."""
        if self._process is not None:
            return
        loop = asyncio.get_running_loop()
        try:
            ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            raise InfrastructureError(f"cannot talk to the keeper of a sandbox: {error}") from error
        ours.setblocking(False)
        try:
            if self._parents is not None and self._group is None:
                self._group = ControlGroup(self._parents, name=self._name)
            seal_descriptors()
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, *start_of(keeper.__name__), self._settings(its.fileno()),
                pass_fds=(its.fileno(),), stdin=asyncio.subprocess.DEVNULL, env={},
            )  # fmt: skip
        except OSError as error:
            ours.close()
            raise InfrastructureError(f"cannot start the keeper of a sandbox: {error}") from error
        finally:
            its.close()
        self._control = ours
        self._offer, self._end = loop.create_future(), loop.create_future()
        loop.add_reader(ours, self._hear)

    async def offered(self, *, disk_mib: int, fresh: bool) -> list[int]:
        """The descriptors of a waiting sandbox: command, stdin, stdout, stderr, which are the caller's from here on.

        `fresh`: of one that is launched now. Raises InfrastructureError if there is none.
        """
        if self._offer is not None and self._offer.done() and self._offer.exception() is not None:
            await self.stop()  # it died while nobody looked
        await self.start()
        handles = await self._next_offer()
        if disk_mib == self._launch.disk_mib and not fresh:
            return handles
        # Before its pipes are closed, which ends it.
        self._say(keeper.DISK + str(disk_mib).encode())
        close_all(handles)
        return await self._next_offer()

    async def _next_offer(self) -> list[int]:
        assert self._offer is not None
        try:
            async with asyncio.timeout(START_S):
                handles = await asyncio.shield(self._offer)
        except TimeoutError:
            await self.stop()
            raise InfrastructureError(f"no sandbox was ready within {START_S:g} s") from None
        except InfrastructureError:
            await self.stop()
            raise
        self._offer = asyncio.get_running_loop().create_future()
        return handles

    def limit(self, *, memory_mib: int, processes: int) -> None:
        """Set what the next program's processes may take together. Raises OSError if its group does not take that."""
        if self._group is None:
            self._say(keeper.WATCH + str(memory_mib << 20).encode())
            return
        self._group.limit(memory_bytes=(memory_mib << 20) + _OWN_MEMORY, processes=processes + _OWN_PROCESSES)
        self._memory_kills = self._group.memory_kills()
        self._say(keeper.WATCH + b"0")

    def kill(self) -> None:
        """Kill what runs; it has ended a little later."""
        self._say(keeper.KILL)

    async def ended(self) -> keeper.SandboxReport:
        """Report of the sandbox's end, when nothing of it is left. Raises InfrastructureError if the keeper has died in
        between; if that was for lack of memory, the program's end is that it was killed."""
        assert self._end is not None
        try:
            return await asyncio.shield(self._end)
        except InfrastructureError:
            if self._group is not None and self._group.memory_kills() > self._memory_kills:
                return keeper.SandboxReport(status=int(signal.SIGKILL), cpu_s=0.0, began=True)
            raise

    async def clear(self) -> None:
        """Make sure that nothing runs, and let the next sandbox be launched."""
        if self._end is None:
            return
        if not self._end.done():
            self.kill()
        try:
            async with asyncio.timeout(_STOP_S):
                await asyncio.shield(self._end)
        except (TimeoutError, InfrastructureError):
            await self.stop()
            return
        self._end = asyncio.get_running_loop().create_future()
        self._say(keeper.NEXT)

    async def stop(self) -> None:
        """End the keeper and all that it has launched, and remove its group."""
        if self._control is not None:
            asyncio.get_running_loop().remove_reader(self._control)
            self._control.close()
            self._control = None
        if self._process is not None:
            try:
                async with asyncio.timeout(_STOP_S):
                    await self._process.wait()
            except TimeoutError:
                logger.error("the keeper %s does not stop and is killed", self._name)
                with suppress(ProcessLookupError):
                    self._process.kill()
                await self._process.wait()
            self._process = None
        if self._offer is not None and self._offer.done() and self._offer.exception() is None:
            close_all(self._offer.result())
        for future in (self._offer, self._end):
            if future is not None:
                future.cancel()
        self._offer, self._end = None, None
        if self._group is not None:
            await asyncio.to_thread(self._group.remove)
            self._group = None

    def _settings(self, control: int) -> str:
        settings = keeper.KeeperSettings(
            parent=os.getpid(),
            control=control,
            uid=self._uid,
            cgroups=[] if self._group is None else self._group.processes_files,
            isolated=self._launch.isolated,
            command=list(self._launch.command),
            options=list(self._launch.options),
            filter=self._launch.filter.hex(),
            environment=self._launch.environment,
            mounts=list(self._launch.mounts),
            disk_mib=self._launch.disk_mib,
        )
        return json.dumps(settings._asdict())

    def _say(self, word: bytes) -> None:
        if self._control is not None:
            with suppress(OSError):  # a keeper that is gone is heard of
                self._control.send(word)

    def _hear(self) -> None:
        assert self._control is not None
        assert self._offer is not None
        assert self._end is not None
        try:
            message, handles = received(self._control, most_bytes=8192, most_handles=_HANDLES)
        except BlockingIOError:
            return
        except OSError:
            message, handles = b"", []
        if message == keeper.READY and len(handles) < _HANDLES:
            close_all(handles)
            self._lose("the service has no descriptors left for a sandbox; raise its limit of open files (ulimit -n)")
        elif message == keeper.READY and not self._offer.done():
            self._offer.set_result(handles)
        elif message.startswith(keeper.ENDED) and not self._end.done():
            self._end.set_result(keeper.SandboxReport(*json.loads(message[len(keeper.ENDED) :])))
        else:
            close_all(handles)
            said = message.removeprefix(keeper.FAILED).decode(errors="replace")
            self._lose(f"a sandbox cannot be launched: {said}" if said else "the keeper of the sandbox has died")

    def _lose(self, reason: str) -> None:
        assert self._control is not None
        asyncio.get_running_loop().remove_reader(self._control)
        for future in (self._offer, self._end):
            if future is not None and not future.done():
                future.set_exception(InfrastructureError(reason))
                future.exception()  # it may be nobody's concern


class RunningProgram:
    """Implements `Running`. Its wall-clock limit counts from here."""

    def __init__(
        self,
        *,
        place: SandboxSlot,
        program: Program,
        handles: list[int],
        interpreters: Mapping[str, str],
        environment: Mapping[str, str],
        counts_processes: bool,
    ) -> None:
        command, stdin, stdout, stderr = handles
        self._place = place
        self._limits = program.limits
        self._command, self._stdin = PipeWriter(command), PipeWriter(stdin)
        self._stdout = PipeReader(stdout, most=self._limits.output_bytes, drain=False)
        self._stderr = PipeReader(stderr, most=self._limits.output_bytes, drain=True)
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

    async def ended(self) -> RunEnd:
        """Close its standard input and wait for its end."""
        self._stdin.finish()
        self._stdout.drain()
        report = await self._place.ended()
        wall_s = time.monotonic() - self._started
        try:
            async with asyncio.timeout(_LAST_OUTPUT_S):
                stdout, stderr = await self._stdout.ended(), await self._stderr.ended()
        except TimeoutError:
            raise InfrastructureError("the output of a program did not end with it") from None
        if not report.began:
            said = stderr.decode(errors="replace").strip()
            raise NeverBegan(f"a program did not come to begin: {said or 'its sandbox hung'}")
        exit_code, number = _end(report.status)
        return RunEnd(
            exit_code=None if self._timed_out else exit_code,
            signal=9 if self._timed_out else number,
            stdout=stdout,
            stderr=stderr,
            stdout_cut=self._stdout.cut,
            stderr_cut=self._stderr.cut,
            timed_out=self._timed_out,
            wall_s=wall_s,
            cpu_s=report.cpu_s,
        )

    async def killed(self) -> RunEnd:
        """As `ended`, but kill it first if it still runs."""
        self._place.kill()
        return await self.ended()

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
    """The command that `inside` reads. The format's second version is read by every Python."""
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
