"""Bounds of what a session's door takes in: bytes by the second, and bytes that are held at once."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class ByteAllowance:
    """So many bytes a second, of which what was not used counts up to `at_once`."""

    def __init__(self, *, per_s: int, at_once: int) -> None:
        self._clock = asyncio.get_running_loop().time
        self._per_s = per_s
        self._at_once = at_once
        self._left = float(at_once)
        self._since = self._clock()

    async def take(self, count: int) -> None:
        """Return when these have their turn, behind those that were taken before."""
        now = self._clock()
        self._left = min(self._at_once, self._left + (now - self._since) * self._per_s) - count
        self._since = now
        if self._left < 0:
            await asyncio.sleep(-self._left / self._per_s)


class ByteRoom:
    """Room for so many bytes at once. Who does not fit waits, and so does who comes later: a large one has its turn."""

    def __init__(self, size: int) -> None:
        self._free = size
        self._first = asyncio.Lock()
        self._given_back = asyncio.Event()

    @asynccontextmanager
    async def held(self, count: int) -> AsyncIterator[None]:
        """Within it, room for `count` bytes is held, which is at most the whole size."""
        async with self._first:
            while self._free < count:
                self._given_back.clear()
                await self._given_back.wait()
            self._free -= count
        try:
            yield
        finally:
            self._free += count
            self._given_back.set()
