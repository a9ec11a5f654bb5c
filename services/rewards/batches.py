"""Small calls become one request: what comes within a few milliseconds, for one verifier, is sent together."""

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass, field

from services.rewards.items import Part


@dataclass(eq=False)
class _Batch:
    timer: asyncio.TimerHandle
    parts: list[Part] = field(default_factory=list)
    items: int = 0


class Batches:
    """Gathers parts by key until they have `items` items or the first has waited `wait_s` seconds.

    A batch is sent by `run` in a task of `tasks`; it goes on while anybody waits for a part of it. A key that nobody
    waits for holds nothing.
    """

    def __init__(
        self,
        *,
        run: Callable[[Sequence[Part]], Awaitable[None]],
        tasks: asyncio.TaskGroup,
        items: int,
        wait_s: float,
    ) -> None:
        self._run = run
        self._tasks = tasks
        self._items = items
        self._wait_s = wait_s
        self._gathering: dict[Hashable, _Batch] = {}
        self._sent: set[asyncio.Task[None]] = set()

    async def ask(self, key: Hashable, part: Part) -> None:
        """Returns when the part is over. Cancelling one who waits takes nothing from the others."""
        batch = self._gathering.get(key)
        items = len(part.awaited)
        if batch is not None and batch.items + items > self._items:
            self._send(key)
            batch = None
        if batch is None:
            timer = asyncio.get_running_loop().call_later(self._wait_s, self._send, key)
            batch = self._gathering[key] = _Batch(timer)
        batch.parts.append(part)
        batch.items += items
        if batch.items >= self._items:
            self._send(key)
        try:
            await part.over
        finally:
            part.close()

    def cancel(self) -> None:
        """End all requests; their parts are over."""
        for batch in self._gathering.values():
            batch.timer.cancel()
            for part in batch.parts:
                part.close()
        self._gathering.clear()
        for task in self._sent:
            task.cancel()

    def _send(self, key: Hashable) -> None:
        batch = self._gathering.pop(key)
        batch.timer.cancel()
        parts = [part for part in batch.parts if part.awaited]
        if parts:
            for part in parts:
                part.is_shared = len(parts) > 1
            task = self._tasks.create_task(self._run_all(parts), name="shared request to a reward service")
            self._sent.add(task)
            task.add_done_callback(self._sent.discard)

    async def _run_all(self, parts: Sequence[Part]) -> None:
        try:
            await self._run(parts)
        finally:
            for part in parts:
                part.close()
