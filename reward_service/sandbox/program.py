"""What is run, within which limits, and how it ended: the contract between a sandbox and those who use it."""

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one run may take.

    `wall_s` counts from the program's start; then all of its processes are killed. `cpu_s` is for each process.
    `memory_mib` is each process's address space, and, where there are cgroups, what all of them use together.
    `processes` counts threads too. `output_bytes` is for stdout and stderr each: more is cut, and does not end the run.
    `disk_mib` bounds all files that the program writes.
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
    else of any environment.
    """

    argv: tuple[str, ...]
    files: Mapping[str, bytes] = field(default_factory=dict)
    stdin: bytes = b""
    environment: Mapping[str, str] = field(default_factory=dict)
    limits: Limits = Limits()


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a run ended: by `exit_code`, or by `signal`.

    `timed_out`: it was killed at its wall-clock limit, and then `signal` is SIGKILL. Whatever the program wrote is its
    own word: neither its output nor its exit code proves that it did anything.
    """

    exit_code: int | None
    signal: int | None
    stdout: bytes
    stderr: bytes
    stdout_cut: bool = False
    stderr_cut: bool = False
    timed_out: bool = False
    wall_s: float


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

    async def ended(self) -> Ended:
        """Close its standard input and wait for its end, at its wall-clock limit at the latest.

        `stdout` holds what no `readline` has taken.
        """
        ...


class Sandbox(Protocol):
    """Where programs run. At most a fixed number run at once; others wait for their turn, which their limits ignore."""

    async def run(self, program: Program) -> Ended:
        """Run a program to its end. Raises UserError for a program or limits that it does not take, and
        InfrastructureError if it cannot start one."""
        ...

    def open(self, program: Program) -> AbstractAsyncContextManager[Running]:
        """Start a program to talk to (its `stdin` comes first); leaving kills it and all that it started. Raises like
        `run`."""
        ...
