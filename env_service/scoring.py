"""Scoring of a group's completions by a reward service; what one does not score is asked of another.

items ─▶ endpoint ─▶ results ─▶ records by id, in the order of the items
  ▲          └─ fails, hangs, is gone: all of them again      └─ errors of the service: those again
  └───────────────────────────────────────────────────────────────┘
"""

import logging
from collections.abc import Collection, Sequence

from env_service.backoff import Backoff
from env_service.failures import InfrastructureFailure, Unavailable
from env_service.metrics import RolloutMetrics
from env_service.refusal import judged, see_alive
from env_service.reward_endpoints import RewardEndpoints
from protocol.rewards import ScoreItem, ScoreRequest, ScoreResponse, ScoreResult
from protocol.trajectories import RewardRecord
from services.http_client import HttpClient

logger = logging.getLogger(__name__)

_ANSWER_MARGIN_S = 5.0


class Scoring:
    """Requests to the reward services. `deadline_s` is for the scoring in one request, whose answer may take
    `margin_s` seconds longer.

    `attempts` is how many requests may fail after they were taken up, `item_attempts` how often an item may be answered
    with an error of the service. Services that do not answer at all are waited for without end.
    """

    def __init__(
        self,
        *,
        http: HttpClient,
        endpoints: RewardEndpoints,
        attempts: int,
        item_attempts: int,
        deadline_s: float,
        backoff: Backoff,
        metrics: RolloutMetrics,
        margin_s: float = _ANSWER_MARGIN_S,
    ) -> None:
        self._http = http
        self._endpoints = endpoints
        self._attempts = attempts
        self._item_attempts = item_attempts
        self._deadline_s = deadline_s
        self._backoff = backoff
        self._metrics = metrics
        self._margin_s = margin_s

    async def score(self, items: Sequence[ScoreItem]) -> list[RewardRecord]:
        """A record for each item, in order: a reward, or why there is none.

        Raises DataFailure when a service refuses the request itself, InfrastructureFailure when attempts are used up.
        """
        work = _Scored(items)
        tried: list[str] = []
        failures = 0
        while work.pending:
            url = await self._endpoints.choose(avoid=tried)
            try:
                work.take(await self._attempt(url, work), endpoint=url, final=work.answers + 1 >= self._item_attempts)
                self._metrics.rescored.inc(len(work.pending))
                tried = [url]
            except InfrastructureFailure as failure:
                failures += not isinstance(failure, Unavailable)
                tried.append(url)
                self._note(url, failure)
                if failures >= self._attempts:
                    reason = f"{failures} attempts at reward services failed, last: {failure}"
                    raise InfrastructureFailure(reason) from failure
                if len(tried) % len(self._endpoints) == 0:  # a pause only once all of them have been tried
                    await self._backoff.pause(len(tried) // len(self._endpoints))
        return [work.records[item.id] for item in items]

    async def _attempt(self, url: str, work: "_Scored") -> ScoreResponse:
        request = ScoreRequest(items=tuple(work.pending.values()), deadline_s=self._deadline_s)
        work.requests += 1
        with self._endpoints.call(url) as call, judged(call, whom="reward service"):
            if call.is_probe:
                await see_alive(self._http, url)
            deadline_s = self._deadline_s + self._margin_s
            response = await self._http.post(f"{url}/v1/score", request, ScoreResponse, deadline_s=deadline_s)
            if sorted(result.id for result in response.results) != sorted(work.pending):
                raise InfrastructureFailure(
                    f"{url} answered with {len(response.results)} results that are not those of the request"
                )
        return response

    def _note(self, url: str, failure: InfrastructureFailure) -> None:
        self._metrics.reward_failures.labels(endpoint=url).inc()
        logger.debug("request to the reward service at %s failed: %s", url, failure)


class _Scored:
    """The items of one group: what is still to be scored, and what came of the others."""

    def __init__(self, items: Collection[ScoreItem]) -> None:
        self.pending = {item.id: item for item in items}
        self.records: dict[str, RewardRecord] = {}
        self.requests = 0
        self.answers = 0

    def take(self, response: ScoreResponse, *, endpoint: str, final: bool) -> None:
        """Note the results. One that failed through no fault of its item stays pending, unless this is `final`."""
        self.answers += 1
        for result in response.results:
            if final or result.error is None or result.error.kind != "infrastructure":
                del self.pending[result.id]
                self.records[result.id] = _record(
                    result, service_id=response.service_id, endpoint=endpoint, attempts=self.requests
                )


def _record(result: ScoreResult, *, service_id: str, endpoint: str, attempts: int) -> RewardRecord:
    return RewardRecord(
        reward=result.reward,
        components=result.components,
        verifier=result.verifier,
        verifier_version=result.verifier_version,
        service_id=service_id,
        endpoint=endpoint,
        latency_s=result.latency_s,
        attempts=attempts,
        error_kind=result.error.kind if result.error else None,
        error=result.error.message if result.error else None,
    )
