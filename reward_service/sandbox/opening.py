"""Opens the sandbox of a configuration, and tries its walls before anything is trusted to them."""

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from reward_service.sandbox.cgroups import open_parents
from reward_service.sandbox.launch import bubblewrap_launch, end_orphans, unsafe_launch
from reward_service.sandbox.pool import SandboxPool, Users
from reward_service.verifier.program import Ended, ExecutionConfig, Limits, Program, SandboxKind
from reward_service.verifier.submission import InfrastructureError, UserError

logger = logging.getLogger(__name__)

# Each wall that does not hold is named on its standard output.
_TRY_SOURCE = """
import ctypes, os, socket, sys
def falls(wall, attack):
    try:
        attack()
    except OSError:
        return
    print(wall)
def call(function, *arguments):
    if getattr(ctypes.CDLL(None, use_errno=True), function)(*arguments) == -1:
        raise OSError
address = ("127.0.0.1", int(sys.argv[1]))
falls("the network of the host is reachable", lambda: socket.create_connection(address, timeout=5))
falls("files of the service are readable", lambda: open(sys.argv[2]).close())
falls("settings of the kernel are writable", lambda: open("/proc/sys/kernel/core_pattern", "w").close())
falls("the root folder is writable", lambda: open("/file", "w").close())
falls("namespaces can be made", lambda: call("unshare", 0x10000000))
falls("processes can be traced", lambda: call("ptrace", 0, 0, 0, 0))
if open("/proc/1/environ").read():
    print("the environment of the launcher is readable")
if os.getuid() != 65534:
    print("it runs as user", os.getuid())
"""

SESSION_LINE_FACTOR = 16
"""Each byte of a session's output can take six in its answer, whose line must be kept whole."""


@dataclass(frozen=True, kw_only=True)
class Sandboxes:
    """Where programs run, and where sessions do, each with places of its own."""

    programs: SandboxPool
    sessions: SandboxPool


@asynccontextmanager
async def open_sandboxes(*, kind: SandboxKind, config: ExecutionConfig) -> AsyncIterator[Sandboxes | None]:
    """The sandboxes of a service; None if it is to have none.

    Raises UserError that says what is missing where programs must be isolated and cannot be.
    """
    if kind == "off":
        yield None
        return
    await asyncio.to_thread(end_orphans)
    first = config.first_uid if kind == "required" and os.geteuid() == 0 else None
    async with AsyncExitStack() as stack:
        opened = unsafe_launch(config) if kind == "unsafe" else bubblewrap_launch(config, uid=first)
        # It copies files and starts processes, for a second or so.
        launch, environment = await asyncio.to_thread(stack.enter_context, opened)
        parents = stack.enter_context(open_parents(config.cgroup))

        users = Users(first=first)
        programs = await stack.enter_async_context(
            SandboxPool(
                launch=launch, config=config, size=config.concurrency, spare=config.spare, users=users,
                parents=parents, environment=environment,
            )
        )  # fmt: skip
        sessions = await stack.enter_async_context(
            SandboxPool(
                launch=launch, config=_for_sessions(config), size=config.max_sessions, users=users, parents=parents,
                environment=environment, eager=False, first_place=config.concurrency + config.spare,
            )
        )  # fmt: skip
        if kind == "unsafe":
            logger.warning("sandbox = 'unsafe': programs can read and write whatever this service can")
        else:
            await _try_walls(programs, config)
        yield Sandboxes(programs=programs, sessions=sessions)


async def _try_walls(programs: SandboxPool, config: ExecutionConfig) -> None:
    """Raises UserError unless a program runs, and finds every wall that it tries to stand."""
    usual = Limits()
    limits = Limits(
        wall_s=min(60.0, config.max_wall_s),
        cpu_s=min(60.0, config.max_cpu_s),
        memory_mib=min(usual.memory_mib, config.max_memory_mib),
        processes=min(usual.processes, config.max_processes),
        disk_mib=min(usual.disk_mib, config.max_disk_mib),
    )
    try:
        with _listening() as port:
            argv = ("python", "try.py", str(port), str(Path(__file__)))
            files = {"try.py": _TRY_SOURCE.encode()}
            ended = await programs.run(Program(argv=argv, files=files, limits=limits))
    except InfrastructureError as error:
        raise UserError(f"programs cannot be isolated here: {error}. {_remedies()}") from error
    problem = ended.stdout.decode(errors="replace").strip() or (None if ended.exit_code == 0 else _account(ended))
    if problem is not None:
        raise UserError(f"the sandbox does not hold here: {'; '.join(problem.splitlines())}. {_remedies()}")


def _account(ended: Ended) -> str:
    how = "was too slow" if ended.timed_out else f"ended with code {ended.exit_code}, signal {ended.signal}"
    return f"a first program {how}: {ended.stderr.decode(errors='replace').strip()[-1000:]}"


@contextmanager
def _listening() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield int(server.getsockname()[1])


def _remedies() -> str:
    """What may be in the way on this machine, and what to do about it."""
    found = [
        remedy
        for path, blocked, remedy in (
            (
                "kernel/unprivileged_userns_clone",
                "0",
                "user namespaces are off: sysctl kernel.unprivileged_userns_clone=1",
            ),
            ("user/max_user_namespaces", "0", "user namespaces are off: sysctl user.max_user_namespaces=15000"),
            (
                "kernel/apparmor_restrict_unprivileged_userns",
                "1",
                "AppArmor restricts user namespaces: sysctl kernel.apparmor_restrict_unprivileged_userns=0, or a "
                "profile for bwrap that allows userns",
            ),
        )
        if _setting(path) == blocked
    ]
    if _is_filtered():
        found.append(
            "this process runs under a seccomp filter, as in a container: start that with the profile and the options "
            "of deploy/sandbox/README.md"
        )
    return "; ".join([*found, "if no verifier runs code, say sandbox = 'off'"])


def _setting(path: str) -> str | None:
    try:
        return (Path("/proc/sys") / path).read_text().strip()
    except OSError:
        return None


def _is_filtered() -> bool:
    return "\nSeccomp:\t2" in Path("/proc/self/status").read_text()


def _for_sessions(config: ExecutionConfig) -> ExecutionConfig:
    """The maxima for the sandboxes that sessions live in."""
    more = {
        "max_wall_s": config.session_s,
        "max_cpu_s": config.session_s,
        "max_output_bytes": config.max_output_bytes * SESSION_LINE_FACTOR,
    }
    return config.model_copy(update=more)
