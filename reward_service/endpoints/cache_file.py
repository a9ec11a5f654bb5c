"""Answers in an SQLite file, read and written by a thread of its own so that a slow disk holds nobody up."""

import asyncio
import logging
import sqlite3
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

from reward_service.verifier import UserError

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
            logger.warning("the file of kept answers fails, answers are paid again: %s", error)
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
