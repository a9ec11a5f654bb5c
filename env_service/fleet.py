"""The generators that serve now, as the learner says, and which of them takes the next request."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from protocol.messages import ServingGenerator
from services.breaker import Breakers, Call


class GeneratorFleet:
    """Chooses by fewest completions outstanding, among those whose breaker admits a request."""

    def __init__(self, *, breakers: Breakers | None = None) -> None:
        self._breakers = breakers or Breakers("generator")
        self._serving: Mapping[str, ServingGenerator] = {}
        self._outstanding: Counter[str] = Counter()

    @property
    def serving(self) -> tuple[ServingGenerator, ...]:
        return tuple(self._serving.values())

    @property
    def answering(self) -> bool:
        """Whether one of those that serve is believed to answer."""
        return self._breakers.any_closed(self._serving)

    @property
    def outstanding(self) -> Mapping[str, int]:
        """Completions in flight by generator id."""
        return self._outstanding

    def replace(self, generators: Sequence[ServingGenerator]) -> None:
        """Take the learner's newest word on who serves."""
        self._serving = {generator.generator_id: generator for generator in generators}
        self._breakers.keep(self._serving)

    async def choose(self, *, avoid: Sequence[str] = ()) -> ServingGenerator:
        """The generator for the next request; waits, without end, until one serves and is not left alone.

        One in `avoid` only if there is no other. To be followed by `occupy` without an await between them.
        """

        def burden(generator: ServingGenerator) -> tuple[bool, int]:
            name = generator.generator_id
            return name in avoid, self._outstanding[name]

        while True:
            looked_at = self._breakers.now()
            admitted = [each for name, each in self._serving.items() if self._breakers[name].admits]
            if admitted:
                return min(admitted, key=burden)
            await self._breakers.change(self._serving, since=looked_at)

    @contextmanager
    def occupy(self, generator: ServingGenerator, *, completions: int) -> Iterator[Call]:
        """Count a request as outstanding while the body runs, which says how the call went."""
        self._outstanding[generator.generator_id] += completions
        try:
            with self._breakers[generator.generator_id].call() as call:
                yield call
        finally:
            self._outstanding[generator.generator_id] -= completions
            if self._outstanding[generator.generator_id] <= 0:
                del self._outstanding[generator.generator_id]
