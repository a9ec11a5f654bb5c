"""A runtime that is a container, on the service's side.

    create ─▶ hold its stdin ─▶ start ─▶ files ─▶ { exec, copy, snapshot } ─▶ remove
                 └ its first process reads there what is to be killed, and ends when that ends, as with this service

The first process belongs to whoever is inside, and is told no secret. A container that the engine was asked to kill or
remove, and every silence of the engine, is nobody's fault here. Whoever is inside has a say in how the first process
ends, and no exit code alone tells of anything: any other end was one from inside, or for want of memory.
"""

import asyncio
import json
import logging
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TypeVar

from env_service.runtimes.archives import ArchiveFault
from env_service.runtimes.asking import bounds, check_command
from env_service.runtimes.config import RuntimeLimits
from env_service.runtimes.engine_api import EngineApi, EngineError, EngineRefused, EngineStream, EngineUnreachable
from env_service.runtimes.engine_commands import (
    KILLED,
    DoesNotEnd,
    DoesNotStart,
    EndedCommand,
    run_command,
    wrapped,
)
from env_service.runtimes.engine_files import NAMES, ContainerFiles, checked_path, removed
from env_service.runtimes.interface import (
    CommandEnd,
    RuntimeCommand,
    RuntimeEnded,
    RuntimeLost,
    RuntimeRefused,
    RuntimeSnapshot,
)
from env_service.runtimes.kinds import Ended
from env_service.runtimes.standing import StandingRuntime
from env_service.runtimes.tree import FOLDER, TooLarge, TreeEntry

T = TypeVar("T")

logger = logging.getLogger(__name__)

FIRST = (
    "trap '' INT QUIT TERM HUP; exec >/dev/null 2>&1; while read -r it; do "
    'case $it in all) kill -s KILL -- -1;; ?*) kill -s KILL -- "-$it";; esac; jobs; done'
)
"""Kills groups of processes as it is told, and takes in orphans that have ended whenever it is told anything."""

FIRST_FOLDERS = ("work", "home/agent")
_MOST_COMMAND = (1 << 17) - 4096
_ALL = "all"
_NOTHING = RuntimeCommand(argv=("/bin/sh", "-c", ":"), cwd="/")
_REMOVE = 'rm -rf -- "$@" 2>/dev/null; for each; do if [ -e "$each" ] || [ -L "$each" ]; then exit 1; fi; done'
_PATHS_AT_ONCE = 200
_MAX_COUNT = 16
_START_S = 90.0
# An engine tells of a kill beside the end of what was killed.
_TOLD_OF_MEMORY_S = 0.3
_TOLD_OF_KILL_S = 3.0
# Podman tells of no kill for want of memory: the kernel counts them, under one of these names.
_COUNT_KILLS = RuntimeCommand(
    argv=(
        "/bin/sh", "-c",
        "cd /sys/fs/cgroup; for each in memory.events memory/memory.oom_control; do [ ! -r $each ] || "
        'while read -r name count; do [ $name != oom_kill ] || echo "$count"; done <$each; done',
    ),
    cwd="/",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ContainerLaunch:
    """Everything that all containers of a service have in common. `left` is told of one that could not be removed."""

    api: EngineApi
    limits: RuntimeLimits
    user: int
    group: int
    left: Callable[[str], None]


class EngineRuntime(StandingRuntime):
    """A runtime that is a container."""

    def __init__(self, launch: ContainerLaunch, image: str, *, name: str, ended: Ended) -> None:
        super().__init__(image, lifetime_s=launch.limits.lifetime_s, ended=ended)
        self.container = ""
        """The engine's id of it."""
        self._launch = launch
        self._name = name
        self._stack = AsyncExitStack()
        self._stdin: EngineStream | None = None
        self._watching: asyncio.Task[None] | None = None
        # A user who is not root cannot have changed them; who writes files by way of the service can.
        self._of_the_engine = NAMES if launch.api.is_podman and launch.user else frozenset()
        self._memory_kills = self._memory_kills_told = 0
        self._told = asyncio.Event()
        self._killed = asyncio.Event()

    async def start(self, settings: Mapping[str, object], snapshot: RuntimeSnapshot | None = None) -> None:
        """Return when it stands. Raises RuntimeLost."""
        api = self._launch.api
        try:
            async with asyncio.timeout(_START_S):
                await self._create(settings)
                self._stdin = await self._stack.enter_async_context(api.attach_stdin(self.container))
                await api.start(self.container)
                self._watching = asyncio.ensure_future(self._watch())
                if snapshot is None:
                    entries = [TreeEntry(FOLDER, path, 0o755, b"") for path in FIRST_FOLDERS]
                    await self._files.lay(entries)
                else:
                    await self._restore([TreeEntry(*entry) for entry in snapshot.entries])
        except BaseException as error:
            await self.stop()
            if isinstance(error, EngineError | TimeoutError | RuntimeRefused | RuntimeEnded):
                why = error if str(error) else "the engine takes too long"
                raise RuntimeLost(f"a runtime of image {self.image} cannot be started: {why}") from error
            raise

    async def _create(self, settings: Mapping[str, object]) -> None:
        """Make its container, which is to be removed from the moment on that the engine is asked for it."""
        creating = asyncio.ensure_future(self._launch.api.create(self._name, settings))
        try:
            self.container = await asyncio.shield(creating)
        except asyncio.CancelledError:
            with suppress(EngineError):
                self.container = await creating  # the engine makes it all the same
            raise
        except EngineUnreachable:
            self._launch.left(self._name)  # it may have made it
            raise

    def count_kill(self, *, for_memory: bool) -> None:
        """Something in it was killed since there was no memory, or it was by way of the engine."""
        if for_memory:
            self._memory_kills += 1
            self._told.set()
        else:
            self._killed.set()

    async def exec(self, command: RuntimeCommand) -> CommandEnd:
        """Run a command to its end."""
        check_command(command, length=len(json.dumps(wrapped(command))), most=_MOST_COMMAND)
        wall_s, output_bytes = bounds(command, self._launch.limits)
        async with self._asked():
            ended = await self._run(command, user=self._user, wall_s=wall_s, output_bytes=output_bytes)
            await self._check_it_goes_on(ended)
        starved = await self._was_starved(ended)
        self._order("")  # orphans that have ended are taken in
        by_signal = ended.timed_out or (starved and ended.exit_code == KILLED)
        return CommandEnd(
            exit_code=None if by_signal else ended.exit_code,
            signal=int(signal.SIGKILL) if by_signal else None,
            stdout=bytes(ended.output.stdout),
            stderr=bytes(ended.output.stderr),
            cut=ended.output.cut,
            timed_out=ended.timed_out,
            starved=starved,
            wall_s=ended.wall_s,
        )

    async def _write(self, entries: Sequence[TreeEntry]) -> None:
        for entry in entries:
            checked_path(entry.path)
        self._of_the_engine -= {entry.path.strip("/") for entry in entries}
        await self._done(lambda: self._files.write(entries), "files cannot be written")

    async def _read(self, path: str, *, most: int) -> list[TreeEntry]:
        shown = path.encode(errors="replace").decode()
        return await self._done(lambda: self._files.read(checked_path(path), most=most), f"{shown} cannot be read")

    async def _differing(self) -> list[TreeEntry]:
        return await self._done(self._files.differing, "no snapshot can be taken")

    @property
    def _user(self) -> str:
        return f"{self._launch.user}:{self._launch.group}"

    @property
    def _files(self) -> ContainerFiles:
        launch = self._launch
        return ContainerFiles(
            api=launch.api,
            container=self.container,
            user=launch.user,
            group=launch.group,
            disk_bytes=launch.limits.disk_mib << 20,
            of_the_engine=self._of_the_engine,
        )

    async def _run(self, command: RuntimeCommand, *, user: str, wall_s: float, output_bytes: int) -> EndedCommand:
        """A command, which has room made for it if what is inside leaves none. Raises EngineError."""
        for last in (False, True):
            try:
                return await run_command(
                    self._launch.api,
                    self.container,
                    command,
                    user=user,
                    wall_s=wall_s,
                    output_bytes=output_bytes,
                    kill=self._order,
                )
            except DoesNotEnd as error:
                if await self._has_ended_unheard(error.pid):
                    self._lose(RuntimeLost(f"a runtime of image {self.image} is given up: its engine lost a command"))
                else:
                    self.end(str(error))
            except DoesNotStart as error:
                await self._check_running()
                if last and error.inside:
                    self.end(f"no command can be started in it any more: {error}")
                elif last:
                    self._lose(RuntimeLost(f"a runtime of image {self.image} is given up: {error}"))
                else:
                    self._order(_ALL)  # processes that fill its limit, say
                    await asyncio.sleep(_TOLD_OF_MEMORY_S)
            self._raise_lost()
        raise AssertionError

    async def _has_ended_unheard(self, pid: int) -> bool:
        """True if the engine has no such process although it takes it for one, as after the death of its containerd."""
        api = self._launch.api
        if api.is_podman or not pid:  # whose numbers are others
            return False
        try:
            return pid not in await api.processes(self.container)
        except EngineRefused as error:
            logger.warning("processes of the runtime %s are not known: %s", self._name, error)
            return False

    async def _check_it_goes_on(self, ended: EndedCommand) -> None:
        """Raises if a command was killed with all of it, of which the engine may not tell yet."""
        if ended.exit_code == KILLED and not ended.timed_out:
            look = _COUNT_KILLS if self._launch.api.is_podman else _NOTHING
            looked = await self._run(look, user=self._user, wall_s=_START_S, output_bytes=_MAX_COUNT)
            if (count := bytes(looked.output.stdout).strip()).isdigit():
                self._memory_kills = max(self._memory_kills, int(count))
        elif ended.exit_code != 0:
            await self._check_running()

    async def _check_running(self) -> None:
        if not (await self._launch.api.state(self.container)).Running and self._watching is not None:
            await asyncio.wait((self._watching,), timeout=_START_S)
        self._raise_lost()

    async def _was_starved(self, ended: EndedCommand) -> bool:
        self._told.clear()
        if ended.exit_code == KILLED and self._memory_kills == self._memory_kills_told:
            with suppress(TimeoutError):
                async with asyncio.timeout(_TOLD_OF_MEMORY_S):
                    await self._told.wait()
        starved, self._memory_kills_told = self._memory_kills > self._memory_kills_told, self._memory_kills
        return starved

    async def _restore(self, entries: Sequence[TreeEntry]) -> None:
        self._of_the_engine -= {entry.path for entry in entries}
        gone = removed(entries)
        for at in range(0, len(gone), _PATHS_AT_ONCE):
            paths = gone[at : at + _PATHS_AT_ONCE]
            line = RuntimeCommand(argv=("/bin/sh", "-c", _REMOVE, "sh", *paths), cwd="/")
            # By whom the image gave them to: without capabilities, root is above nobody.
            for user in (self._user, "0:0"):
                ended = await self._run(line, user=user, wall_s=_START_S, output_bytes=1024)
                if ended.exit_code == 0:
                    break
            else:
                raise RuntimeRefused(f"what a snapshot lacks cannot be removed: {ended.output.stderr.decode()}")
        await self._files.restore(entries)

    async def _watch(self) -> None:
        """Lose it when its first process ends, and say why."""
        try:
            code = await self._launch.api.wait(self.container)
            state = await self._launch.api.state(self.container)
        except EngineError as error:
            self._lose(RuntimeLost(f"a runtime of image {self.image} is gone: {error}"))
            return
        if code == KILLED and state.OOMKilled and await self._has_starved():
            self._lose(RuntimeEnded("it had no memory left"))
        elif state.Error or (code == KILLED and await self._was_killed()):
            why = state.Error or "its container was killed or removed"
            self._lose(RuntimeLost(f"a runtime of image {self.image} is gone: {why}"))
        else:
            self._lose(RuntimeEnded("it was ended from inside"))

    async def _was_killed(self) -> bool:
        """True if the engine was asked to kill it, or to remove it: then Podman tells of no kill. Also if the engine
        cannot say.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(_TOLD_OF_KILL_S):
                await self._killed.wait()
        if self._killed.is_set():
            return True
        try:
            await self._launch.api.state(self.container)
        except EngineError:
            return True
        return False

    async def _has_starved(self) -> bool:
        """True if a kill for want of memory was the end of it; the engine says so of any that there ever was."""
        await asyncio.sleep(_TOLD_OF_MEMORY_S)
        return self._memory_kills == 0 or self._memory_kills > self._memory_kills_told

    async def _done(self, work: Callable[[], Awaitable[T]], what: str) -> T:
        async with self._asked():
            try:
                return await work()
            except EngineRefused as error:
                await self._check_running()
                raise RuntimeRefused(f"{what}: {error.message}") from error
            except TooLarge as error:
                raise RuntimeRefused(f"{what}: {error.strerror}") from error
            except (ArchiveFault, RuntimeRefused) as error:
                raise RuntimeRefused(f"{what}: {error}") from error

    @asynccontextmanager
    async def _asked(self) -> AsyncIterator[None]:
        """Raises RuntimeLost or RuntimeEnded of one that is no longer there."""
        self._raise_lost()
        try:
            yield
        except EngineError as error:
            if isinstance(error, EngineRefused):
                with suppress(EngineError):
                    await self._check_running()
            self._lose(RuntimeLost(f"a runtime of image {self.image} is gone: {error}"))
            assert self._lost is not None
            raise self._lost from error

    def _order(self, what: str) -> None:
        """Tell its first process what to kill."""
        if self._stdin is not None:
            self._stdin.send(f"{what}\n".encode())

    async def _end_all(self) -> None:
        if self.container:
            try:
                await self._launch.api.remove(self.container)
            except EngineError as error:
                logger.warning("the runtime %s is not removed yet: %s", self._name, error)
                self._launch.left(self.container)
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        await self._stack.aclose()
