"""The child processes of an environment: one for each conversation, with warm spares, or a few shared ones."""

import asyncio
import logging
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Self

from env_service.environments.interface import EnvironmentFull
from env_service.environments.task_configs import ClassTasks
from env_service.hosting.messages import HostCall, HostReply
from env_service.hosting.processes import Child, Seat
from services.worker_process import WorkerUnavailable

logger = logging.getLogger(__name__)

_WAIT_S = 5.0


@dataclass(frozen=True, kw_only=True)
class HostPoolSettings:
    """Settings of a pool of hosts: at most `most` processes.

    `shared`: each runs many conversations. Else each runs one after the other, or, `fresh`, one in its life; and
    `spares` are started before they are wanted.
    """

    most: int
    shared: bool
    spares: int = 0
    fresh: bool = False
    start_timeout_s: float = 60.0


class Pool:
    """The processes for the environments of `entries`, which may grow until the pool is entered."""

    def __init__(self, entries: Sequence[ClassTasks], settings: HostPoolSettings) -> None:
        self._entries = entries
        self._settings = settings
        self._free = asyncio.Semaphore(settings.most)
        self._children: list[Child] = []
        self._idle: list[Child] = []
        self._numbers = count()
        self._starting: set[asyncio.Task[None]] = set()
        self._folder: Path | None = None
        self._tasks: Seat | None = None

    async def __aenter__(self) -> Self:
        self._folder = Path(tempfile.mkdtemp(prefix="headway-environments-"))
        if self._settings.shared:
            for _ in range(self._settings.most):
                self._begin(self._new())
        self._warm()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # Not cancelled: a process whose start is broken off is nobody's.
        await asyncio.gather(*self._starting, return_exceptions=True)
        await asyncio.gather(*(child.stop() for child in self._children))
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def process_ids(self) -> tuple[int, ...]:
        """Of all processes that run."""
        return tuple(child.process_id for child in self._children if child.process_id is not None)

    async def take(self) -> Seat:
        """A place for a conversation. Raises EnvironmentFull if none becomes free."""
        if self._settings.shared:
            child = min(self._shared, key=lambda one: one.seats)
        else:
            await self._wait()
            child = self._idle.pop() if self._idle else self._new()
            self._warm()
        child.seats += 1
        return Seat(child)

    async def give_back(self, seat: Seat) -> None:
        """The conversation is over."""
        child = seat.child
        child.seats -= 1
        if self._settings.shared:
            if not child.is_alive:
                self._begin(child)
            return
        try:
            if self._settings.fresh or not child.is_alive:
                self._children.remove(child)
                await child.end()
            else:
                self._idle.append(child)
        finally:
            self._free.release()
            self._warm()

    async def ask_for_tasks(self, call: HostCall, *, limit_s: float) -> HostReply:
        """The reply of a process that makes tasks alone: the others may all be taken."""
        if self._tasks is None or not self._tasks.is_there:
            self._tasks = Seat(self._tasks.child if self._tasks else self._new(shared=True))
        return await self._tasks.ask(call, limit_s=limit_s)

    @property
    def _shared(self) -> Sequence[Child]:
        return self._children[: self._settings.most]

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout(_WAIT_S):
                await self._free.acquire()
        except TimeoutError:
            raise EnvironmentFull(
                f"all {self._settings.most} processes are taken: raise the environment's `processes`, at least to the "
                "size of a group, and one for each redundant or greedy conversation, or lower env-service.capacity"
            ) from None

    def _new(self, *, shared: bool = False) -> Child:
        assert self._folder is not None, "a pool is used outside of its `async with`"
        stacks = self._folder / f"{next(self._numbers)}.txt"
        child = Child(
            self._entries,
            stacks=stacks,
            start_timeout_s=self._settings.start_timeout_s,
            shared=shared or self._settings.shared,
        )
        self._children.append(child)
        return child

    def _warm(self) -> None:
        """Have as many spares as there are to be, and no more than may be used."""
        while len(self._idle) < min(self._settings.spares, self._settings.most - self._taken):
            child = self._new()
            self._idle.insert(0, child)
            self._begin(child)

    @property
    def _taken(self) -> int:
        return sum(child.seats for child in self._children)

    def _begin(self, child: Child) -> None:
        task = asyncio.get_running_loop().create_task(_started(child))
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)


async def _started(child: Child) -> None:
    try:
        await child.start()
    except WorkerUnavailable as error:  # the conversation that gets it tries again, and is told
        logger.warning("no spare process for an environment: %s", error)
