"""The generators that serve now, as the learner says, and which of them takes the next request."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from protocol.messages import ServingGenerator

logger = logging.getLogger(__name__)


class GeneratorFleet:
    """Chooses by fewest completions outstanding; a generator that has just failed comes last.

    `rest_s` is how long a failure counts. `clock` is in seconds.
    """

    def __init__(self, *, rest_s: float = 2.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._rest_s = rest_s
        self._clock = clock
        self._serving: Mapping[str, ServingGenerator] = {}
        self._outstanding: Counter[str] = Counter()
        self._resting_until: dict[str, float] = {}
        self._changed = asyncio.Event()

    @property
    def serving(self) -> tuple[ServingGenerator, ...]:
        return tuple(self._serving.values())

    @property
    def outstanding(self) -> Mapping[str, int]:
        """Completions in flight by generator id."""
        return self._outstanding

    def replace(self, generators: Sequence[ServingGenerator]) -> None:
        """Take the learner's newest word on who serves."""
        self._serving = {generator.generator_id: generator for generator in generators}
        self._resting_until = {name: until for name, until in self._resting_until.items() if name in self._serving}
        self._changed.set()
        self._changed = asyncio.Event()

    async def choose(self, *, avoid: Sequence[str] = ()) -> ServingGenerator:
        """The generator for the next request; waits until one serves. One in `avoid` only if there is no other."""
        while not self._serving:
            await self._changed.wait()
        now = self._clock()

        def burden(generator: ServingGenerator) -> tuple[bool, bool, int]:
            name = generator.generator_id
            return name in avoid, self._resting_until.get(name, now) > now, self._outstanding[name]

        return min(self._serving.values(), key=burden)

    @contextmanager
    def occupy(self, generator: ServingGenerator, *, completions: int) -> Iterator[None]:
        """Count a request as outstanding while the body runs."""
        self._outstanding[generator.generator_id] += completions
        try:
            yield
        finally:
            self._outstanding[generator.generator_id] -= completions
            if self._outstanding[generator.generator_id] <= 0:
                del self._outstanding[generator.generator_id]

    def failed(self, generator: ServingGenerator, *, why: str) -> None:
        """Let the others have the next requests for a while; said once a while, however many requests have failed."""
        now = self._clock()
        if self._resting_until.get(generator.generator_id, now) <= now:
            logger.warning("generator %s rests for %.0f s: %s", generator.generator_id, self._rest_s, why)
        self._resting_until[generator.generator_id] = now + self._rest_s
