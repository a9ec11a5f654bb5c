"""Answers that are kept: the last used in memory, and the newest in a file if there is one."""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from reward_service.endpoints.cache_file import CacheFile, open_cache_file
from reward_service.endpoints.config import CacheConfig


def key_of(*parts: str) -> str:
    """A name for texts: equal for equal texts in the same order only."""
    digest = hashlib.blake2b(digest_size=20)
    for part in parts:
        raw = part.encode(errors="surrogatepass")
        digest.update(len(raw).to_bytes(8, "big"))
        digest.update(raw)
    return digest.hexdigest()


@dataclass(frozen=True)
class Found:
    """A text, and whether it was kept from an earlier question."""

    text: str
    kept: bool


class Cache:
    """Texts by key, at most `entries` in memory. What is asked for twice at once is made once."""

    def __init__(self, *, entries: int, file: CacheFile | None) -> None:
        self._entries = entries
        self._file = file
        self._kept: OrderedDict[str, str] = OrderedDict()
        self._making: dict[str, asyncio.Event] = {}

    def __len__(self) -> int:
        return len(self._kept)

    async def get(self, key: str, make: Callable[[], Awaitable[str]]) -> Found:
        """The text of `key`, made if it is not kept. If `make` raises, the next caller tries again."""
        while (making := self._making.get(key)) is not None:
            await making.wait()
        kept = self._kept.get(key)
        if kept is not None:
            self._kept.move_to_end(key)
            return Found(kept, kept=True)
        self._making[key] = asyncio.Event()
        try:
            return await self._found_or_made(key, make)
        finally:
            self._making.pop(key).set()

    async def _found_or_made(self, key: str, make: Callable[[], Awaitable[str]]) -> Found:
        filed = None if self._file is None else await self._file.get(key)
        text = await make() if filed is None else filed
        if filed is None and self._file is not None:
            await self._file.put(key, text)
        self._keep(key, text)
        return Found(text, kept=filed is not None)

    def _keep(self, key: str, text: str) -> None:
        self._kept[key] = text
        while len(self._kept) > self._entries:
            self._kept.popitem(last=False)


@asynccontextmanager
async def open_cache(config: CacheConfig) -> AsyncIterator[Cache]:
    """The cache, with its file if it has one. Raises UserError for a file that cannot be used."""
    if config.file is None:
        yield Cache(entries=config.entries, file=None)
        return
    async with open_cache_file(config.file, entries=config.file_entries) as file:
        yield Cache(entries=config.entries, file=file)
