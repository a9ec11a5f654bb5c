"""Agents that are programs: started for one trajectory, told its task, and ended with all that they started."""

import asyncio
import contextlib
import json
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import Field, JsonValue

from env_service.agents.results import result_in
from env_service.environments.interface import AgentClient, AgentResult, EnvironmentFailed
from services.config.models import ConfigModel
from services.isolation.streams import DroppedPace
from services.process import signal_name

_MAX_BYTES = 64 << 10
_KEPT_VARIABLES = ("PATH", "LANG", "LC_ALL", "TZ", "PYTHONPATH", "VIRTUAL_ENV", "SSL_CERT_FILE")


class Confinement(ConfigModel):
    """Limits of what a program may do. For more, let `command` begin with a sandbox of the machine's."""

    own_folder: bool = Field(False, description="it starts in an empty folder of its own, which is deleted at the end")
    clean_environment: bool = Field(
        False, description="it gets of the process's environment variables only the path, the language and the like"
    )
    memory_mb: int | None = Field(None, ge=16, description="largest address space of each of its processes, in MiB")
    cpu_s: int | None = Field(None, ge=1, description="most CPU time of each of its processes, in seconds")
    file_mb: int | None = Field(None, ge=0, description="largest file that it may write, in MiB")


@dataclass(frozen=True, kw_only=True)
class ProgramRun:
    """A run of a command. Without a reward on its output it is to post one, or a verifier judges."""

    command: Sequence[str]
    environ: Mapping[str, str]
    confinement: Confinement

    async def result(self, task: Mapping[str, JsonValue], client: AgentClient) -> AgentResult | float | None:
        """The reward that the last line of its output names, None if it names none. Raises EnvironmentFailed
        with the end of its error output if it cannot be started, or does not exit with 0.
        """
        with contextlib.ExitStack() as stack:
            folder = None
            if self.confinement.own_folder:
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="agent-", ignore_cleanup_errors=True))
            process = await self._started(client, folder)
            try:
                self._confine(process.pid)
                async with asyncio.TaskGroup() as tasks:
                    said, complained = _listeners(process, json.dumps(task).encode() + b"\n", tasks)
                    await _exited(process.pid)
                    # What it left behind holds its output open.
                    _kill_group(process.pid)
                code = await process.wait()
            finally:
                _kill_group(process.pid)
                await process.wait()
        return result_of(code, said=said.result(), complained=complained.result())

    async def _started(self, client: AgentClient, folder: str | None) -> asyncio.subprocess.Process:
        try:
            return await asyncio.create_subprocess_exec(
                *self.command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
                cwd=folder,
                env=self._environment(client, folder),
            )
        except OSError as error:
            raise EnvironmentFailed("crashed", f"the agent {self.command[0]!r} cannot be started: {error}") from error

    def _environment(self, client: AgentClient, folder: str | None) -> dict[str, str]:
        # The process's own settings may hold tokens, which are none of an agent's business.
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("HEADWAY")}
        if self.confinement.clean_environment:
            inherited = {name: inherited[name] for name in _KEPT_VARIABLES if name in inherited}
        return {
            **inherited,
            **({"HOME": folder, "TMPDIR": folder} if folder else {}),
            **self.environ,
            **session_variables(client.anthropic_url, key=client.key, model=client.model),
            "AGENT_REWARD_URL": f"{client.anthropic_url}/reward",
        }

    def _confine(self, pid: int) -> None:
        limits = {
            resource.RLIMIT_AS: _bytes(self.confinement.memory_mb),
            resource.RLIMIT_FSIZE: _bytes(self.confinement.file_mb),
            resource.RLIMIT_CPU: self.confinement.cpu_s,
        }
        if sys.platform != "linux":
            return
        for kind, most in limits.items():
            if most is not None:
                with contextlib.suppress(ProcessLookupError):
                    resource.prlimit(pid, kind, (most, most))


def _bytes(mebibytes: int | None) -> int | None:
    return None if mebibytes is None else mebibytes << 20


def _listeners(
    process: asyncio.subprocess.Process, task: bytes, tasks: asyncio.TaskGroup
) -> tuple[asyncio.Task[bytes], asyncio.Task[bytes]]:
    """Tell it its task; what will be the ends of its output and of its error output."""
    assert process.stdin is not None, "started with pipes"
    assert process.stdout is not None, "started with pipes"
    assert process.stderr is not None, "started with pipes"
    tasks.create_task(_tell(process.stdin, task))
    return tasks.create_task(_tail(process.stdout)), tasks.create_task(_tail(process.stderr))


async def _exited(pid: int) -> None:
    """Return when the process has ended, whoever holds its pipes."""
    ended = asyncio.Event()
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:  # it was waited for while the loop was busy
        return
    loop = asyncio.get_running_loop()
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


async def _tell(stdin: asyncio.StreamWriter, task: bytes) -> None:
    # One that does not read its task is free to; uvloop raises RuntimeError if it has ended.
    with contextlib.suppress(ConnectionError, RuntimeError):
        stdin.write(task)
        await stdin.drain()
    stdin.close()


async def _tail(stream: asyncio.StreamReader) -> bytes:
    kept, pace = b"", DroppedPace()
    while piece := await stream.read(_MAX_BYTES):
        dropped = len(kept) + len(piece) - _MAX_BYTES
        kept = (kept + piece)[-_MAX_BYTES:]
        if dropped > 0:
            await asyncio.sleep(pace.pause_s(dropped))
    return kept


def _kill_group(pid: int) -> None:
    """End all that it started, too."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def session_variables(url: str, *, key: str, model: str) -> dict[str, str]:
    """Variables by which clients of both APIs find a session. `url` is the address without `/v1`."""
    return {
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": key,
        "AGENT_MODEL": model,
    }


def result_of(code: int, *, said: bytes, complained: bytes) -> AgentResult | float | None:
    """The reward that a program's last line names, None if it names none. `code` is as of `Process.returncode`. Raises
    EnvironmentFailed, with the end of its error output, for any but 0.
    """
    if code != 0:
        raise _failure(code, complained.decode(errors="replace"))
    lines = said.decode(errors="replace").strip().splitlines()
    return result_in(lines[-1]) if lines else None


def _failure(code: int, complained: str) -> EnvironmentFailed:
    lines = complained.strip().splitlines()
    how = f"was killed by {signal_name(-code)}" if code < 0 else f"exited with code {code}"
    return EnvironmentFailed(
        "crashed", f"the agent {how}: {lines[-1][:500] if lines else 'it said nothing'}", traceback=complained[-8192:]
    )
