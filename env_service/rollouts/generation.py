"""Sampling of a prompt's completions on one of the generators; what one does not finish goes on at another.

request ─▶ piece ─▶ generator ─▶ parts ─▶ all finished
             ▲          └─ dies, hangs, drains ─▶ what is left: one piece of those without a token, one for each
             └──────────────────────────────────  of the others, beside each other

The generators that serve now, as the learner says, and which of them takes the next request.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from env_service.rollouts.completions import Completion, CompletionGroup, Piece, Progress, rest_of
from env_service.rollouts.outcomes import InfrastructureFailure, RolloutMetrics, Unavailable, judged
from protocol.generation import GeneratePart, GenerateRequest
from protocol.messages import ServingGenerator
from services.http.calls import Backoff, Breakers, Call, see_alive
from services.http.client import HttpClient


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


logger = logging.getLogger(__name__)


@dataclass
class _Setbacks:
    """What went wrong since the last token came. `failures` are those that the request itself may have caused."""

    tried: list[str] = field(default_factory=list)
    failures: int = 0

    def add(self, generator_id: str, failure: InfrastructureFailure, *, progressed: bool) -> None:
        if progressed:
            self.tried, self.failures = [generator_id], 0
            return
        self.tried.append(generator_id)
        self.failures += not isinstance(failure, Unavailable)


class Generation:
    """Requests to the fleet. A generator may be silent for `silence_s` seconds and take `deadline_s` for all.

    `attempts` is how many failures in a row, without a token between them, are borne.
    """

    def __init__(
        self,
        *,
        http: HttpClient,
        fleet: GeneratorFleet,
        attempts: int,
        silence_s: float,
        deadline_s: float,
        backoff: Backoff,
        metrics: RolloutMetrics,
    ) -> None:
        self._http = http
        self._fleet = fleet
        self._attempts = attempts
        self._silence_s = silence_s
        self._deadline_s = deadline_s
        self._backoff = backoff
        self._metrics = metrics

    async def sample(self, request: GenerateRequest, progress: Progress) -> Sequence[Completion]:
        """All completions of a request, each finished, stamped and checked.

        Waits, with what was received, for as long as no generator serves or answers. Raises DataFailure when a
        generator refuses the request itself, InfrastructureFailure when the attempts are used up.
        """
        group = progress.sampling = CompletionGroup(request.n)
        await self._settle(Piece(tuple(group.completions)), request)
        return group.completions

    async def _settle(self, piece: Piece, request: GenerateRequest, *, avoid: Sequence[str] = ()) -> None:
        """Ask until all completions of a piece are finished. The generators in `avoid` have just failed."""
        setbacks = _Setbacks(tried=list(avoid))
        while True:
            generator = await self._fleet.choose(avoid=setbacks.tried)
            before = piece.received
            failure = await self._ask(generator, piece, request)
            rest = rest_of(piece, request.sampling)
            if not rest:
                return
            assert failure is not None, "a request that went well leaves no rest"
            # Compared without what was received in vain, which `rest_of` has thrown away.
            progressed = piece.received > before
            setbacks.add(generator.generator_id, failure, progressed=progressed)
            if setbacks.failures >= self._attempts:
                raise InfrastructureFailure(f"{setbacks.failures} attempts at generators failed, last: {failure}")
            if len(rest) > 1:
                await _beside_each_other(self._settle(each, request, avoid=setbacks.tried) for each in rest)
                return
            piece = rest[0]
            if not progressed:
                await self._backoff.pause(len(setbacks.tried))

    async def _ask(
        self, generator: ServingGenerator, piece: Piece, request: GenerateRequest
    ) -> InfrastructureFailure | None:
        """One request for a piece, and why it did not finish all of it. Raises DataFailure."""
        try:
            await self._attempt(generator, piece, request)
        except InfrastructureFailure as failure:
            self._metrics.generator_failures.inc(generator.generator_id)
            logger.debug("request to generator %s failed: %s", generator.generator_id, failure)
            return failure
        return None

    async def _attempt(self, generator: ServingGenerator, piece: Piece, request: GenerateRequest) -> None:
        whom = f"generator {generator.generator_id}"
        asked = piece.begin(request)
        with self._fleet.occupy(generator, completions=asked.n) as call, judged(call, whom=whom):
            if call.is_probe:
                await see_alive(self._http, generator.url)
            answer = self._http.stream(
                f"{generator.url.rstrip('/')}/v1/generate",
                asked,
                GeneratePart,
                deadline_s=self._deadline_s,
                idle_timeout_s=self._silence_s,
            )
            async with answer as parts:
                async for part in parts:
                    piece.take(part, generator_id=generator.generator_id)
                    call.succeeded()
            if not piece.ended:
                raise InfrastructureFailure(f"{whom}: its answer ended before all completions were finished")
        if any(completion.handed_back for completion in piece.completions):
            raise InfrastructureFailure(f"{whom} handed completions back")


async def _beside_each_other(works: Iterable[Coroutine[object, object, None]]) -> None:
    """Run all; the first failure cancels the others and is raised as it is."""
    try:
        async with asyncio.TaskGroup() as tasks:
            for work in works:
                tasks.create_task(work)
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
