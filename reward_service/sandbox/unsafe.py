"""The sandbox that isolates nothing: a plain subprocess with limits, in a folder of its own.

Whatever it runs can read and write what the service can. It is there for machines where nothing better works and whose
operator has said `sandbox = "unsafe"`.
"""

import asyncio
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from reward_service.sandbox.program import Ended, Limits, Program, Running
from reward_service.verifier import InfrastructureError, UserError


class UnsafeSandbox:
    """Runs programs as subprocesses, `concurrency` at a time."""

    def __init__(self, *, concurrency: int) -> None:
        self._places = asyncio.Semaphore(concurrency)

    async def run(self, program: Program) -> Ended:
        """Run a program to its end."""
        async with self.open(program) as running:
            return await running.ended()

    @asynccontextmanager
    async def open(self, program: Program) -> AsyncIterator[Running]:
        """Start a program to talk to."""
        async with self._places:
            folder = Path(tempfile.mkdtemp(prefix="headway-run-"))
            try:
                _write_files(folder, program)
                running = await _start(program, folder)
                try:
                    yield running
                finally:
                    await running.kill()
            finally:
                shutil.rmtree(folder, ignore_errors=True)


class _Subprocess:
    def __init__(self, *, process: asyncio.subprocess.Process, program: Program) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self._process, self._stdin = process, process.stdin
        self._stdout, self._stderr = process.stdout, process.stderr
        self._limits = program.limits
        self._started = time.monotonic()
        self._deadline = asyncio.get_running_loop().time() + program.limits.wall_s
        self._line = b""
        self._feeding = asyncio.ensure_future(self._feed(program.stdin))

    async def _feed(self, data: bytes) -> None:
        with suppress(ConnectionError):
            self._stdin.write(data)
            await self._stdin.drain()

    async def write(self, data: bytes, *, deadline: float) -> None:
        async with asyncio.timeout_at(deadline):
            await asyncio.shield(self._feeding)
            await self._feed(data)

    async def readline(self, *, deadline: float) -> bytes:
        most = self._limits.output_bytes
        async with asyncio.timeout_at(deadline):
            while b"\n" not in self._line and len(self._line) < most:
                part = await self._stdout.read(most - len(self._line))
                if not part:
                    break
                self._line += part
        end = self._line.find(b"\n") + 1 or len(self._line)
        line, self._line = self._line[:end], self._line[end:]
        return line

    async def ended(self) -> Ended:
        out, err = (
            asyncio.ensure_future(self._capture(self._stdout)),
            asyncio.ensure_future(self._capture(self._stderr)),
        )
        timed_out = False
        try:
            async with asyncio.timeout_at(self._deadline):
                await asyncio.shield(self._feeding)
                self._stdin.close()
                await self._process.wait()
        except TimeoutError:
            timed_out = True
        wall_s = time.monotonic() - self._started
        await self.kill()
        (stdout, stdout_cut), (stderr, stderr_cut) = await out, await err
        code = self._process.returncode
        assert code is not None
        rest = self._line + stdout
        most = self._limits.output_bytes
        return Ended(
            exit_code=code if code >= 0 else None,
            signal=-code if code < 0 else None,
            stdout=rest[:most],
            stderr=stderr,
            stdout_cut=stdout_cut or len(rest) > most,
            stderr_cut=stderr_cut,
            timed_out=timed_out,
            wall_s=wall_s,
        )

    async def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        self._feeding.cancel()

    async def _capture(self, stream: asyncio.StreamReader) -> tuple[bytes, bool]:
        kept = bytearray()
        cut = False
        while part := await stream.read(1 << 16):
            room = self._limits.output_bytes - len(kept)
            kept += part[:room]
            cut = cut or len(part) > room
        return bytes(kept), cut


async def _start(program: Program, folder: Path) -> _Subprocess:
    interpreters = {"python": sys.executable}
    command = (interpreters.get(program.argv[0], program.argv[0]), *program.argv[1:])
    own = {"PATH": os.defpath, "HOME": str(folder), "LANG": "C.UTF-8"}
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd=folder,
            env={**own, **program.environment},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
            preexec_fn=lambda: _limit(program.limits),
        )
    except OSError as error:
        raise InfrastructureError(f"cannot start {program.argv[0]!r}: {error}") from error
    return _Subprocess(process=process, program=program)


def _write_files(folder: Path, program: Program) -> None:
    for name, content in program.files.items():
        path = Path(name)
        if path.is_absolute() or ".." in path.parts or not path.parts:
            raise UserError(f"the name of a file must be a relative path without '..', got {name!r}")
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)


def _limit(limits: Limits) -> None:
    for what, most in (
        (resource.RLIMIT_CPU, max(1, round(limits.cpu_s))),
        (resource.RLIMIT_AS, limits.memory_mib << 20),
        (resource.RLIMIT_FSIZE, limits.disk_mib << 20),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (most, most))
