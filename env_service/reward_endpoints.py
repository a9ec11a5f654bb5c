"""The reward services: which of them is asked next, and the wait when none answers."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

from services.breaker import Breakers, Call
from services.waiting import Waiting


class RewardEndpoints:
    """The services at `urls`, taken in turn; one that fails again and again is left alone for a while.

    One that is not there yet, or not any more, costs no more than a refused connection now and then.
    """

    def __init__(self, urls: Sequence[str], *, breakers: Breakers | None = None) -> None:
        self._urls = [url.rstrip("/") for url in urls]
        self._breakers = breakers or Breakers("reward service")

    def __len__(self) -> int:
        return len(self._urls)

    async def choose(self, *, avoid: Collection[str] = ()) -> str:
        """The address of the next request's service; waits, without end, until one is not left alone.

        One in `avoid` only if there is no other. To be followed by `call` without an await between them.
        """
        while True:
            admitted = [url for url in self._urls if self._breakers[url].admits]
            if admitted:
                chosen = min(admitted, key=lambda url: url in avoid)
                self._urls.remove(chosen)
                self._urls.append(chosen)
                return chosen
            await self._breakers.change(self._urls)

    @contextmanager
    def call(self, url: str) -> Iterator[Call]:
        """A request to one of them, under way while the body runs, which says how it went."""
        with self._breakers[url].call() as call:
            yield call

    async def watch(self, waits: Waiting) -> None:
        """Keep `waits` true to whether any of them answers, until cancelled."""
        whom = f"the reward service at {' or '.join(sorted(self._urls))}"
        while True:
            while self._breakers.any_closed(self._urls):
                await self._breakers.change(self._urls)
            with waits.wait(whom, quiet_s=0.5):
                while not self._breakers.any_closed(self._urls):
                    await self._breakers.change(self._urls)
