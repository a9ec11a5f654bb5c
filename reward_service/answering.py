"""The answer to `POST /v1/score`, whole or as results finish, and the same one to a request that is repeated."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from prometheus_client import Counter
from starlette.responses import Response

from protocol.rewards import ScoreRequest, ScoreResponse, ScoreResult
from reward_service.idempotency import Claim, Repetitions
from reward_service.scoring import Scorer
from reward_service.streaming import StreamedResults

# Results, and None after the last one.
_Finished = asyncio.Queue[ScoreResult | None]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request with its body as it came, and the key that names it, if it has one."""

    request: ScoreRequest
    body: bytes
    key: str | None


class Answering:
    """Answers requests by a scorer. `repeated` counts those that were answered before."""

    def __init__(self, *, scorer: Scorer, repetitions: Repetitions, repeated: Counter) -> None:
        self._scorer = scorer
        self._repetitions = repetitions
        self._repeated = repeated

    async def whole(self, asked: Asked) -> Response:
        """All results in the order of the items. Raises RequestRefused."""
        with self._scorer.admission.held(body_bytes=len(asked.body), items=len(asked.request.items)):
            async with self._repetitions.claimed(key=asked.key, body=asked.body) as claim:
                answer = self._known(claim) or _settle(claim, await self._scorer.score(asked.request))
        return Response(answer, media_type="application/json")

    def streamed(self, asked: Asked) -> Response:
        """Results as they finish. The items of a client that leaves are taken back."""
        return StreamedResults(self._results(asked))

    @asynccontextmanager
    async def _results(self, asked: Asked) -> AsyncIterator[AsyncIterator[ScoreResult]]:
        with self._scorer.admission.held(body_bytes=len(asked.body), items=len(asked.request.items)):
            async with self._repetitions.claimed(key=asked.key, body=asked.body) as claim:
                known = self._known(claim)
                if known is not None:
                    yield _each(ScoreResponse.model_validate_json(known).results)
                    return
                with self._scorer.admitted(asked.request):
                    async with asyncio.TaskGroup() as tasks:
                        finished = _Finished(maxsize=len(asked.request.items) + 1)
                        running = tasks.create_task(self._run(asked.request, claim, finished), name="results")
                        yield _taken(finished)
                        running.cancel()

    async def _run(self, request: ScoreRequest, claim: Claim, finished: _Finished) -> None:
        results: dict[int, ScoreResult] = {}

        def deliver(index: int, result: ScoreResult) -> None:
            results[index] = result
            finished.put_nowait(result)

        await self._scorer.run(request, deliver=deliver)
        ordered = tuple(results[index] for index in range(len(request.items)))
        _settle(claim, ScoreResponse(service_id=self._scorer.service_id, results=ordered))
        finished.put_nowait(None)

    def _known(self, claim: Claim) -> bytes | None:
        if claim.answer is not None:
            self._repeated.inc()
        return claim.answer


def _settle(claim: Claim, response: ScoreResponse) -> bytes:
    """An answer with an error of the infrastructure is not kept: a repetition may do better."""
    answer = response.model_dump_json().encode()
    failed = any(result.error is not None and result.error.kind == "infrastructure" for result in response.results)
    claim.settle(answer, keep=not failed)
    return answer


async def _each(results: Sequence[ScoreResult]) -> AsyncIterator[ScoreResult]:
    for result in results:
        yield result


async def _taken(finished: _Finished) -> AsyncIterator[ScoreResult]:
    while (result := await finished.get()) is not None:
        yield result
