"""Scores requests: every item in the lane of its own verifier, each with a reward or an error.

request -> admission: room for its items? -> batch: lanes, in turns with other requests -> results
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Self

from protocol.rewards import ScoreError, ScoreItem, ScoreRequest, ScoreResponse, ScoreResult
from protocol.trajectories import fault_of_reward
from reward_service.requests.admission import Admission, Room
from reward_service.requests.batch import ScoreBatch
from reward_service.requests.open_lanes import OpenLanes, open_lanes
from reward_service.requests.turns import Turns
from reward_service.verifier.config import ScoringConfig
from reward_service.verifier.lanes import Registry, ScoringMetrics
from reward_service.verifier.program import Sandbox
from reward_service.verifier.submission import MAX_MESSAGE_CHARS, Outcome, Score

logger = logging.getLogger(__name__)


_SHOWN_CHARS = 300


def _say(item: ScoreItem, error: ScoreError) -> None:
    """Once for each verifier and kind of fault, with the item: whoever wrote the verifier can then try it."""
    place = error.message.rpartition("(")[2] if error.message.endswith(")") else error.message.partition(":")[0]
    logger.warning(
        "verifier %s: %s; at the completion %s of the prompt %s with the arguments %s",
        item.verifier,
        error.message,
        _brief(item.completion),
        _brief(item.prompt),
        _brief(item.arguments),
        extra={"same": (item.verifier, error.kind, place)},
    )


def _fit_for_training(outcome: Outcome, *, verifier: str) -> Outcome:
    """The outcome, or an error in place of a reward on which nobody is to train: as in its result, but counted."""
    score = outcome.result
    if isinstance(score, ScoreError):
        return outcome
    fault = fault_of_reward(verifier=verifier, reward=score.reward, components=dict(score.components))
    if fault is None:
        return outcome
    return replace(outcome, result=ScoreError(kind="data", message=fault[:MAX_MESSAGE_CHARS]))


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


Deliver = Callable[[int, ScoreResult], None]


class Scorer:
    """The scoring of batches with the verifiers of a registry. A context manager: leaving it kills the workers.

    `service_id` is the name of this instance in its answers.
    """

    def __init__(
        self,
        *,
        registry: Registry,
        config: ScoringConfig,
        metrics: ScoringMetrics,
        service_id: str,
        sandbox: Sandbox | None = None,
    ) -> None:
        self._config = config
        self._metrics = metrics
        self._opening = open_lanes(registry=registry, config=config, metrics=metrics, sandbox=sandbox)
        self._stack = AsyncExitStack()
        self._lanes = OpenLanes(registry=registry, metrics=metrics)
        metrics.know(verifier.name for verifier in registry.all())
        self._turns = Turns()
        self.scored = 0
        """Items that have got a result, or an error."""
        self.service_id = service_id
        self.repeated_requests = metrics.repeated_requests
        room = Room(
            items=config.max_pending_items, bytes=config.max_pending_mib << 20, verifier_share=config.verifier_share
        )
        self.admission = Admission(
            room=room,
            pending=metrics.pending_items,
            waiting=metrics.waiting_items,
            label=lambda verifier: self._lanes.label(verifier),
            is_shared=lambda label: not self._lanes.judges_at_once(label),
        )

    async def __aenter__(self) -> Self:
        self._lanes = await self._stack.enter_async_context(self._opening)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def loaded(self) -> None:
        """Wait until all lanes have loaded what they need; until then their items wait. Raises UserError."""
        await self._lanes.loaded()

    @property
    def pending(self) -> int:
        """Items that have arrived and have no result yet."""
        return self.admission.items

    def workers(self) -> tuple[int, int]:
        """Number of worker processes at work, and of all."""
        return self._lanes.workers()

    async def drain(self, *, timeout_s: float) -> bool:
        """Take nothing new, and wait for what runs. Whether all of it has ended in time."""
        return await self.admission.drain(timeout_s=timeout_s)

    @contextmanager
    def admitted(self, request: ScoreRequest) -> Iterator[None]:
        """Places for the request's items, for as long as it takes.

        Raises RequestRefused if there are not so many, for the moment or at all, or the service is to end.
        """
        with self.admission.admitted(item.verifier for item in request.items):
            yield

    async def score(self, request: ScoreRequest) -> ScoreResponse:
        """A result for each item, in order. Every item has one by its deadline, at most the service's own.

        Raises RequestRefused.
        """
        results: list[ScoreResult | None] = [None] * len(request.items)
        with self.admitted(request):
            await self.run(request, deliver=results.__setitem__)
        return ScoreResponse(service_id=self.service_id, results=tuple(filter(None, results)))

    async def run(self, request: ScoreRequest, *, deliver: Deliver) -> None:
        """Score an admitted request; `deliver` is given each item's index and result as soon as it is there."""
        began = time.perf_counter()

        def finish(index: int, outcome: Outcome) -> None:
            deliver(index, self._result(request.items[index], outcome, began=began))

        longest_s = self._config.max_deadline_s
        batch = ScoreBatch(request=request, lanes=self._lanes, turns=self._turns, longest_s=longest_s, finish=finish)
        await batch.run()

    def _result(self, item: ScoreItem, outcome: Outcome, *, began: float) -> ScoreResult:
        latency_s = time.perf_counter() - began
        outcome = _fit_for_training(outcome, verifier=item.verifier)
        self.scored += 1
        self._metrics.count(outcome, verifier=self._lanes.label(item.verifier), latency_s=latency_s)
        score = outcome.result if isinstance(outcome.result, Score) else None
        if isinstance(outcome.result, ScoreError) and not outcome.cached:
            _say(item, outcome.result)
        return ScoreResult(
            id=item.id,
            verifier=item.verifier,
            verifier_version=outcome.version or self._lanes.version(item.verifier),
            reward=None if score is None else score.reward,
            components={} if score is None else dict(score.components),
            latency_s=latency_s,
            attempts=outcome.attempts,
            error=outcome.result if isinstance(outcome.result, ScoreError) else None,
            service_id=self.service_id,
            cached=outcome.cached,
            explanation="" if score is None else score.explanation,
        )
