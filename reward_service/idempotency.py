"""Requests that are sent twice: one that repeats the key of another is answered as that one was.

claim(key, body) -> unknown: the caller computes the answer and settles it; if it leaves instead, the next one does
                 -> under way: waits for that answer
                 -> known: the same answer, for as long as it is kept
                 -> known with another body: refused
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import xxhash

from reward_service.config import IdempotencyConfig
from services.refusals import RequestRefused


class Claim:
    """What became of a request's key: the `answer` there is, or else the caller's turn to `settle` one."""

    def __init__(self, answer: bytes | None) -> None:
        self.answer = answer
        self.settled: bytes | None = None
        self.keep = False

    def settle(self, answer: bytes, *, keep: bool) -> None:
        """Give the answer to those who wait for it, and to those who come later if it is to be kept."""
        self.settled, self.keep = answer, keep


class _Entry:
    def __init__(self, *, digest: bytes) -> None:
        self.digest = digest
        self.ended = asyncio.Event()
        self.answer: bytes | None = None
        self.settled_at = 0.0


class Repetitions:
    """The answers of late by key. `wait_s` bounds the wait for one that is under way; `clock` is in seconds."""

    def __init__(
        self, *, config: IdempotencyConfig, wait_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._config = config
        self._wait_s = wait_s
        self._clock = clock
        self._under_way: dict[str, _Entry] = {}
        self._settled: OrderedDict[str, _Entry] = OrderedDict()
        self._bytes = 0

    @asynccontextmanager
    async def claimed(self, *, key: str | None, body: bytes) -> AsyncIterator[Claim]:
        """The claim to a key. Without a key, always the caller's turn.

        Raises RequestRefused if the key is known with another body, or its answer takes too long.
        """
        if key is None:
            yield Claim(None)
            return
        digest = xxhash.xxh3_128_digest(body)
        known = await self._known(key, digest)
        if known is not None:
            yield Claim(known)
            return
        entry = self._under_way[key] = _Entry(digest=digest)
        claim = Claim(None)
        try:
            yield claim
        finally:
            del self._under_way[key]
            entry.answer = claim.settled
            entry.ended.set()
            if claim.keep:
                self._keep(key, entry)

    async def _known(self, key: str, digest: bytes) -> bytes | None:
        """The answer to the key, now or when it is there; None when it is this caller's turn."""
        while True:
            self._forget()
            if (settled := self._settled.get(key)) is not None:
                _check_same(key, settled, digest)
                return settled.answer
            if (entry := self._under_way.get(key)) is None:
                return None
            _check_same(key, entry, digest)
            await self._ended(key, entry)
            if entry.answer is not None:
                return entry.answer

    async def _ended(self, key: str, entry: _Entry) -> None:
        try:
            async with asyncio.timeout(self._wait_s):
                await entry.ended.wait()
        except TimeoutError:
            message = f"the first request with the key {key!r} was not answered in {self._wait_s:g} s: try again"
            raise RequestRefused(503, "under_way", message, retry_after_s=1.0) from None

    def _keep(self, key: str, entry: _Entry) -> None:
        entry.settled_at = self._clock()
        self._settled[key] = entry
        self._bytes += _size(entry)
        self._forget()

    def _forget(self) -> None:
        oldest = self._clock() - self._config.keep_s
        while self._settled:
            first = next(iter(self._settled.values()))
            crowded = len(self._settled) > self._config.max_answers or self._bytes > self._config.memory_mib << 20
            if first.settled_at > oldest and not crowded:
                return
            self._settled.popitem(last=False)
            self._bytes -= _size(first)


def _size(entry: _Entry) -> int:
    return len(entry.answer or b"")


def _check_same(key: str, entry: _Entry, digest: bytes) -> None:
    if entry.digest != digest:
        message = f"the Idempotency-Key {key!r} was used for another request: use a key for one request only"
        raise RequestRefused(409, "key_reused", message, field="Idempotency-Key")
