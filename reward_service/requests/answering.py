"""The answer to `POST /v1/score`: whole or streamed as results finish, and the same one to a repeated request.

claim(key, body) -> unknown: the caller computes the answer and settles it; if it leaves instead, the next one does
                 -> under way: waits for that answer
                 -> known: the same answer, for as long as it is kept
                 -> known with another body: refused
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

import xxhash
from prometheus_client import Counter
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from protocol.rewards import ScoreRequest, ScoreResponse, ScoreResult
from reward_service.requests.scoring import Scorer
from reward_service.verifier.config import IdempotencyConfig
from services.http.bodies import streamed_answer
from services.http.refusals import RequestRefused

LINES = "application/x-ndjson"


class Claim:
    """State of a request's key: the `answer` there is, or else the caller's turn to `settle` one."""

    def __init__(self, answer: bytes | None) -> None:
        self.answer = answer
        self.settled: bytes | None = None
        self.keep = False

    def settle(self, answer: bytes, *, keep: bool) -> None:
        """Give the answer to those who wait for it, and to those who come later if it is to be kept."""
        self.settled, self.keep = answer, keep


class _Entry:
    def __init__(self, *, digest: bytes) -> None:
        self.digest = digest
        self.ended = asyncio.Event()
        self.answer: bytes | None = None
        self.settled_at = 0.0


class Repetitions:
    """The answers of late by key. `wait_s` bounds the wait for one that is under way; `clock` is in seconds."""

    def __init__(
        self, *, config: IdempotencyConfig, wait_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._config = config
        self._wait_s = wait_s
        self._clock = clock
        self._under_way: dict[str, _Entry] = {}
        self._settled: OrderedDict[str, _Entry] = OrderedDict()
        self._bytes = 0

    @asynccontextmanager
    async def claimed(self, *, key: str | None, body: bytes) -> AsyncIterator[Claim]:
        """The claim to a key. Without a key, always the caller's turn.

        Raises RequestRefused if the key is known with another body, or its answer takes too long.
        """
        if key is None:
            yield Claim(None)
            return
        digest = xxhash.xxh3_128_digest(body)
        known = await self._known(key, digest)
        if known is not None:
            yield Claim(known)
            return
        entry = self._under_way[key] = _Entry(digest=digest)
        claim = Claim(None)
        try:
            yield claim
        finally:
            del self._under_way[key]
            entry.answer = claim.settled
            entry.ended.set()
            if claim.keep:
                self._keep(key, entry)

    async def _known(self, key: str, digest: bytes) -> bytes | None:
        """The answer to the key, now or when it is there; None when it is this caller's turn."""
        while True:
            self._forget()
            if (settled := self._settled.get(key)) is not None:
                _check_same(key, settled, digest)
                return settled.answer
            if (entry := self._under_way.get(key)) is None:
                return None
            _check_same(key, entry, digest)
            await self._ended(key, entry)
            if entry.answer is not None:
                return entry.answer

    async def _ended(self, key: str, entry: _Entry) -> None:
        try:
            async with asyncio.timeout(self._wait_s):
                await entry.ended.wait()
        except TimeoutError:
            message = f"the first request with the key {key!r} was not answered in {self._wait_s:g} s: try again"
            raise RequestRefused(503, "under_way", message, retry_after_s=1.0) from None

    def _keep(self, key: str, entry: _Entry) -> None:
        entry.settled_at = self._clock()
        self._settled[key] = entry
        self._bytes += _size(entry)
        self._forget()

    def _forget(self) -> None:
        oldest = self._clock() - self._config.keep_s
        while self._settled:
            first = next(iter(self._settled.values()))
            crowded = len(self._settled) > self._config.max_answers or self._bytes > self._config.memory_mib << 20
            if first.settled_at > oldest and not crowded:
                return
            self._settled.popitem(last=False)
            self._bytes -= _size(first)


def _size(entry: _Entry) -> int:
    return len(entry.answer or b"")


def _check_same(key: str, entry: _Entry, digest: bytes) -> None:
    if entry.digest != digest:
        message = f"the Idempotency-Key {key!r} was used for another request: use a key for one request only"
        raise RequestRefused(409, "key_reused", message, field="Idempotency-Key")


class StreamedResults(Response):
    """An answer whose lines are what `opened` yields.

    A RequestRefused while it is opened is the answer's status. It is left when all is sent or the client has gone.
    """

    media_type = LINES

    def __init__(self, opened: AbstractAsyncContextManager[AsyncIterator[ScoreResult]]) -> None:
        super().__init__()
        self._opened = opened

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Open, send, close."""
        async with self._opened as results:
            await streamed_answer(results)(scope, receive, send)


# Results, and None after the last one.
_Finished = asyncio.Queue[ScoreResult | None]


@dataclass(frozen=True, kw_only=True)
class ScoreCall:
    """A request with its body as it came, and the key that names it, if it has one."""

    request: ScoreRequest
    body: bytes
    key: str | None


class RequestHandler:
    """Answers requests by a scorer. `repeated` counts those that were answered before."""

    def __init__(self, *, scorer: Scorer, repetitions: Repetitions, repeated: Counter) -> None:
        self._scorer = scorer
        self._repetitions = repetitions
        self._repeated = repeated

    async def whole(self, asked: ScoreCall) -> Response:
        """All results in the order of the items. Raises RequestRefused."""
        with self._scorer.admission.held(body_bytes=len(asked.body), items=len(asked.request.items)):
            async with self._repetitions.claimed(key=asked.key, body=asked.body) as claim:
                answer = self._known(claim) or _settle(claim, await self._scorer.score(asked.request))
        return Response(answer, media_type="application/json")

    def streamed(self, asked: ScoreCall) -> Response:
        """Results as they finish. The items of a client that leaves are taken back."""
        return StreamedResults(self._results(asked))

    @asynccontextmanager
    async def _results(self, asked: ScoreCall) -> AsyncIterator[AsyncIterator[ScoreResult]]:
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
