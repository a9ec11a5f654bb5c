"""The generators that serve one teacher: which of them is asked next."""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

from services.breaker import Breakers, Call


class Endpoints:
    """Chooses by fewest requests under way, among those whose breaker admits one."""

    def __init__(self, urls: Sequence[str], *, breakers: Breakers) -> None:
        self._urls = [url.rstrip("/") for url in urls]
        self._breakers = breakers
        self._under_way: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._urls)

    async def choose(self, *, avoid: Collection[str] = ()) -> str:
        """The address of the next request; waits, without end, until one is not left alone.

        One in `avoid` only if there is no other. To be followed by `call` without an await between them.
        """
        while True:
            looked_at = self._breakers.now()
            admitted = [url for url in self._urls if self._breakers[url].admits]
            if admitted:
                return min(admitted, key=lambda url: (url in avoid, self._under_way[url]))
            await self._breakers.change(self._urls, since=looked_at)

    @contextmanager
    def call(self, url: str) -> Iterator[Call]:
        """A request to one of them, under way while the body runs, which says how it went."""
        self._under_way[url] += 1
        try:
            with self._breakers[url].call() as call:
                yield call
        finally:
            self._under_way[url] -= 1
