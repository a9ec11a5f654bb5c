"""A runtime of any kind, between its start and its end: the one reason of its end, and the calls that all kinds take.

    (it stands) ─▶ lost ─▶ what there is of it is ended ─▶ nothing is left
        └ stop, a lifetime that is over, or what a kind sees of it

A kind says how its files are read and written and how it is ended, and when it is lost.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from env_service.runtimes.asking import entry_of, files_of
from env_service.runtimes.interface import CommandEnd, RuntimeCommand, RuntimeEnded, RuntimeFile, RuntimeSnapshot
from env_service.runtimes.kinds import Ended
from env_service.runtimes.tree import TreeEntry


class StandingRuntime(ABC):
    """Implements `PooledRuntime`. `ended` is called once, when nothing of it is left, or nobody can say."""

    def __init__(self, image: str, *, lifetime_s: float, ended: Ended) -> None:
        self.image = image
        self._lifetime_s = lifetime_s
        self._ended = ended
        self._lost: Exception | None = None
        self._stopped = False
        self._timer: asyncio.TimerHandle | None = None
        self._ending: asyncio.Task[None] | None = None

    @property
    def stands(self) -> bool:
        """True until it is stopped or lost."""
        return self._lost is None

    def age_from_now(self) -> None:
        """Have it end after its lifetime, counted from here."""
        self._timer = asyncio.get_running_loop().call_later(self._lifetime_s, self._too_old)

    @abstractmethod
    async def exec(self, command: RuntimeCommand) -> CommandEnd:
        """Run a command to its end."""

    async def copy_in(self, files: Mapping[str, RuntimeFile | bytes]) -> None:
        """Write files."""
        await self._write([entry_of(path, file) for path, file in files.items()])

    async def copy_out(self, path: str, *, most_bytes: int = 16 << 20) -> Mapping[str, RuntimeFile]:
        """The files in a folder."""
        return files_of(await self._read(path, most=most_bytes))

    async def snapshot(self) -> RuntimeSnapshot:
        """Its files."""
        entries = await self._differing()
        return RuntimeSnapshot(self.image, tuple((each.kind, each.path, each.mode, each.content) for each in entries))

    async def stop(self) -> None:
        """End it and all that runs in it; whoever asks, and asks again, waits for that."""
        self._lose(RuntimeEnded("it was stopped"))
        ending = self._end_soon()
        if not self._stopped:
            self._stopped = True
            if self._timer is not None:
                self._timer.cancel()
            if ending.done():
                self._ended(self)
            else:  # who asked may be cancelled, and until then there is something left of it
                ending.add_done_callback(lambda _: self._ended(self))
        await asyncio.shield(ending)

    def end(self, why: str) -> None:
        """End it for what was done inside."""
        self._lose(RuntimeEnded(why))
        self._end_soon()

    @abstractmethod
    async def _write(self, entries: Sequence[TreeEntry]) -> None:
        """Write entries with the folders that they need. Raises as `Runtime.copy_in`."""

    @abstractmethod
    async def _read(self, path: str, *, most: int) -> list[TreeEntry]:
        """Entries of a file or a folder, by paths from there on. Raises as `Runtime.copy_out`."""

    @abstractmethod
    async def _differing(self) -> list[TreeEntry]:
        """Entries that differ from the image's. Raises as `Runtime.snapshot`."""

    @abstractmethod
    async def _end_all(self) -> None:
        """End all of it, of which there may be nothing yet; return when nothing is left, or nobody can say."""

    def _lose(self, reason: Exception) -> None:
        """Give it up; the first reason is the one that everybody is told."""
        self._lost = self._lost or reason

    def _raise_lost(self) -> None:
        if self._lost is not None:
            raise self._lost

    def _end_soon(self) -> "asyncio.Task[None]":
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._end_all())
        return self._ending

    def _too_old(self) -> None:
        self.end(f"its time was over after {self._lifetime_s:g} s (env-service.runtimes.limits.lifetime_s)")
