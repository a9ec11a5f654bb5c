"""A runtime that is a pod, on the service's side.

    create ─▶ it runs ─▶ hold its stdin ─▶ list its files ─▶ { exec, copy, snapshot } ─▶ delete
                            └ its first process reads there what is to be killed, and ends when that ends

A pod that was evicted for others' sake or deleted, whose stdin broke, and every silence of the API server, is nobody's
fault here: so the cluster says, or the connection. Whoever is inside has a say in how its first process ends, and no
exit code alone tells of anything: any other end was one from inside, for want of memory or of disk and after its time
too.
"""

import asyncio
import io
import json
import logging
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TypeVar

from env_service.runtimes.archives import OVERHEAD, ArchiveFault, pack_archive, unpack_archive
from env_service.runtimes.asking import bounds, check_command
from env_service.runtimes.config import RuntimeLimits
from env_service.runtimes.engine_commands import KILLED, CommandOutput, collected, wrapped
from env_service.runtimes.interface import (
    CommandEnd,
    RuntimeCommand,
    RuntimeEnded,
    RuntimeLost,
    RuntimeRefused,
    RuntimeSnapshot,
)
from env_service.runtimes.kinds import Ended
from env_service.runtimes.kubernetes_api import (
    ANSWER_S,
    ChannelStream,
    ClusterError,
    ClusterRefused,
    ClusterUnreachable,
    KubernetesApi,
    RuntimePod,
)
from env_service.runtimes.kubernetes_files import (
    ABSENT,
    LIST,
    PACK,
    PACK_NAMED,
    UNPACK,
    FileListing,
    ListedFile,
    differing,
    restored,
)
from env_service.runtimes.standing import StandingRuntime
from env_service.runtimes.tree import FOLDER, WHITEOUT, TooLarge, TreeEntry

T = TypeVar("T")

logger = logging.getLogger(__name__)

_STDIN_ENDED = 99
FIRST = (
    "trap '' INT QUIT TERM HUP; mkdir -p /work /home/agent 2>/dev/null; exec >/dev/null 2>&1; while read -r it; do "
    'case $it in all) kill -s KILL -- -1;; ?*) kill -s KILL -- "-$it";; esac; jobs; done; exit 99'
)
"""Kills groups of processes as it is told, and takes in orphans that have ended whenever it is told anything."""

_MOST_COMMAND = 1 << 16
"""A command is in the address of a request."""

_MAX_LISTING = 64 << 20
_MAX_SAID = 4096
_PATHS_AT_ONCE = 100
_FIRST_LOOK_S, _LAST_LOOK_S = 0.05, 2.0
_COPY_S = 120.0
_STOP_S = 20.0
_ENDS_S = 15.0
# A cluster tells of an end later than a connection breaks.
_TOLD_OF_END_S = 1.0
_ALL = "all"
_KILLED_S = 0.3
# Of the answers to a command that cannot be started, that of one that is to blame on what is inside.
_INSIDE = "OCI runtime"
_REMOVE = ("/bin/sh", "-c", 'rm -rf -- "$@"', "sh")


@dataclass(frozen=True, kw_only=True)
class PodLaunch:
    """Everything that all pods of a service have in common. `left` is told of one that could not be deleted."""

    api: KubernetesApi
    limits: RuntimeLimits
    user: int
    group: int
    start_s: float
    left: Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class PodCommandEnd:
    """End of a command in a pod."""

    exit_code: int
    timed_out: bool
    output: CommandOutput
    wall_s: float


class _DoesNotStart(Exception):
    """Raised of a command that the node's runtime could not start."""


class KubernetesRuntime(StandingRuntime):
    """A runtime that is a pod."""

    def __init__(self, launch: PodLaunch, image: str, *, name: str, ended: Ended) -> None:
        super().__init__(image, lifetime_s=launch.limits.lifetime_s, ended=ended)
        self._launch = launch
        self._name = name
        self._stack = AsyncExitStack()
        self._stdin: ChannelStream | None = None
        self._began: FileListing | None = None
        self._watching: asyncio.Task[None] | None = None
        self._orders: set[asyncio.Task[None]] = set()
        self._created = False

    async def start(self, pod: Mapping[str, object], snapshot: RuntimeSnapshot | None = None) -> None:
        """Return when it stands. Raises RuntimeLost."""
        api = self._launch.api
        try:
            async with asyncio.timeout(self._launch.start_s):
                self._created = True  # also if no answer comes
                await api.create(pod)
                await self._runs()
                self._stdin = await self._stack.enter_async_context(api.attach_stdin(self._name))
                self._watching = asyncio.ensure_future(self._watch(self._stdin))
                told = await self._output(LIST, most=_MAX_LISTING, what="its files cannot be listed")
                self._began = await asyncio.to_thread(FileListing, told)
                if snapshot is not None:
                    await self._restore([TreeEntry(*entry) for entry in snapshot.entries])
        except BaseException as error:
            await self.stop()
            if isinstance(error, ClusterError | TimeoutError | RuntimeRefused | RuntimeEnded | TooLarge):
                why = str(error) or f"its pod does not run after {self._launch.start_s:g} s"
                raise RuntimeLost(f"a runtime of image {self.image} cannot be started: {why}") from error
            raise

    async def exec(self, command: RuntimeCommand) -> CommandEnd:
        """Run a command to its end."""
        words = _with_environment(command)
        check_command(command, length=len(json.dumps(words)), most=_MOST_COMMAND)
        wall_s, output_bytes = bounds(command, self._launch.limits)
        async with self._asked():
            ended = await self._run(words, stdin=command.stdin, wall_s=wall_s, most=output_bytes)
            if ended.exit_code == KILLED and not ended.timed_out:
                await self._run(wrapped(RuntimeCommand(argv=("/bin/sh", "-c", ":"), cwd="/")), wall_s=_STOP_S, most=1)
        self._order("")  # orphans that have ended are taken in
        return CommandEnd(
            exit_code=None if ended.timed_out else ended.exit_code,
            signal=int(signal.SIGKILL) if ended.timed_out else None,
            stdout=bytes(ended.output.stdout),
            stderr=bytes(ended.output.stderr),
            cut=ended.output.cut,
            timed_out=ended.timed_out,
            wall_s=ended.wall_s,
        )

    async def _write(self, entries: Sequence[TreeEntry]) -> None:
        if sum(len(entry.content) for entry in entries) > self._launch.limits.disk_mib << 20:
            raise RuntimeRefused("files cannot be written: No space left (env-service.runtimes.limits.disk_mib)")
        await self._done(lambda: self._unpack(entries), "files cannot be written")

    async def _read(self, path: str, *, most: int) -> list[TreeEntry]:
        async def read() -> list[TreeEntry]:
            place = f"/{path.lstrip('/')}"
            if "\0" in path or "\ufffd" in path.encode(errors="replace").decode():
                raise RuntimeRefused("a path in UTF-8 without null characters was expected")
            told = await self._output((*PACK, place), most=most + OVERHEAD, what="")
            entries = await asyncio.to_thread(_unpacked, told, most)
            if not entries:
                raise RuntimeRefused("neither a file nor a folder")
            return entries

        return await self._done(read, f"{path.encode(errors='replace').decode()} cannot be read")

    async def _differing(self) -> list[TreeEntry]:
        return await self._done(self._changes, "no snapshot can be taken")

    async def _runs(self) -> None:
        """Return when its container runs. Raises ClusterRefused."""
        look_s = _FIRST_LOOK_S
        while True:
            status = (await self._launch.api.pod(self._name)).status
            if status.phase == "Running":
                return
            if status.has_ended:
                raise ClusterRefused(0, f"its pod has ended: {status.reason} {status.message}".strip())
            if "Err" in status.waits_for or "Invalid" in status.waits_for or "BackOff" in status.waits_for:
                raise ClusterRefused(0, status.waits_for)
            await asyncio.sleep(look_s)
            look_s = min(2 * look_s, _LAST_LOOK_S)

    async def _run(self, words: Sequence[str], *, wall_s: float, most: int, stdin: bytes = b"") -> PodCommandEnd:
        """A command, which has room made for it if what is inside leaves none. Raises ClusterError, RuntimeEnded."""
        try:
            return await self._run_once(words, wall_s=wall_s, most=most, stdin=stdin)
        except _DoesNotStart:
            self._order(_ALL)
            await asyncio.sleep(_KILLED_S)
        try:
            return await self._run_once(words, wall_s=wall_s, most=most, stdin=stdin)
        except _DoesNotStart as error:
            self.end(f"no command can be started in it any more: {error}")
            raise RuntimeEnded(str(self._lost)) from error

    async def _run_once(self, words: Sequence[str], *, wall_s: float, most: int, stdin: bytes) -> PodCommandEnd:
        output = CommandOutput(most=most)
        opening = self._launch.api.exec(self._name, words, stdin=bool(stdin))
        async with collected(opening, output, kill=self._order) as (stream, collecting):
            if stdin:
                feeding = asyncio.ensure_future(_fed(stream, stdin))
                collecting.add_done_callback(lambda _: feeding.cancel())
            await output.begun(collecting, within_s=ANSWER_S)
            began = time.monotonic()
            await asyncio.wait((collecting,), timeout=wall_s)
            timed_out = not collecting.done()
            if timed_out:
                await self._killed(output, collecting)
            collecting.result()
        took_s = time.monotonic() - began
        if stream.exit_code is None and not timed_out:
            await self._check_running()
            if _INSIDE in stream.failure:
                raise _DoesNotStart(stream.failure)
            raise ClusterUnreachable(f"a command ended without a word: {stream.failure or 'its connection broke'}")
        code = KILLED if stream.exit_code is None else stream.exit_code
        return PodCommandEnd(exit_code=code, timed_out=timed_out, output=output, wall_s=took_s)

    async def _killed(self, output: CommandOutput, collecting: asyncio.Future[None]) -> None:
        deadline = time.monotonic() + _STOP_S
        while not collecting.done():
            self._order(output.pid)
            if time.monotonic() > deadline:
                self.end("a command in it did not end when it was killed")
                self._raise_lost()
            await asyncio.wait((collecting,), timeout=0.5)

    async def _output(self, words: Sequence[str], *, most: int, what: str, stdin: bytes = b"") -> bytes:
        """Output of a program of the image. Raises RuntimeRefused and TooLarge."""
        command = wrapped(RuntimeCommand(argv=tuple(words), cwd="/"))
        ended = await self._run(command, wall_s=_COPY_S, most=most, stdin=stdin)
        if ended.output.cut:
            raise TooLarge(most)
        if ended.timed_out:
            raise RuntimeRefused(f"{what} it takes more than {_COPY_S:g} s".strip())
        if ended.exit_code == ABSENT:
            raise RuntimeRefused("No such file or directory")
        if ended.exit_code != 0:
            said = ended.output.stderr[-_MAX_SAID:].decode(errors="replace").strip()
            raise RuntimeRefused(f"{what} {said or f'exit code {ended.exit_code}'}".strip())
        return bytes(ended.output.stdout)

    async def _unpack(self, entries: Sequence[TreeEntry]) -> None:
        if entries:
            with pack_archive(entries, user=self._launch.user, group=self._launch.group) as archive:
                packed = archive.read()
            await self._output(UNPACK, most=_MAX_SAID, what="", stdin=packed)

    async def _changes(self) -> list[TreeEntry]:
        assert self._began is not None
        most = self._launch.limits.disk_mib << 20
        told = await self._output(LIST, most=_MAX_LISTING, what="its files cannot be listed")
        before, after = await asyncio.to_thread(lambda: (self._began_files(), FileListing(told).files()))
        found = differing(before, after)
        entries = list(found.entries)
        if found.paths:
            names = b"".join(path + b"\0" for path in (b".", *found.paths))
            packed = await self._output(PACK_NAMED, most=most + OVERHEAD, what="", stdin=names)
            entries += [each for each in await asyncio.to_thread(_unpacked, packed, most) if each.kind != FOLDER]
        return sorted(entries, key=lambda entry: entry.path.split("/"))

    async def _restore(self, entries: Sequence[TreeEntry]) -> None:
        before = await asyncio.to_thread(self._began_files)

        def stands_in_the_way(entry: TreeEntry) -> bool:
            there = before.get(entry.path.encode("utf-8", "surrogateescape"))
            return there is not None and (there.kind == "d") != (entry.kind == FOLDER)

        gone = [f"/{entry.path}" for entry in entries if entry.kind == WHITEOUT or stands_in_the_way(entry)]
        for at in range(0, len(gone), _PATHS_AT_ONCE):
            words = (*_REMOVE, *gone[at : at + _PATHS_AT_ONCE])
            await self._output(words, most=_MAX_SAID, what="what a snapshot lacks cannot be removed:")
        await self._unpack(restored(entries, before))

    def _began_files(self) -> Mapping[bytes, ListedFile]:
        assert self._began is not None
        return self._began.files()

    async def _watch(self, stdin: ChannelStream) -> None:
        """Lose it when its stdin breaks or its first process ends, and say why."""
        async for _ in stdin.frames():
            pass
        try:
            deadline = time.monotonic() + _ENDS_S
            while True:
                pod = await self._launch.api.pod(self._name)
                if pod.status.has_ended or time.monotonic() > deadline:
                    break
                await asyncio.sleep(_FIRST_LOOK_S)
            self._lose(_reason(self.image, pod, broke=stdin.exit_code is None))
        except ClusterError as error:
            self._lose(RuntimeLost(f"a runtime of image {self.image} is gone: {error}"))

    async def _check_running(self) -> None:
        """Raises if it has ended, or is ending. Raises ClusterError."""
        look_s, deadline = _FIRST_LOOK_S, time.monotonic() + _TOLD_OF_END_S
        while self._lost is None:
            pod = await self._launch.api.pod(self._name)
            if pod.status.has_ended:
                if self._watching is not None:  # which knows of its stdin
                    await asyncio.wait((self._watching,), timeout=_ENDS_S)
                self._lose(_reason(self.image, pod, broke=False))
            elif time.monotonic() > deadline:
                return
            else:
                await asyncio.sleep(look_s)
                look_s = min(2 * look_s, _TOLD_OF_END_S / 4)
        self._raise_lost()

    async def _done(self, work: Callable[[], Awaitable[T]], what: str) -> T:
        async with self._asked():
            try:
                return await work()
            except TooLarge as error:
                raise RuntimeRefused(f"{what}: {error.strerror}") from error
            except (ArchiveFault, ValueError) as error:
                await self._check_running()
                raise RuntimeRefused(f"{what}: {error}") from error

    @asynccontextmanager
    async def _asked(self) -> AsyncIterator[None]:
        """Raises RuntimeLost or RuntimeEnded of one that is no longer there."""
        self._raise_lost()
        try:
            yield
        except ClusterError as error:
            with suppress(ClusterError):
                await self._check_running()
            self._lose(RuntimeLost(f"a runtime of image {self.image} is gone: {error}"))
            self._raise_lost()

    def _order(self, what: str) -> None:
        """Tell its first process what to kill."""
        if self._stdin is not None:
            task = asyncio.ensure_future(self._stdin.send(f"{what}\n".encode()))
            self._orders.add(task)
            task.add_done_callback(self._orders.discard)

    async def _end_all(self) -> None:
        if self._created:
            try:
                await self._launch.api.delete(self._name)
            except ClusterError as error:
                logger.warning("the pod %s is not deleted yet: %s", self._name, error)
                self._launch.left(self._name)
        for task in (*self._orders, *([self._watching] if self._watching is not None else [])):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await self._stack.aclose()


async def _fed(stream: ChannelStream, stdin: bytes) -> None:
    await stream.send(stdin)
    await stream.finish()


def _with_environment(command: RuntimeCommand) -> tuple[str, ...]:
    """The words by which a command is started; no request can give it an environment."""
    settings = [f"{name}={value}" for name, value in command.environment.items()]
    return (*(("env", *settings) if settings else ()), *wrapped(command))


def _reason(image: str, pod: RuntimePod, *, broke: bool) -> Exception:
    """The error of a pod that has ended; `broke`: the connection of its stdin did, before it was told of an end."""
    status, end = pod.status, pod.status.terminated
    told = f"{status.reason} {status.message}".strip()
    if status.reason == "DeadlineExceeded":
        return RuntimeEnded("its time was over (activeDeadlineSeconds)")
    if status.reason == "Evicted" and "ephemeral" in told and "low on resource" not in told:
        return RuntimeEnded(f"it wrote too much: {status.message}")
    if end is not None and end.reason == "OOMKilled":
        return RuntimeEnded("it had no memory left")
    if status.reason:
        why = told
    elif end is None or pod.metadata.deletionTimestamp is not None:
        why = "its pod was taken away"
    elif broke and end.exitCode == _STDIN_ENDED:
        why = "its stdin broke"
    else:
        return RuntimeEnded("it was ended from inside")
    return RuntimeLost(f"a runtime of image {image} is gone: {why}")


def _unpacked(packed: bytes, most: int) -> list[TreeEntry]:
    return unpack_archive(io.BytesIO(packed), most=most)
