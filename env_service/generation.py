"""Sampling of a prompt's completions on one of the generators, on another one if that fails."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from env_service.backoff import Backoff
from env_service.completions import Completion, CompletionGroup
from env_service.failures import InfrastructureFailure
from env_service.fleet import GeneratorFleet
from env_service.metrics import RolloutMetrics
from env_service.progress import Progress
from env_service.refusal import failure_of
from protocol.generation import GeneratePart, GenerateRequest
from protocol.messages import ServingGenerator
from services.http_client import HttpClient, ServiceError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sampled:
    """The completions of one prompt, and who sampled them."""

    completions: Sequence[Completion]
    generator_id: str


class Generation:
    """Requests to the fleet. A generator may be silent for `silence_s` seconds and take `deadline_s` for all."""

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

    async def sample(self, request: GenerateRequest, progress: Progress) -> Sampled:
        """All completions of a request, each finished, stamped and checked; waits until a generator serves.

        After a failure everything is sampled anew: to keep what was finished would favour short completions. Raises
        DataFailure when a generator refuses the request itself, InfrastructureFailure when the attempts are used up.
        """
        tried: list[str] = []
        while True:
            generator = await self._fleet.choose(avoid=tried)
            try:
                return await self._attempt(generator, request, progress)
            except InfrastructureFailure as failure:
                tried.append(generator.generator_id)
                self._fleet.failed(generator, why=str(failure))
                self._metrics.generator_failures.labels(generator_id=generator.generator_id).inc()
                logger.debug("generator %s failed: %s", generator.generator_id, failure)
                if len(tried) >= self._attempts:
                    raise InfrastructureFailure(
                        f"{len(tried)} attempts at generators failed, last: {failure}"
                    ) from failure
                await self._backoff.pause(len(tried))

    async def _attempt(self, generator: ServingGenerator, request: GenerateRequest, progress: Progress) -> Sampled:
        group = progress.sampling = CompletionGroup(request.n)
        url = f"{generator.url.rstrip('/')}/v1/generate"
        answer = self._http.stream(
            url, request, GeneratePart, deadline_s=self._deadline_s, idle_timeout_s=self._silence_s
        )
        try:
            with self._fleet.occupy(generator, completions=request.n):
                async with answer as parts:
                    async for part in parts:
                        group.take(part)
        except ServiceError as error:
            raise failure_of(f"generator {generator.generator_id}", error) from error
        if not group.finished:
            raise InfrastructureFailure("the generator's answer ended before all completions were finished")
        return Sampled(completions=group.completions, generator_id=generator.generator_id)
