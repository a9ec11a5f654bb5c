"""Harnesses inside of their task's computer: their own Python and packages are bound into it, read-only.

    /opt/harness/MARK/packages    of the harness's virtual environment
                     /drivers     the programs that begin harnesses
                     /python      its interpreter and library; that of /usr is the image's own

The service starts the program there as it starts a command, and hears its answer on a pipe that nobody inside has. The
session is behind a door on the computer's own loopback.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue

from env_service.agents.processes import result_of, session_variables
from env_service.builtin.computer_tools import TaskComputer
from env_service.environments.interface import AgentClient, AgentResult, EnvironmentFailed
from env_service.harnesses.session_door import session_door
from env_service.runtimes.interface import CommandEnd, ListeningRuntime, RuntimeCommand

_ROOT = "/opt/harness"
_AGENTS = f"{_ROOT}/agent"
_OUTPUT_BYTES = 64 << 10
# The session wants no key from inside: who can connect to its door is inside.
_KEY = "inside"
# The interpreter's own library, ahead of those of the image, which what it starts gets back.
_WITH_LIBRARY = (
    'export HARNESS_LIBRARY_PATH="$LD_LIBRARY_PATH" LD_LIBRARY_PATH="$1${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"; shift; '
    'exec "$@"'
)


@dataclass(frozen=True, kw_only=True)
class HarnessPlaces:
    """Where a harness is inside. `folders` are those of this machine that are bound there, by their places; `library`
    is the folder of the interpreter's shared library, empty if it needs none.
    """

    folders: Mapping[str, Path]
    python: str
    library: str
    packages: str
    drivers: str

    def argv(self, driver: str) -> tuple[str, ...]:
        """The command that begins a driver, by the name of its file."""
        begun = (self.python, "-E", "-s", "-S", f"{self.drivers}/begin_inside.py", self.packages, driver)
        return ("/bin/sh", "-c", _WITH_LIBRARY, "sh", self.library, *begun) if self.library else begun


def places_of(interpreter: Path, *, drivers: Path) -> HarnessPlaces:
    """The places of a virtual environment, by its interpreter. Raises ValueError for one that is no such thing."""
    environment, real = interpreter.parent.parent, Path(os.path.realpath(interpreter))
    found = list(environment.glob("lib/python3.*/site-packages"))
    if len(found) != 1:
        raise ValueError(f"inside is true, and {environment} is no virtual environment: lib/python3.*/site-packages")
    base, packages = real.parent.parent, found[0].resolve()
    root = f"{_ROOT}/{hashlib.blake2b(f'{base} {packages}'.encode(), digest_size=6).hexdigest()}"
    folders = {f"{root}/packages": packages, f"{root}/drivers": drivers}
    python, library = str(real), ""
    if not base.is_relative_to("/usr"):
        folders |= {f"{root}/python/bin": base / "bin", f"{root}/python/lib": base / "lib"}
        python = f"{root}/python/bin/{real.name}"
        library = f"{root}/python/lib" if any((base / "lib").glob("libpython*.so*")) else ""
    return HarnessPlaces(
        folders=folders, python=python, library=library, packages=f"{root}/packages", drivers=f"{root}/drivers"
    )


@dataclass(frozen=True, kw_only=True)
class InsideRun:
    """A run of a harness in a computer. `command_s`: the time of a command of its shell, if it gives none."""

    name: str
    computer: TaskComputer
    places: HarnessPlaces
    driver: str
    environ: Mapping[str, str]
    agent_file: Path | None
    timeout_s: float
    command_s: float

    async def result(self, task: Mapping[str, JsonValue], client: AgentClient) -> AgentResult | float | None:
        """As `ProgramRun.result`. Raises EnvironmentFailed, RuntimeLost, and RuntimeEnded."""
        runtime = self.computer.runtime
        assert isinstance(runtime, ListeningRuntime), "refused at the start for other kinds"
        told = dict(task)
        if self.agent_file is not None:
            told["agent_file"] = f"{_AGENTS}/{self.agent_file.name}"
            await runtime.copy_in({f"{_AGENTS}/{self.agent_file.name}": self.agent_file.read_bytes()})
        async with session_door(await runtime.listen(), client) as url:
            end = await runtime.exec(self._command(told, url, client.model))
        return self._result_of(end)

    def _command(self, told: Mapping[str, JsonValue], url: str, model: str) -> RuntimeCommand:
        return RuntimeCommand(
            argv=self.places.argv(self.driver),
            cwd=self.computer.folder,
            stdin=json.dumps(told).encode() + b"\n",
            environment={
                **self.computer.environment,
                **self.environ,
                **session_variables(url, key=_KEY, model=model),
                "AGENT_INSIDE_COMMAND_S": str(self.command_s),
            },
            wall_s=self.timeout_s,
            output_bytes=_OUTPUT_BYTES,
            trusted=True,
        )

    def _result_of(self, end: CommandEnd) -> AgentResult | float | None:
        if end.timed_out:
            raise EnvironmentFailed("hung", f"{self.name} was not done within {self.timeout_s:g} s")
        if end.starved and end.exit_code != 0:
            text = f"{self.name} was ended: its computer had no memory left (env-service.runtimes.limits.memory_mib)"
            raise EnvironmentFailed("crashed", text)
        if end.exit_code in (126, 127):
            said = end.stderr.decode(errors="replace").strip()[-500:]
            raise EnvironmentFailed(
                "crashed",
                f"the Python of {self.name} cannot be started in image {self.computer.runtime.image!r}: {said}; use a "
                "virtual environment of a Python that brings its libraries along, or of the one in the image's /usr",
            )
        code = -(end.signal or 0) if end.exit_code is None else end.exit_code
        return result_of(code, said=end.stdout, complained=end.stderr)
