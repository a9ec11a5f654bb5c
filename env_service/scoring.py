"""Scoring of a group's completions by a reward service, by another one if that fails."""

import itertools
import logging
from collections.abc import Sequence

from env_service.backoff import Backoff
from env_service.failures import InfrastructureFailure
from env_service.metrics import RolloutMetrics
from env_service.refusal import failure_of
from protocol.rewards import ScoreItem, ScoreRequest, ScoreResponse, ScoreResult
from protocol.trajectories import RewardRecord
from services.http_client import HttpClient, ServiceError

logger = logging.getLogger(__name__)

_ANSWER_MARGIN_S = 5.0
"""What the transfer of an answer may take beyond the deadline of the scoring itself."""


class Scoring:
    """Requests to the reward services at `urls`, which are taken in turn; `deadline_s` is for one request."""

    def __init__(
        self,
        *,
        http: HttpClient,
        urls: Sequence[str],
        attempts: int,
        deadline_s: float,
        backoff: Backoff,
        metrics: RolloutMetrics,
    ) -> None:
        self._http = http
        self._urls = itertools.cycle([f"{url.rstrip('/')}/v1/score" for url in urls])
        self._endpoints = len(urls)
        self._attempts = attempts
        self._deadline_s = deadline_s
        self._backoff = backoff
        self._metrics = metrics

    async def score(self, items: Sequence[ScoreItem]) -> list[RewardRecord]:
        """A record for each item, in order: a reward, or why there is none.

        Raises DataFailure when a service refuses the request itself, InfrastructureFailure when attempts are used up.
        """
        request = ScoreRequest(items=tuple(items), deadline_s=self._deadline_s)
        for failures in itertools.count(1):
            url = next(self._urls)
            try:
                return [_record(result) for result in await self._attempt(url, request)]
            except InfrastructureFailure as failure:
                self._metrics.reward_failures.inc()
                logger.warning("reward service failed: %s", failure)
                if failures >= self._attempts:
                    raise InfrastructureFailure(
                        f"{failures} attempts at reward services failed, last: {failure}"
                    ) from failure
            if failures % self._endpoints == 0:  # a pause only once all of them have been tried
                await self._backoff.pause(failures // self._endpoints)
        raise AssertionError("unreachable")

    async def _attempt(self, url: str, request: ScoreRequest) -> Sequence[ScoreResult]:
        deadline_s = self._deadline_s + _ANSWER_MARGIN_S
        try:
            results = (await self._http.post(url, request, ScoreResponse, deadline_s=deadline_s)).results
        except ServiceError as error:
            raise failure_of("reward service", error) from error
        if [result.id for result in results] != [item.id for item in request.items]:
            raise InfrastructureFailure(f"{url} answered with {len(results)} results that are not those of the request")
        return results


def _record(result: ScoreResult) -> RewardRecord:
    return RewardRecord(
        reward=result.reward,
        components=result.components,
        verifier=result.verifier,
        verifier_version=result.verifier_version,
        latency_s=result.latency_s,
        attempts=result.attempts,
        error_kind=result.error.kind if result.error else None,
        error=result.error.message if result.error else None,
    )
