"""Answers that are kept: the last used in memory, and the newest in a file if there is one.

Answers in an SQLite file, read and written by a thread of its own so that a slow disk holds nobody up.
"""

import asyncio
import hashlib
import logging
import sqlite3
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from reward_service.endpoints.config import CacheConfig
from reward_service.verifier.submission import UserError

logger = logging.getLogger(__name__)

R = TypeVar("R")

_PUTS_BETWEEN_CUTS = 1000
_BUSY_S = 5.0


class CacheFile:
    """Texts by key; made by `open_cache_file`. A file that fails later costs what it held, and no answer."""

    def __init__(self, connection: sqlite3.Connection, *, thread: ThreadPoolExecutor, entries: int) -> None:
        self._connection = connection
        self._thread = thread
        self._entries = entries
        self._puts = 0

    async def get(self, key: str) -> str | None:
        """The text, None if there is none."""
        return await self._run(partial(self._read, key))

    async def put(self, key: str, text: str) -> None:
        """Keep it. Beyond the most entries the oldest go."""
        await self._run(partial(self._write, key, text))

    async def _run(self, work: Callable[[], R]) -> R | None:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except sqlite3.Error as error:
            logger.warning("the answer cache fails, judges will be asked (and paid) again: %s", error)
            return None

    def _read(self, key: str) -> str | None:
        row = self._connection.execute("SELECT text FROM answers WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def _write(self, key: str, text: str) -> None:
        with self._connection:
            self._connection.execute("INSERT OR IGNORE INTO answers (key, text) VALUES (?, ?)", (key, text))
        self._puts += 1
        if self._puts % _PUTS_BETWEEN_CUTS == 0:
            self.cut()

    def cut(self) -> None:
        """Remove what is beyond the most entries. Runs in the file's thread."""
        with self._connection:
            self._connection.execute(
                "DELETE FROM answers WHERE number <= (SELECT max(number) FROM answers) - ?", (self._entries,)
            )


@asynccontextmanager
async def open_cache_file(path: Path, *, entries: int) -> AsyncIterator[CacheFile]:
    """The file, made if it is not there. Raises UserError if it cannot be used."""
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="kept answers") as thread:
        connection = await loop.run_in_executor(thread, partial(_connect, path))
        file = CacheFile(connection, thread=thread, entries=entries)
        try:
            await loop.run_in_executor(thread, file.cut)
            yield file
        finally:
            await loop.run_in_executor(thread, connection.close)


def _connect(path: Path) -> sqlite3.Connection:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(path, timeout=_BUSY_S, check_same_thread=False)
        try:
            _prepare(connection)
        except sqlite3.Error:
            connection.close()
            raise
    except (sqlite3.Error, OSError) as error:
        raise UserError(
            f"cache.file: {path} cannot be used as a file of kept answers: {error}; remove it, or name another"
        ) from error
    return connection


def _prepare(connection: sqlite3.Connection) -> None:
    connection.execute("PRAGMA journal_mode = WAL")
    # A crash of the machine may cost the last answers, which are then paid again.
    connection.execute("PRAGMA synchronous = NORMAL")
    with connection:
        connection.execute(
            "CREATE TABLE IF NOT EXISTS answers (number INTEGER PRIMARY KEY, key TEXT UNIQUE NOT NULL, text TEXT)"
        )
    connection.execute("SELECT number, key, text FROM answers LIMIT 1")


def key_of(*parts: str) -> str:
    """A name for texts: equal for equal texts in the same order only."""
    digest = hashlib.blake2b(digest_size=20)
    for part in parts:
        raw = part.encode(errors="surrogatepass")
        digest.update(len(raw).to_bytes(8, "big"))
        digest.update(raw)
    return digest.hexdigest()


@dataclass(frozen=True)
class KeptAnswer:
    """A text, and whether it was kept from an earlier question."""

    text: str
    kept: bool


class Cache:
    """Texts by key, at most `entries` in memory. What is asked for twice at once is made once."""

    def __init__(self, *, entries: int, file: CacheFile | None) -> None:
        self._entries = entries
        self._file = file
        self._kept: OrderedDict[str, str] = OrderedDict()
        # Each ends with the text, or with None if there is none.
        self._making: dict[str, asyncio.Future[str | None]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    async def get(self, key: str, make: Callable[[], Awaitable[str]]) -> KeptAnswer:
        """The text of `key`, made if it is not kept. If `make` raises, the next caller tries again."""
        while (making := self._making.get(key)) is not None:
            await asyncio.wait([making])  # as `await making` does not, it leaves it alone when it is cancelled
            if (made := making.result()) is not None:
                return KeptAnswer(made, kept=True)
        kept = self._kept.get(key)
        if kept is not None:
            self._kept.move_to_end(key)
            return KeptAnswer(kept, kept=True)
        making = self._making[key] = asyncio.get_running_loop().create_future()
        text = None
        try:
            found = await self._found_or_made(key, make)
            text = found.text
            return found
        finally:
            del self._making[key]
            making.set_result(text)

    async def _found_or_made(self, key: str, make: Callable[[], Awaitable[str]]) -> KeptAnswer:
        filed = None if self._file is None else await self._file.get(key)
        text = await make() if filed is None else filed
        if filed is None and self._file is not None:
            await self._file.put(key, text)
        self._keep(key, text)
        return KeptAnswer(text, kept=filed is not None)

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
