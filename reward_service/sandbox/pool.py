"""The sandboxes of a service, opened from its configuration, their walls tried before anything is trusted to them.

A pool is a number of places, each with a sandbox that waits for its program and is used for that one alone.
"""

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Self

from reward_service.sandbox.launch import WITHOUT, bubblewrap_launch, unsafe_launch
from reward_service.sandbox.python_inside import FIRST_MODULE
from reward_service.sandbox.slot import Launch, RunningProgram, SandboxSlot
from reward_service.verifier.program import ExecutionConfig, Program, RunEnd, RunLimits, Running, SandboxKind
from reward_service.verifier.submission import InfrastructureError, UserError
from services.isolation.bubblewrap import remedies
from services.isolation.cgroups import Parents, open_parents
from services.isolation.faults import CannotIsolate
from services.isolation.keeping import close_all
from services.isolation.owners import end_orphans

logger = logging.getLogger(__name__)

_MAX_FILES = 1024
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
class Users:
    """The user ids that places drop to, one each from `first` on; None: they stay the service's."""

    first: int | None

    def of(self, place: int) -> int | None:
        """The user of a place."""
        return None if self.first is None else self.first + place


class SandboxPool:
    """Implements `Sandbox`. A context manager: leaving it ends all that runs.

    `size` programs run at once, and there are `spare` places more, so that one is ready while others are cleared.
    `eager`: the sandboxes are launched when it is entered, and not at their first program. `first_place` sets the
    names and users of its places apart from another pool's.
    """

    def __init__(
        self,
        *,
        launch: Launch,
        config: ExecutionConfig,
        size: int,
        users: Users,
        parents: Parents | None,
        environment: Mapping[str, str],
        spare: int = 0,
        eager: bool = True,
        first_place: int = 0,
    ) -> None:
        self._size = size
        self._turns = asyncio.Semaphore(size)
        self._config = config
        self._launch = launch
        self._environment = environment
        self._interpreters = {given.name: str(given.path) for given in config.interpreters}
        self._eager = eager
        self._places = tuple(
            SandboxSlot(launch=launch, name=f"place-{number}", uid=users.of(number), parents=parents)
            for number in range(first_place, first_place + size + spare)
        )
        # First in, first out: the longer a place has been idle, the surer its sandbox stands.
        self._idle = asyncio.Queue[SandboxSlot](maxsize=size + spare)
        for place in self._places:
            self._idle.put_nowait(place)
        self._running = 0

    async def __aenter__(self) -> Self:
        try:
            if self._eager:
                for place in self._places:
                    await place.start()
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._stop()

    @property
    def size(self) -> int:
        """Programs that can run at once."""
        return self._size

    @property
    def busy(self) -> int:
        """Programs that run now."""
        return self._running

    async def run(self, program: Program, *, on_turn: Callable[[], None] = lambda: None) -> RunEnd:
        """Run a program to its end."""
        async with self.open(program, on_turn=on_turn) as running:
            return await running.ended()

    @asynccontextmanager
    async def open(self, program: Program, *, on_turn: Callable[[], None] = lambda: None) -> AsyncIterator[Running]:
        """Start a program to talk to. `on_turn` hears that it waits for no others any more."""
        _check(program, self._config)
        async with self._turn():
            on_turn()
            place = await self._idle.get()
            try:
                running = await self._start(place, program)
                try:
                    yield running
                finally:
                    running.close()
                    await _finished(place.clear())
            finally:
                self._idle.put_nowait(place)

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        await self._turns.acquire()
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            self._turns.release()

    async def _start(self, place: SandboxSlot, program: Program) -> RunningProgram:
        limits = program.limits
        disk_mib = limits.disk_mib if self._launch.isolated else self._launch.disk_mib
        handles = await place.offered(disk_mib=disk_mib, fresh=program.fresh)
        try:
            place.limit(memory_mib=limits.memory_mib, processes=limits.processes)
        except OSError as error:
            close_all(handles)
            await place.stop()
            raise InfrastructureError(f"cannot limit a sandbox: {error}") from error
        return RunningProgram(
            place=place,
            program=program,
            handles=handles,
            interpreters=self._interpreters,
            environment=self._environment,
            counts_processes=self._launch.isolated,
        )

    async def _stop(self) -> None:
        await _finished(_stop_all(self._places))


async def _stop_all(places: tuple[SandboxSlot, ...]) -> None:
    async with asyncio.TaskGroup() as group:
        for place in places:
            group.create_task(place.stop())


async def _finished(work: Coroutine[object, object, None]) -> None:
    """Wait for clean-up to its end, also when the waiting task is cancelled; it is bounded by deadlines of its own."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


def check_language(name: str, config: ExecutionConfig) -> None:
    """Raises UserError for a language that the operator does not list."""
    known = ["python", *(given.name for given in config.interpreters)]
    if name not in known:
        raise UserError(f"no interpreter is named {name!r} (execution.interpreters); there are: {', '.join(known)}")


def check_limits(limits: RunLimits, config: ExecutionConfig) -> None:
    """Raises UserError for limits above the operator's maxima."""
    for name, got, most in (
        ("wall_s", limits.wall_s, config.max_wall_s),
        ("cpu_s", limits.cpu_s, config.max_cpu_s),
        ("memory_mib", limits.memory_mib, config.max_memory_mib),
        ("processes", limits.processes, config.max_processes),
        ("output_bytes", limits.output_bytes, config.max_output_bytes),
        ("disk_mib", limits.disk_mib, config.max_disk_mib),
    ):
        if not 0 < got <= most:
            raise UserError(
                f"limit {name}: got {got:g}, expected more than 0 and at most {most:g} (execution.max_{name})"
            )


def check_files(files: Mapping[str, bytes], limits: RunLimits) -> None:
    """Raises UserError for files that cannot be put into a sandbox."""
    if len(files) > _MAX_FILES:
        raise UserError(f"{len(files)} files: a program may bring {_MAX_FILES}")
    if sum(map(len, files.values())) > limits.disk_mib << 20:
        raise UserError(f"the program's files are larger than its disk of {limits.disk_mib} MiB (limit disk_mib)")
    folders = {str(parent) for name in files for parent in PurePosixPath(name).parents}
    for name in files:
        path = PurePosixPath(name)
        if str(path) in folders:
            raise UserError(f"{name!r} is a file and a folder with files in it")
        if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name or name.endswith("/"):
            raise UserError(f"the name of a file must be a relative path without '..', got {name!r}")


def _check(program: Program, config: ExecutionConfig) -> None:
    """Raises UserError for a program that is not taken."""
    check_limits(program.limits, config)
    check_files(program.files, program.limits)
    if not program.argv or not program.argv[0] or any("\0" in part for part in program.argv):
        raise UserError("a program needs a command line, without null characters")
    for name, value in program.environment.items():
        if not name or "=" in name or "\0" in name + value:
            raise UserError(f"an environment variable cannot be named {name!r}, or has a null character in its value")


@dataclass(frozen=True, kw_only=True)
class Sandboxes:
    """Pools of sandboxes, for programs and for sessions, each with places of its own."""

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
    await asyncio.to_thread(end_orphans, FIRST_MODULE)
    first = config.first_uid if kind == "required" and os.geteuid() == 0 else None
    async with AsyncExitStack() as stack:
        opened = unsafe_launch(config) if kind == "unsafe" else bubblewrap_launch(config, uid=first)
        # It copies files and starts processes, for a second or so.
        try:
            launch, environment = await asyncio.to_thread(stack.enter_context, opened)
            parents = stack.enter_context(open_parents(config.cgroup, of="execution"))
        except CannotIsolate as error:
            raise UserError(str(error)) from error

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
    usual = RunLimits()
    limits = RunLimits(
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
        raise UserError(f"programs cannot be isolated here: {error}. {remedies(WITHOUT)}") from error
    problem = ended.stdout.decode(errors="replace").strip() or (None if ended.exit_code == 0 else _account(ended))
    if problem is not None:
        raise UserError(f"the sandbox does not hold here: {'; '.join(problem.splitlines())}. {remedies(WITHOUT)}")


def _account(ended: RunEnd) -> str:
    how = "was too slow" if ended.timed_out else f"ended with code {ended.exit_code}, signal {ended.signal}"
    return f"a first program {how}: {ended.stderr.decode(errors='replace').strip()[-1000:]}"


@contextmanager
def _listening() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield int(server.getsockname()[1])


def _for_sessions(config: ExecutionConfig) -> ExecutionConfig:
    """The maxima for the sandboxes that sessions live in."""
    more = {
        "max_wall_s": config.session_s,
        "max_cpu_s": config.session_s,
        "max_output_bytes": config.max_output_bytes * SESSION_LINE_FACTOR,
    }
    return config.model_copy(update=more)
