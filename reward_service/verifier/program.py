"""The contract between a sandbox and its users: what is run, within which limits of the configuration, how it ended."""

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from pydantic import Field

from reward_service.verifier.submission import InfrastructureError
from services.config.models import ConfigModel


@dataclass(frozen=True, kw_only=True)
class RunLimits:
    """Limits of one run.

    `wall_s` counts from the program's start; then all of its processes are killed. `cpu_s` is for each process.
    `memory_mib` is each process's address space, and what all of them use together; where there are no cgroups, the
    latter is looked at ten times a second. `processes` counts threads too. `output_bytes` is for stdout and stderr
    each: more is cut, and does not end the run. `disk_mib` bounds all files that the program writes.
    """

    wall_s: float = 10.0
    cpu_s: float = 10.0
    memory_mib: int = 512
    processes: int = 32
    output_bytes: int = 1 << 16
    disk_mib: int = 32


@dataclass(frozen=True, kw_only=True)
class Program:
    """A command line and the files that it finds in its working directory.

    `argv[0]` is the name of an interpreter of the sandbox (`python` is always one) or a path inside it. `files` are by
    their relative path, with `/` between folders. The program sees `environment`, a PATH, HOME and LANG, and nothing
    else of any environment. `fresh`: its sandbox is launched for it, and is not one that stands ready.
    """

    argv: tuple[str, ...]
    files: Mapping[str, bytes] = field(default_factory=dict)
    stdin: bytes = b""
    environment: Mapping[str, str] = field(default_factory=dict)
    limits: RunLimits = RunLimits()
    fresh: bool = False


@dataclass(frozen=True, kw_only=True)
class RunEnd:
    """End of a run: by `exit_code`, or by `signal`.

    `timed_out`: it was killed at its wall-clock limit, and then `signal` is SIGKILL. `cpu_s` is what all of its
    processes took, its start included. Whatever the program wrote is its own word: neither its output nor its exit code
    proves that it did anything.
    """

    exit_code: int | None
    signal: int | None
    stdout: bytes
    stderr: bytes
    stdout_cut: bool = False
    stderr_cut: bool = False
    timed_out: bool = False
    wall_s: float
    cpu_s: float = 0.0


class NeverBegan(InfrastructureError):
    """A sandbox did not come to run its program, which has done nothing so far."""


class Running(Protocol):
    """A program that is talked to while it runs. Deadlines are on the event loop's clock."""

    async def write(self, data: bytes, *, deadline: float) -> None:
        """Send to its standard input; to one that has ended or closed it, nothing is sent.

        Raises TimeoutError if it does not read in time.
        """
        ...

    async def readline(self, *, deadline: float) -> bytes:
        """The next line of its standard output with its newline; what there is of it at the end, then b"".

        A line of `output_bytes` or more is returned in parts without a newline. Raises TimeoutError if no line comes in
        time; what had come of it stays for the next call.
        """
        ...

    async def ended(self) -> RunEnd:
        """Close its standard input and wait for its end, at its wall-clock limit at the latest.

        `stdout` holds what no `readline` has taken. Raises NeverBegan.
        """
        ...

    async def killed(self) -> RunEnd:
        """As `ended`, but kill it first if it still runs."""
        ...


class Sandbox(Protocol):
    """Sandbox for programs. At most a fixed number run at once; others wait, which their limits ignore."""

    async def run(self, program: Program) -> RunEnd:
        """Run a program to its end. Raises UserError for a program or limits that it does not take, and
        InfrastructureError if it cannot start one."""
        ...

    def open(self, program: Program) -> AbstractAsyncContextManager[Running]:
        """Start a program to talk to (its `stdin` comes first); leaving kills it and all that it started. Raises like
        `run`."""
        ...


SandboxKind = Literal["required", "off", "unsafe"]


class InterpreterConfig(ConfigModel):
    """A command that programs may name: an entry of [[reward-service.execution.interpreters]]."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$", description="name by which a program asks for it")
    path: Path = Field(description="where it is; outside of /usr its folder must be among execution.folders")


class ExecutionConfig(ConfigModel):
    """The sandbox: how many programs at once, the most that one may ask for, and what is in it."""

    concurrency: int = Field(4, ge=1, le=1024, description="programs at once; a sandbox waits ready for each")
    spare: int = Field(2, ge=0, le=1024, description="sandboxes that wait ready beyond that, while others are cleared")
    max_waiting: int = Field(256, ge=0, description="calls of /v1/execute that wait; more are turned away with 429")
    max_wall_s: float = Field(120.0, gt=0, description="most seconds that one program may ask for")
    max_cpu_s: float = Field(120.0, gt=0, description="most CPU seconds for each of its processes")
    max_memory_mib: int = Field(2048, ge=64, description="most memory, in MiB")
    max_processes: int = Field(128, ge=1, le=4096, description="most processes and threads of one program")
    max_output_bytes: int = Field(1 << 20, ge=1024, description="most bytes kept of stdout, and of stderr")
    max_disk_mib: int = Field(256, ge=1, description="most MiB of files that one program may write")
    python: Path | None = Field(None, description="the Python that programs run on; the service's own if not given")
    packages: tuple[str, ...] = Field(
        ("pytest", "pluggy", "iniconfig", "packaging", "pygments"),
        description="installed distributions that programs may import, their requirements included one by one",
    )
    interpreters: tuple[InterpreterConfig, ...] = Field(
        (InterpreterConfig(name="sh", path=Path("/bin/sh")),), description="commands beside python: name, path"
    )
    folders: tuple[Path, ...] = Field(
        (), description="folders that programs can read, at the same path; everybody must be able to"
    )
    first_uid: int = Field(
        64100, ge=1000, le=4_000_000_000, description="as root, programs run under user ids from this one on, one each"
    )
    cgroup: str = Field(
        "auto", description="folder below which cgroups are made; auto: the service's own cgroup; off: none are made"
    )
    max_sessions: int = Field(8, ge=0, le=1024, description="sessions at once, each a sandbox of its own; 0: none")
    session_idle_s: float = Field(300.0, gt=0, description="seconds without a call after which a session ends")
    session_s: float = Field(3600.0, gt=0, description="seconds after which a session ends in any case")
