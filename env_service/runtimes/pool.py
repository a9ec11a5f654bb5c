"""The runtimes of a process: opened at the first need, tried, counted by memory, some of them warm.

    start ─▶ is there room? ─▶ a warm one of that image, or a new one ─▶ … ─▶ stop ─▶ room for the next
                 └─ no: a warm one of another image goes; else wait in turn, behind who exchanges one

Runtimes die with this process, however it ends; a remainder is cleared away by the next one.
"""

import asyncio
import logging
import socket
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import Protocol, TypeVar

from env_service.runtimes.bubblewrap_kind import BubblewrapKind
from env_service.runtimes.config import RuntimeLimits, RuntimesConfig
from env_service.runtimes.images import HOST, ImageFault, RuntimesOff
from env_service.runtimes.interface import (
    CommandEnd,
    ListeningRuntime,
    Runtime,
    RuntimeCommand,
    RuntimeFile,
    RuntimeLost,
    RuntimeRefused,
    RuntimesBusy,
    RuntimeSnapshot,
)
from env_service.runtimes.kinds import PooledRuntime, RuntimeKind
from services.cores import cores
from services.http.metrics import Metrics
from services.isolation.faults import CannotIsolate
from services.memory import memory_here

logger = logging.getLogger(__name__)

T = TypeVar("T")

_ATTEMPTS = 3


class RuntimePool:
    """Runtimes of one machine. It is used from any event loop, and lives in the one that opens it."""

    def __init__(self, config: RuntimesConfig, *, without: str = "") -> None:
        """`without`: why there can be none here."""
        self._config = config
        self._without = without or ("env-service.runtimes.kind is 'off'" if config.kind == "off" else "")
        self.needed: set[str] = set()
        """Names of images that environments have said they need."""
        self._bound: dict[str, Path] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._usual = _kind_of(config, self._bound)
        self._kind: RuntimeKind | None = None
        self._spares: dict[str, deque[PooledRuntime]] = defaultdict(deque)
        self._living: set[PooledRuntime] = set()
        self._filling: set[asyncio.Task[None]] = set()
        self._names = self._coming = self._waiting = self._lost = self._exchanging = 0

    @property
    def limits(self) -> RuntimeLimits:
        """Limits of each runtime."""
        return self._config.limits

    def need(self, image: str) -> None:
        """Say at the start that an image will be wanted. Raises ImageFault for one that there is not."""
        if self._without:
            raise RuntimesOff(f"the environment runs in runtimes, and there are none here: {self._without}")
        self._usual.check(image)
        self.needed.add(image)

    def bind(self, folders: Mapping[str, Path], *, purpose: str) -> None:
        """Say at the start that folders of this machine are wanted in every runtime, read-only, by their places there.

        Raises ImageFault, with the `purpose`, for a kind that has no folders of this machine.
        """
        if self._config.kind != "bubblewrap":
            raise ImageFault(
                f"{purpose} needs env-service.runtimes.kind = 'bubblewrap', on the service's own machine, got "
                f"{self._config.kind!r}"
            )
        new = {place: folder for place, folder in folders.items() if self._bound.get(place) != folder}
        if new and self._kind is not None:
            raise ImageFault(f"{purpose} has to be known before the first runtime is started")
        self._bound.update(new)

    def show(self, metrics: Metrics) -> None:
        """Show how many there are, and how many starts came to nothing, among a process's metrics."""
        shown = metrics.gauge(
            "runtimes", "Runtimes by state: busy, warm, or waiting: conversations without one.", labels=("state",)
        )
        shown.labels("busy").set_function(lambda: len(self._living) - self._warm)
        shown.labels("warm").set_function(lambda: self._warm)
        shown.labels("waiting").set_function(lambda: self._waiting)
        metrics.count("runtimes_started", "Runtimes whose start was tried.", lambda: self._names)
        metrics.count("runtimes_failed_starts", "Runtimes that did not come to stand.", lambda: self._lost)

    async def start(self, image: str, *, snapshot: RuntimeSnapshot | None = None) -> Runtime:
        """A runtime of an image, or with a snapshot's files. Raises RuntimesBusy, RuntimeLost, ImageFault."""
        return await self._at_home(lambda: self._start(image, snapshot))

    async def exchange(self, runtime: Runtime, image: str, *, snapshot: RuntimeSnapshot | None = None) -> Runtime:
        """A fresh runtime in the place of one, which is ended: of those who wait for room nobody comes between. Raises
        as `start`.
        """
        return await self._at_home(lambda: self._exchanged(runtime, image, snapshot))

    def settle(self) -> None:
        """Live in the running event loop. Its thread has to live as long: runtimes die with it."""
        self._loop, self._opening, self._queue = asyncio.get_running_loop(), asyncio.Lock(), asyncio.Lock()
        self._starting, self._left = asyncio.Semaphore(2 * cores()), asyncio.Event()

    async def open(self) -> None:
        """Clear what a killed service left, and try the walls. Raises CannotIsolate and ImageFault."""
        await self._at_home(self._open)

    async def close(self) -> None:
        """End all of them."""
        if self._loop is not None:
            await self._at_home(self._close)

    @property
    def _warm(self) -> int:
        return sum(map(len, self._spares.values()))

    async def _at_home(self, work: Callable[[], Coroutine[object, object, T]]) -> T:
        """The work in the loop in which the pool lives."""
        here = asyncio.get_running_loop()
        if self._loop is None or self._loop.is_closed():
            self.settle()
        if here is self._loop:
            return await work()
        assert self._loop is not None
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work(), self._loop))

    async def _open(self) -> None:
        async with self._opening:
            if self._kind is not None:
                return
            if self._without:
                raise RuntimesOff(f"there are no runtimes here: {self._without}")
            kind = self._kind = _kind_of(self._config, self._bound)
            try:
                await kind.open(self.needed)
                await self._try_walls(kind)
            except BaseException:
                await self._close()
                raise

    async def _try_walls(self, kind: RuntimeKind) -> None:
        """Raises CannotIsolate unless a runtime starts, and every wall that is tried in it stands."""
        image = next(iter(sorted(self.needed)), HOST)
        try:
            runtime = await self._launched(image, None)
            try:
                end = await runtime.exec(kind.trial)
            finally:
                await runtime.stop()
        except RuntimeLost as error:
            raise CannotIsolate(f"runtimes cannot be had here: {error}. {kind.remedy}") from error
        found = end.stdout.decode(errors="replace").strip()
        if found or end.exit_code != 0:
            said = "; ".join(found.splitlines()) or end.stderr.decode(errors="replace").strip()[-1000:]
            raise CannotIsolate(f"the walls of runtimes do not hold here: {said}. {kind.remedy}")

    async def _exchanged(self, old: Runtime, image: str, snapshot: RuntimeSnapshot | None) -> Runtime:
        self._exchanging += 1
        try:
            await old.stop()
            return await self._start(image, snapshot, first=True)
        finally:
            self._exchanging -= 1
            self._tell()

    async def _start(self, image: str, snapshot: RuntimeSnapshot | None, *, first: bool = False) -> Runtime:
        await self._open()
        runtime = await self._spare_or_room(None if snapshot is not None else image, first=first)
        if runtime is None:
            try:
                runtime = await self._launched(image, snapshot)
            finally:
                self._came()
        runtime.age_from_now()
        self._refill(image)
        return _RuntimeAnywhere(self._at_home, runtime)

    async def _spare_or_room(self, image: str | None, *, first: bool) -> PooledRuntime | None:
        """A warm runtime of that image; or None when there is room for one more, which is counted from then on. Who is
        `first` is so: it has given a runtime back for this one.

        Raises RuntimesBusy.
        """
        if (spare := await self._spare_of(image)) is not None:
            return spare
        self._waiting += 1
        try:
            # Who came first is served first.
            queue: AbstractAsyncContextManager[object] = nullcontext() if first else self._queue
            async with asyncio.timeout(self._config.patience_s), queue:
                while True:
                    left = self._left
                    if (spare := await self._spare_of(image)) is not None:
                        return spare
                    if (first or not self._exchanging) and await self._has_room(but=image):
                        self._coming += 1
                        return None
                    await left.wait()
        except TimeoutError:
            raise RuntimesBusy(
                f"there was no room for a runtime in {self._config.patience_s:g} s: {len(self._living)} live "
                "(env-service.runtimes.memory_mib, max_runtimes)"
            ) from None
        finally:
            self._waiting -= 1

    async def _spare_of(self, image: str | None) -> PooledRuntime | None:
        spares = self._spares.get(image) if image is not None else None
        while spares:
            if (spare := spares.popleft()).stands:
                return spare
            await spare.stop()  # until then it takes room
        return None

    def _came(self) -> None:
        """Take one off those that are coming: it has come, or will not, and who waits looks again."""
        self._coming -= 1
        self._tell()

    def _tell(self) -> None:
        self._left.set()
        self._left = asyncio.Event()

    async def _has_room(self, *, but: str | None) -> bool:
        """True if there is room for one more, of which warm ones of other images may go."""
        while not self._fits(1):
            other = next((name for name, spares in self._spares.items() if spares and name != but), None)
            if other is None:
                return False
            await self._spares[other].popleft().stop()
        return True

    def _fits(self, more: int) -> bool:
        count, each = len(self._living) + self._coming + more, self._usual.memory_mib
        return count <= self._config.max_runtimes and count * each <= max(each, self._memory_mib())

    def _memory_mib(self) -> int:
        return self._config.memory_mib or (memory_here() >> 20) // 2

    async def _launched(self, image: str, snapshot: RuntimeSnapshot | None) -> PooledRuntime:
        """Raises RuntimeLost if several in a row could not be started."""
        assert self._kind is not None
        for attempt in range(1, _ATTEMPTS + 1):
            self._names += 1
            name = f"place-{self._names}"  # now: while it waits to begin, others take theirs
            try:
                async with self._starting:
                    runtime = await self._kind.launch(image, snapshot, name=name, ended=self._gone)
                self._living.add(runtime)
            except RuntimeLost as error:
                self._lost += 1
                if attempt == _ATTEMPTS:
                    raise
                logger.warning("%s; another one is tried", error)
                continue
            return runtime
        raise AssertionError

    def _gone(self, runtime: PooledRuntime) -> None:
        self._living.discard(runtime)
        self._tell()

    def _refill(self, image: str) -> None:
        task = asyncio.ensure_future(self._filled(image))
        self._filling.add(task)
        task.add_done_callback(self._filling.discard)

    async def _filled(self, image: str) -> None:
        """Warm runtimes of an image, as long as there is room that nobody waits for."""
        while len(self._spares[image]) < self._config.spare and self._fits(1) and not self._is_waited_for:
            self._coming += 1
            try:
                self._spares[image].append(await self._launched(image, None))
            except (RuntimeLost, OSError) as error:
                logger.warning("no warm runtime: %s", error)
                return
            finally:
                self._came()

    @property
    def _is_waited_for(self) -> bool:
        return self._queue.locked() or self._exchanging > 0

    async def _close(self) -> None:
        for task in list(self._filling):
            task.cancel()
        await asyncio.gather(*self._filling, return_exceptions=True)
        await asyncio.gather(*(runtime.stop() for runtime in list(self._living)))
        self._spares.clear()
        kind, self._kind = self._kind, None
        if kind is not None:
            await kind.close()


def _kind_of(config: RuntimesConfig, bound: Mapping[str, Path]) -> RuntimeKind:
    match config.kind:
        case "engine":
            # Deferred, as below: aiohttp, which a check of a run does without.
            from env_service.runtimes.engine_kind import EngineKind

            return EngineKind(config)
        case "kubernetes":
            from env_service.runtimes.kubernetes_kind import KubernetesKind

            return KubernetesKind(config)
        case _:
            return BubblewrapKind(config, bound)


class _RuntimeAnywhere:
    """A runtime as it is used from any event loop."""

    def __init__(self, at_home: "AtHome", runtime: PooledRuntime) -> None:
        self.image = runtime.image
        self._at_home = at_home
        self._runtime = runtime

    async def exec(self, command: RuntimeCommand) -> CommandEnd:
        """Run a command to its end."""
        return await self._at_home(lambda: self._runtime.exec(command))

    async def copy_in(self, files: Mapping[str, RuntimeFile | bytes]) -> None:
        """Write files."""
        await self._at_home(lambda: self._runtime.copy_in(files))

    async def copy_out(self, path: str, *, most_bytes: int = 16 << 20) -> Mapping[str, RuntimeFile]:
        """The files in a folder."""
        return await self._at_home(lambda: self._runtime.copy_out(path, most_bytes=most_bytes))

    async def snapshot(self) -> RuntimeSnapshot:
        """Its files."""
        return await self._at_home(self._runtime.snapshot)

    async def listen(self) -> socket.socket:
        """A socket that listens on its loopback."""
        if not isinstance(self._runtime, ListeningRuntime):
            raise RuntimeRefused(f"nobody can listen in a runtime of image {self.image}, which is of another kind")
        return await self._at_home(self._runtime.listen)

    async def stop(self) -> None:
        """End it."""
        await self._at_home(self._runtime.stop)


class AtHome(Protocol):
    """Does work in the event loop of a pool."""

    async def __call__(self, work: Callable[[], Coroutine[object, object, T]], /) -> T: ...


class _RuntimesOfProcess:
    """The pool of this process; that of the usual settings if nobody has set another one."""

    pool: RuntimePool | None = None


def runtimes() -> RuntimePool:
    """The runtimes of this process."""
    if _RuntimesOfProcess.pool is None:
        _RuntimesOfProcess.pool = RuntimePool(RuntimesConfig())
    return _RuntimesOfProcess.pool


def use_runtimes(pool: RuntimePool) -> RuntimePool:
    """Make a pool that of this process."""
    _RuntimesOfProcess.pool = pool
    return pool
