"""The generators that serve, and the choice of one for each request."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

from protocol.messages import ServingGenerator
from services.http.breakers import Breakers, GuardedCall
from services.http.endpoints import Endpoints


class GeneratorFleet:
    """Chooses by fewest completions outstanding, among those that take requests, but for turns that have a prefix
    somewhere.
    """

    def __init__(self, *, breakers: Breakers | None = None) -> None:
        self._endpoints = Endpoints(breakers=breakers or Breakers("generator"))
        self._serving: Mapping[str, ServingGenerator] = {}

    @property
    def serving(self) -> tuple[ServingGenerator, ...]:
        return tuple(self._serving.values())

    @property
    def answering(self) -> bool:
        """True if one of those that serve is believed to answer."""
        return self._endpoints.at_hand

    @property
    def outstanding(self) -> Mapping[str, int]:
        """Completions in flight by generator id."""
        return self._endpoints.under_way

    def replace(self, generators: Sequence[ServingGenerator]) -> None:
        """Take the learner's newest word on who serves."""
        self._serving = {generator.generator_id: generator for generator in generators}
        self._endpoints.replace(self._serving.keys())

    async def choose(
        self, *, avoid: Sequence[str] = (), prefer: str = "", rank: tuple[int, ...] = ()
    ) -> ServingGenerator:
        """The generator for the next request; waits, without end, until one serves and is not left alone.

        One in `avoid` only if there is no other; the one to `prefer`, which holds the prefix, unless it is much busier
        than another one. Of requests that wait, the lowest `rank` goes first. To be followed by `occupy` without an
        await between them.
        """
        name = await self._endpoints.choose(avoid=avoid, prefer=prefer, rank=rank)
        return self._serving[name]

    def allow(self, generator_id: str, most: float) -> None:
        """From now on at most so many completions are outstanding at a generator."""
        self._endpoints.allow(generator_id, most)

    def occupy(self, generator: ServingGenerator, *, completions: int) -> AbstractContextManager[GuardedCall]:
        """Count a request as outstanding while the body runs, which raises a ServiceError if it comes to nothing."""
        return self._endpoints.call(generator.generator_id, weight=completions)
