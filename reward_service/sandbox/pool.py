"""Sandboxes: a number of places, each with a sandbox that waits for its program and is used for that one alone."""

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import PurePosixPath
from types import TracebackType
from typing import Self

from reward_service.sandbox.cgroups import Parents
from reward_service.sandbox.slot import Launch, Place, RunningProgram
from reward_service.sandbox.streams import close_all
from reward_service.verifier.program import Ended, ExecutionConfig, Limits, Program, Running
from reward_service.verifier.submission import InfrastructureError, UserError

logger = logging.getLogger(__name__)

_MOST_FILES = 1024


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
            Place(launch=launch, name=f"place-{number}", uid=users.of(number), parents=parents)
            for number in range(first_place, first_place + size + spare)
        )
        # First in, first out: the longer a place has been idle, the surer its sandbox stands.
        self._idle = asyncio.Queue[Place](maxsize=size + spare)
        for place in self._places:
            self._idle.put_nowait(place)
        self._waiting = self._running = 0

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

    @property
    def waiting(self) -> int:
        """Programs that wait for a place."""
        return self._waiting

    async def run(self, program: Program) -> Ended:
        """Run a program to its end."""
        async with self.open(program) as running:
            return await running.ended()

    @asynccontextmanager
    async def open(self, program: Program) -> AsyncIterator[Running]:
        """Start a program to talk to."""
        _check(program, self._config)
        async with self._turn():
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
        self._waiting += 1
        try:
            await self._turns.acquire()
        finally:
            self._waiting -= 1
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            self._turns.release()

    async def _start(self, place: Place, program: Program) -> RunningProgram:
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


async def _stop_all(places: tuple[Place, ...]) -> None:
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


def check_limits(limits: Limits, config: ExecutionConfig) -> None:
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


def check_files(files: Mapping[str, bytes], limits: Limits) -> None:
    """Raises UserError for files that cannot be put into a sandbox."""
    if len(files) > _MOST_FILES:
        raise UserError(f"{len(files)} files: a program may bring {_MOST_FILES}")
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
