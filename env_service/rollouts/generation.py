"""Sampling of a prompt's completions on one of the generators; what one does not finish goes on at another.

request ─▶ piece ─▶ generator ─▶ parts ─▶ all finished
             ▲          └─ dies, hangs, drains ─▶ what is left: one piece of those without a token, one for each
             └──────────────────────────────────  of the others, beside each other
"""

import asyncio
import logging
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass, field

from env_service.rollouts.completions import BadAnswer, Completion, CompletionPiece, rest_of
from env_service.rollouts.fleet import GeneratorFleet
from env_service.rollouts.outcomes import InfrastructureFailure, RolloutMetrics, Unavailable, rollout_failures
from protocol.generation import GeneratePart, GenerateRequest
from protocol.messages import ServingGenerator
from services.http.backoff import Backoff
from services.http.client import HttpClient, ServiceFailed
from services.http.faults import see_alive
from services.tracing import Attribute, current_trace, note, span

logger = logging.getLogger(__name__)


@dataclass
class _Setbacks:
    """Failures since the last token came. `failures` are those that the request itself may have caused."""

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

    async def sample(self, request: GenerateRequest, completions: Sequence[Completion]) -> None:
        """Fill the completions of a request: each is `done` when it is finished, stamped and checked.

        Waits, with what was received, for as long as no generator serves or answers. Raises DataFailure when a
        generator refuses the request itself, InfrastructureFailure when the attempts are used up.
        """
        assert len(completions) == request.n, f"{len(completions)} completions of a request for {request.n}"
        with span("turn", completions=request.n):
            await self._settle(CompletionPiece(tuple(completions)), request)
            if current_trace():
                note(**_told(completions))

    async def _settle(self, piece: CompletionPiece, request: GenerateRequest, *, avoid: Sequence[str] = ()) -> None:
        """Ask until all completions of a piece are finished. The generators in `avoid` have just failed."""
        setbacks = _Setbacks(tried=list(avoid))
        while True:
            first = piece.completions[0]
            generator = await self._fleet.choose(avoid=setbacks.tried, prefer=first.prefers, rank=first.rank)
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
                await beside_each_other(self._settle(each, request, avoid=setbacks.tried) for each in rest)
                return
            piece = rest[0]
            if not progressed:
                await self._backoff.pause(len(setbacks.tried))

    async def _ask(
        self, generator: ServingGenerator, piece: CompletionPiece, request: GenerateRequest
    ) -> InfrastructureFailure | None:
        """Sends a request for a piece, and says why it did not finish all of it. Raises DataFailure."""
        try:
            await self._attempt(generator, piece, request)
        except InfrastructureFailure as failure:
            self._metrics.generator_failures.inc(generator.generator_id)
            logger.debug("request to generator %s failed: %s", generator.generator_id, failure)
            return failure
        return None

    async def _attempt(self, generator: ServingGenerator, piece: CompletionPiece, request: GenerateRequest) -> None:
        whom = f"generator {generator.generator_id}"
        asked = piece.begin(request)
        with rollout_failures(whom), self._fleet.occupy(generator, completions=asked.n) as call:
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
                    _take(piece, part, generator)
                    call.succeeded()
                    if piece.needs_no_more:
                        break
            if not piece.ended:
                raise _bad_answer(generator, "its answer ended before all completions were finished")
        if any(completion.handed_back for completion in piece.completions):
            raise InfrastructureFailure(f"{whom} handed completions back")


def _take(piece: CompletionPiece, part: GeneratePart, generator: ServingGenerator) -> None:
    try:
        piece.take(part, generator_id=generator.generator_id)
    except BadAnswer as error:
        raise _bad_answer(generator, str(error)) from error


def _told(completions: Sequence[Completion]) -> dict[str, Attribute]:
    """Facts of a turn for its span: sampled tokens, by whom, and of which versions."""
    versions = {span.version: None for each in completions for span in each.version_spans}
    return {
        "tokens": sum(len(each.token_ids) for each in completions),
        "generators": ",".join(sorted({name for each in completions for name in each.generator_ids})),
        "versions": ",".join(versions),
    }


def _bad_answer(generator: ServingGenerator, text: str) -> ServiceFailed:
    return ServiceFailed(generator.url, status=200, kind="bad_answer", message=text)


async def beside_each_other(works: Iterable[Coroutine[object, object, None]]) -> None:
    """Run all; the first failure cancels the others and is raised as it is."""
    try:
        async with asyncio.TaskGroup() as tasks:
            for work in works:
                tasks.create_task(work)
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
