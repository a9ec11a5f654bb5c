"""Runtimes by bubblewrap, on the service's side: how one is launched, and the one that stands behind its keeper."""

import asyncio
import itertools
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from env_service.runtimes import forge, keeper
from env_service.runtimes.asking import bounds, check_command
from env_service.runtimes.config import RuntimeLimits
from env_service.runtimes.images import AGENT, Image
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
from env_service.runtimes.tree import TreeEntry, packed, unpacked
from services.isolation.bubblewrap import DEVICES, namespaces, reaches
from services.isolation.cgroups import ControlGroup, Parents
from services.isolation.keeping import close_all, received, start_of
from services.isolation.streams import PipeReader, PipeWriter
from services.process import seal_descriptors

T = TypeVar("T")
Answer = tuple[dict[str, object], list[int]]

logger = logging.getLogger(__name__)

SIGN = "headway-runtime"
"""Among the arguments of a runtime's first process, by which those of a killed service are found."""

# Signals from inside do not end it, and each death among its children, which are orphans, wakes it: `jobs` takes in all
# of them, without a process of its own.
_FIRST = f"echo stands; exec >/dev/null 2>&1; trap : CHLD; while :; do read it; jobs; done # {SIGN}"
_START_S = 90.0
_STOP_S = 20.0
_ANSWER_S = 60.0
# A process that a command has left may hold its output open.
_LAST_OUTPUT_S = 0.2
_TRIES = 1000
_MOST_COMMAND = keeper.MOST_MESSAGE - 4096
# Keeper, bubblewrap, the first process; and the keeper's memory.
_OWN_PROCESSES = 4
_OWN_MEMORY = 32 << 20


@dataclass(frozen=True, kw_only=True)
class RuntimeLaunch:
    """Everything that all runtimes of a service have in common. `uid`: the user they drop to, or None."""

    forge: "KeeperForge"
    bubblewrap: str
    filter: bytes
    staging: Path
    mark: str
    uid: int | None
    parents: Parents | None
    limits: RuntimeLimits


@dataclass(frozen=True, kw_only=True)
class RuntimeWalls:
    """The command and options of bubblewrap for an image, and the folders that its keeper has to bind for that."""

    command: Sequence[str]
    options: Sequence[str]
    mounts: Sequence[tuple[str, str]]


def build_runtime_walls(launch: RuntimeLaunch, image: Image) -> RuntimeWalls:
    """The walls of an image's runtimes."""
    mounts: list[tuple[str, str]] = []

    def seen(folder: Path) -> str:
        if reaches(folder, uid=launch.uid):
            return str(folder)
        place = launch.staging / f"mount-{folder.as_posix().strip('/').replace('/', '-')}"
        place.mkdir(exist_ok=True)
        mounts.append((str(folder), str(place)))
        return str(place)

    place = launch.staging / "disk"
    place.mkdir(exist_ok=True)
    options = [*namespaces(user=str(AGENT)), "--as-pid-1", "--overlay-src", seen(image.root)]
    options += ["--overlay", f"{place}/upper", f"{place}/work", "/"]
    for inside, folder in image.bound.items():
        options += ["--ro-bind", seen(folder), inside]
    options += ["--proc", "/proc", *_devices(), "--hostname", "runtime"]
    options += ["--info-fd", str(keeper.INFO), "--seccomp", str(keeper.FILTER), "--chdir", "/", "--clearenv"]
    command = [launch.bubblewrap, "--args", str(keeper.OPTIONS), "--", "/bin/sh", "-c", _FIRST, launch.mark]
    return RuntimeWalls(command=command, options=options, mounts=mounts)


def _devices() -> list[str]:
    options = ["--size", "65536", "--tmpfs", "/dev", "--symlink", "/proc/self/fd", "/dev/fd"]
    options += ["--symlink", "/tmp", "/dev/shm"]
    for place, name in enumerate(("stdin", "stdout", "stderr")):
        options += ["--symlink", f"/proc/self/fd/{place}", f"/dev/{name}"]
    for name in DEVICES:
        options += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    return [*options, "--remount-ro", "/dev"]


class KeeperForge:
    """The process that forks keepers, started with the first one, and again if it has died."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._control: socket.socket | None = None
        self._starting = asyncio.Lock()

    async def fork(self, settings: keeper.RuntimeKeeperSettings, handles: Sequence[int]) -> None:
        """Have a keeper forked, to which copies of the descriptors go. Raises OSError."""
        message = json.dumps(settings._asdict()).encode()
        async with self._starting:
            if self._process is None or self._process.returncode is not None:
                await self._start()
            for _ in range(_TRIES):
                assert self._control is not None
                try:
                    socket.send_fds(self._control, [message], list(handles))
                except BlockingIOError:  # many at once
                    await asyncio.sleep(0.005)
                except OSError:  # it has died
                    await self._start()
                else:
                    return
            raise OSError("the process that forks keepers takes no more")

    async def stop(self) -> None:
        """End it, and what keepers there are."""
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            await self._process.wait()

    async def _start(self) -> None:
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        if self._control is not None:
            self._control.close()
        self._control = ours
        with its:
            seal_descriptors()
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, *start_of(forge.__name__), str(os.getpid()), str(its.fileno()),
                pass_fds=(its.fileno(),), stdin=asyncio.subprocess.DEVNULL, env={},
            )  # fmt: skip


class BubblewrapRuntime(StandingRuntime):
    """A runtime that stands behind its keeper."""

    def __init__(self, launch: RuntimeLaunch, image: Image, *, name: str, ended: Ended) -> None:
        super().__init__(image.name, lifetime_s=launch.limits.lifetime_s, ended=ended)
        self._launch = launch
        self._image = image
        self._name = name
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Future[Answer]] = {}
        self._keeper: int | None = None
        self._over = asyncio.Event()
        self._control: socket.socket | None = None
        self._group: ControlGroup | None = None
        self._memory_kills = 0
        self._ready: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def start(self, walls: RuntimeWalls, snapshot: RuntimeSnapshot | None = None) -> None:
        """Return when it stands. Raises RuntimeLost."""
        limits = self._launch.limits
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        given = [its.detach()]
        try:
            if snapshot is not None:
                given.append(packed([TreeEntry(*entry) for entry in snapshot.entries]))
            if self._launch.parents is not None:
                self._group = ControlGroup(self._launch.parents, name=self._name)
                memory = ((limits.memory_mib + limits.disk_mib) << 20) + _OWN_MEMORY
                self._group.limit(memory_bytes=memory, processes=limits.processes + _OWN_PROCESSES)
                self._memory_kills = self._group.memory_kills()
            self._control = ours
            asyncio.get_running_loop().add_reader(ours, self._hear)
            async with asyncio.timeout(_START_S):
                await self._launch.forge.fork(self._settings(walls), given)
                self._keeper = await asyncio.shield(self._ready)
        except BaseException as error:
            close_all(given)  # while its end is held here, that of a keeper that never was is not heard of
            given.clear()
            await self.stop()
            if isinstance(error, OSError | TimeoutError):
                why = error or "it hangs"
                raise RuntimeLost(f"a runtime of image {self.image} cannot be started: {why}") from error
            raise
        finally:
            close_all(given)

    def _settings(self, walls: RuntimeWalls) -> keeper.RuntimeKeeperSettings:
        limits = self._launch.limits
        return keeper.RuntimeKeeperSettings(
            parent=0,
            uid=self._launch.uid,
            cgroups=[] if self._group is None else self._group.processes_files,
            mounts=list(walls.mounts),
            place=str(self._launch.staging / "disk"),
            disk_bytes=limits.disk_mib << 20,
            disk_files=limits.files,
            watch_bytes=0 if self._group is not None else limits.memory_mib << 20,
            command=list(walls.command),
            options=list(walls.options),
            filter=self._launch.filter.hex(),
        )

    async def exec(self, command: RuntimeCommand) -> CommandEnd:
        """Run a command to its end."""
        limits = self._launch.limits
        message: dict[str, object] = {
            "do": "exec",
            "argv": list(command.argv),
            "cwd": command.cwd,
            "environment": {**self._image.environment, **command.environment},
            "limits": {
                "memory_bytes": limits.memory_mib << 20,
                "file_bytes": limits.disk_mib << 20,
                "open_files": limits.open_files,
                "processes": limits.processes + 1,
                "cpu_s": limits.cpu_s,
            },
        }
        check_command(command, length=len(json.dumps(message)), most=_MOST_COMMAND)
        wall_s, output_bytes = bounds(command, limits)
        async with _streams(command, most=output_bytes, last=command.trusted) as (streams, handles):
            started = time.monotonic()
            number, answer = self._ask(message, handles)
            close_all(handles)
            handles.clear()
            timed_out = False
            try:
                async with asyncio.timeout(wall_s):
                    told, _ = await asyncio.shield(answer)
            except TimeoutError:
                timed_out = True
                told, _ = await self._killed(number, answer)
            except asyncio.CancelledError:
                self._say({"do": "kill", "id": number})
                raise
            took_s = time.monotonic() - started
            stdout, stderr = await streams.ended()
            return self._end(told, stdout, stderr, cut=streams.cut, timed_out=timed_out, wall_s=took_s)

    async def _killed(self, number: int, answer: asyncio.Future[Answer]) -> Answer:
        limit = time.monotonic() + _STOP_S
        while True:
            self._say({"do": "kill", "id": number})  # again: it may not have had a group of its own before
            done, _ = await asyncio.wait([answer], timeout=0.5)
            if done:
                return answer.result()
            if time.monotonic() > limit:
                raise self._gone("a command of it does not end")

    def _end(
        self, told: dict[str, object], stdout: bytes, stderr: bytes, *, cut: bool, timed_out: bool, wall_s: float
    ) -> CommandEnd:
        if failed := told.get("error") or told["failed"]:
            raise self._gone(f"it cannot be entered: {failed}")
        code = os.waitstatus_to_exitcode(int(str(told["status"])))
        starved = bool(told["starved"])
        if self._group is not None:
            kills = self._group.memory_kills()
            starved, self._memory_kills = kills > self._memory_kills, kills
        return CommandEnd(
            exit_code=code if code >= 0 and not timed_out else None,
            signal=int(signal.SIGKILL) if timed_out else -code if code < 0 else None,
            stdout=stdout,
            stderr=stderr,
            cut=cut,
            timed_out=timed_out,
            starved=starved,
            wall_s=wall_s,
            cpu_s=float(str(told["cpu_s"])),
        )

    async def _write(self, entries: Sequence[TreeEntry]) -> None:
        handle = packed(entries)
        try:
            _, answer = self._ask({"do": "write"}, [handle])
        finally:
            os.close(handle)
        await self._told(answer, "files cannot be written")

    async def _read(self, path: str, *, most: int) -> list[TreeEntry]:
        _, answer = self._ask({"do": "read", "path": path, "most": most}, [])
        return await self._told(answer, f"{path} cannot be read")

    async def _differing(self) -> list[TreeEntry]:
        _, answer = self._ask({"do": "snapshot"}, [])
        return await self._told(answer, "no snapshot can be taken")

    async def listen(self) -> socket.socket:
        """A socket that listens on its loopback."""
        _, answer = self._ask({"do": "listen"}, [])
        try:
            (handle,) = await self._answered(answer, "nobody can listen in it")
        except (RuntimeRefused, ValueError) as error:
            raise self._gone(str(error)) from error
        return socket.socket(fileno=handle)

    async def _end_all(self) -> None:
        if self._control is not None:
            with suppress(OSError):  # it has gone by itself; its keeper ends with that, and all of it
                self._control.shutdown(socket.SHUT_WR)
            try:
                async with asyncio.timeout(_STOP_S):
                    await self._over.wait()
            except TimeoutError:
                logger.error("the keeper of the runtime %s does not stop and is killed", self._name)
                if self._keeper is not None:
                    with suppress(ProcessLookupError):
                        os.kill(self._keeper, signal.SIGKILL)
            self._close_control()
        if self._group is not None:
            await asyncio.to_thread(self._group.remove)

    async def _told(self, answer: asyncio.Future[Answer], what: str) -> list[TreeEntry]:
        handles = await self._answered(answer, what)
        return await asyncio.to_thread(unpacked, handles[0]) if handles else []

    async def _answered(self, answer: asyncio.Future[Answer], what: str) -> list[int]:
        """The descriptors that come with an answer, which are the caller's. Raises RuntimeRefused."""
        try:
            async with asyncio.timeout(_ANSWER_S):
                told, handles = await asyncio.shield(answer)
        except TimeoutError:
            raise self._gone("its keeper does not answer") from None
        except asyncio.CancelledError:
            answer.add_done_callback(_close_unread)
            raise
        if "error" in told:
            close_all(handles)
            raise RuntimeRefused(f"{what}: {told['error']}")
        return handles

    def _ask(self, message: dict[str, object], handles: Sequence[int]) -> tuple[int, asyncio.Future[Answer]]:
        """Raises RuntimeLost or RuntimeEnded if it is no longer there."""
        self._raise_lost()
        number = next(self._numbers)
        self._answers[number] = answer = asyncio.get_running_loop().create_future()
        self._say({**message, "id": number}, handles)
        return number, answer

    def _say(self, message: dict[str, object], handles: Sequence[int] = ()) -> None:
        if self._control is not None:
            try:
                socket.send_fds(self._control, [json.dumps(message).encode()], list(handles))
            except BlockingIOError:
                self._lose(RuntimeLost(f"the keeper of a runtime of image {self.image} hangs"))
            except OSError:
                pass  # a keeper that is gone is heard of

    def _hear(self) -> None:
        assert self._control is not None
        try:
            message, handles = received(self._control, most_bytes=1 << 16, most_handles=1)
        except BlockingIOError:
            return
        except OSError:
            message, handles = b"", []
        told = json.loads(message) if message else {}
        if "ready" in told:
            if not self._ready.done():
                self._ready.set_result(int(told["ready"]))
        elif "id" in told:
            answer = self._answers.pop(told["id"], None)
            if answer is None or answer.done():
                close_all(handles)
            else:
                answer.set_result((told, handles))
        else:
            if not message:  # the keeper has ended, and all of it before
                self._close_control()
            self._lose(self._reason(told))

    def _reason(self, told: Mapping[str, object]) -> Exception:
        starved = self._group is not None and self._group.memory_kills() > self._memory_kills
        if told.get("inside") or starved:
            return RuntimeEnded("it had no memory left" if starved else "it was ended from inside")
        why = told.get("failed") or told.get("lost") or "its keeper has died"
        return RuntimeLost(f"a runtime of image {self.image} is gone: {why}")

    def _gone(self, why: str) -> RuntimeLost:
        lost = RuntimeLost(f"a runtime of image {self.image} is given up: {why}")
        self._lose(lost)
        self._end_soon()
        return lost

    def _close_control(self) -> None:
        self._over.set()
        control, self._control = self._control, None
        if control is not None:
            asyncio.get_running_loop().remove_reader(control)
            control.close()

    def _lose(self, reason: Exception) -> None:
        super()._lose(reason)
        assert self._lost is not None
        _refuse(self._ready, self._lost)
        for answer in self._answers.values():
            _refuse(answer, self._lost)
        self._answers.clear()


def _refuse(future: asyncio.Future[T], reason: Exception) -> None:
    if not future.done():
        future.set_exception(reason)
        future.exception()  # it may be nobody's concern


class _Streams:
    """The service's ends of a command's pipes."""

    def __init__(self, stdin: int, stdout: int, stderr: int, *, fed: bytes, most: int, last: bool) -> None:
        self._stdin = PipeWriter(stdin)
        self._stdout = PipeReader(stdout, most=most, drain=True, last=last)
        self._stderr = PipeReader(stderr, most=most, drain=True, last=last)
        self._stdin.send(fed)
        self._stdin.finish()

    @property
    def cut(self) -> bool:
        """True if there was more output than is kept."""
        return self._stdout.cut or self._stderr.cut

    async def ended(self) -> tuple[bytes, bytes]:
        """Output of a command that has ended."""
        both = asyncio.gather(self._stdout.ended(), self._stderr.ended())
        try:
            async with asyncio.timeout(_LAST_OUTPUT_S):
                return await asyncio.shield(both)
        except TimeoutError:
            self.close()
            return await both

    def close(self) -> None:
        """Close them."""
        for stream in (self._stdin, self._stdout, self._stderr):
            stream.close()


@asynccontextmanager
async def _streams(command: RuntimeCommand, *, most: int, last: bool) -> AsyncIterator[tuple[_Streams, list[int]]]:
    """Pipes, and the command's ends of them, which are the caller's."""
    ends = [os.pipe() for _ in range(3)]
    (stdin, feed), (stdout, out), (stderr, err) = ends
    streams = _Streams(feed, stdout, stderr, fed=command.stdin, most=most, last=last)
    handles = [stdin, out, err]
    try:
        yield streams, handles
    finally:
        streams.close()
        close_all(handles)


def _close_unread(answer: asyncio.Future[Answer]) -> None:
    """Of an answer for which nobody waits any more."""
    if not answer.cancelled() and answer.exception() is None:
        _, handles = answer.result()
        close_all(handles)
