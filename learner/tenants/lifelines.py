"""A watch over counterparts with requests under way: those of one that hangs would else wait for their long deadline.

One watch for each counterpart, however many requests it has; it ends with the last of them.
"""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from services.http.client import HttpClient, ServiceError, ServiceTimeout
from services.http.faults import see_alive

T = TypeVar("T")


@dataclass
class _Watch:
    """`lost` is set once the counterpart has not answered several times in a row."""

    task: asyncio.Task[None]
    requests: int = 0
    lost: asyncio.Event = field(default_factory=asyncio.Event)


class Lifelines:
    """Asks counterparts every `every_s` seconds whether they live, and gives one up after `silences` in a row."""

    def __init__(self, client: HttpClient, *, every_s: float = 5.0, silences: int = 3) -> None:
        self._client, self._every_s, self._silences = client, every_s, silences
        self._watches: dict[str, _Watch] = {}

    async def during(self, url: str, request: Coroutine[Any, Any, T]) -> T:
        """The outcome of a request to the counterpart. Raises ServiceTimeout if that does not live any more."""
        watch = self._watches.get(url)
        if watch is None or watch.lost.is_set():
            watch = self._watches[url] = _Watch(asyncio.create_task(self._watch(url)))
        watch.requests += 1
        working, losing = asyncio.ensure_future(request), asyncio.ensure_future(watch.lost.wait())
        try:
            await asyncio.wait({working, losing}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            raise ServiceTimeout(url, f"no sign of life for {self._every_s * self._silences:g} s")
        finally:
            losing.cancel()
            watch.requests -= 1
            if not watch.requests:
                watch.task.cancel()
                if self._watches.get(url) is watch:
                    del self._watches[url]
            if not working.done():
                working.cancel()
                await asyncio.wait([working])

    async def _watch(self, url: str) -> None:
        silences = 0
        while silences < self._silences:
            await asyncio.sleep(self._every_s)
            try:
                await see_alive(self._client, url)
                silences = 0
            except ServiceError:
                silences += 1
        self._watches[url].lost.set()
