"""Sampling sessions: samples accepted once, done by a sampler, and told to their clients in the order they end in.

A cursor of `retrieve_futures` holds the life of the learner that gave it: what is told is counted anew in each. Samples
that a former life accepted are failed then, which makes the client ask for new ones. A client waits for that without an
end, so that the names stay in the journal until it is known to have heard of them, over any number of lives.
"""

import asyncio
import contextlib
import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from pydantic import JsonValue

from learner.tenants.catalog import SamplingEntry
from learner.tenants.futures import ResultFuture
from learner.tenants.keys import Tenant
from learner.tenants.provenance import SequenceRecords
from learner.tenants.turns import TargetWeights
from protocol.tinker.bodies import SampleBody
from protocol.tinker.sampling import SampleAnswer, SampleRequest, write_sample

logger = logging.getLogger(__name__)

CLONE_SEQ_IDS = 1_000_000_000
"""Numbers of each client of a sampling session: the clients are told apart by them."""
_CURSOR_BITS = 40
LOST_STATUS = 410
"""Makes the SDK sample again."""


class SampleFailed(RuntimeError):
    """A completion that the sampler could not give. The text is for the client."""


class Sampler(Protocol):
    """Samples from adapters. Several requests may be under way; one that is cancelled stops."""

    async def offer(self, weights: TargetWeights) -> None:
        """Take note of new weights of a target. Completions that are under way on it go on with them."""

    async def sample(self, weights: TargetWeights, request: SampleRequest, *, namespace: str) -> SampleAnswer:
        """Sample from the target, whose weights are at least these; fetches what it does not hold.

        Keys and values are shared within a namespace alone. Raises SampleFailed, TinkerWireError.
        """

    async def forget(self, target_id: str) -> None:
        """Nobody samples from the target any more."""


@dataclass
class _SampleEnd:
    """The end of a sample as its client is told of it; `future` has its result, None for a sample of a former life.

    `known`: the client has heard that it is lost, in another way.
    """

    request_id: str
    completion: dict[str, JsonValue]
    future: ResultFuture | None = None
    known: bool = False

    @property
    def awaited(self) -> bool:
        """The client may wait for it still."""
        return not (self.known or (self.future is not None and self.future.retrieved_at is not None))


@dataclass
class _Feed:
    """Ends of samples of one client, in order; `first` is the number of the first one that is still here. `polls`: how
    many wait for its news.
    """

    first: int = 0
    polls: int = 0
    told: deque[_SampleEnd] = field(default_factory=deque)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def tell(self, end: _SampleEnd) -> None:
        self.told.append(end)
        self.news.set()

    def after(self, number: int) -> list[dict[str, JsonValue]]:
        """Ends from a number on; earlier ones have been read, and are dropped."""
        while self.told and self.first < number:
            self.told.popleft()
            self.first += 1
        return [end.completion for end in self.told]


@dataclass(frozen=True)
class AcceptedSample:
    """A sample of a sampling session, with the weights that its target has now."""

    future: ResultFuture
    entry: SamplingEntry
    weights: TargetWeights
    body: SampleBody
    request: SampleRequest


@dataclass(frozen=True)
class CompletionsUnderWay:
    """Completions of a sample that nobody has answered yet: whose, from which training model's weights, empty for the
    base model, and the time at which they began.
    """

    owner: str
    model_id: str
    completions: int
    began: float


class SamplingQueue:
    """Samples under way, and what their clients are told."""

    def __init__(
        self,
        *,
        sampler: Sampler,
        sequences: SequenceRecords,
        life: int,
        lost: Mapping[str, Iterable[str]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`lost`: names of samples that former lives accepted, by sampling session. `clock` is in seconds."""
        self._sampler, self._sequences, self._life = sampler, sequences, life
        self._feeds: dict[tuple[str, int], _Feed] = defaultdict(_Feed)
        self._running: dict[str, asyncio.Task[None]] = {}
        self._counts: dict[str, int] = defaultdict(int)
        self._clock = clock
        self.waiting: dict[str, CompletionsUnderWay] = {}
        """By request."""
        for session, request_ids in lost.items():
            for request_id in dict.fromkeys(request_ids):
                end = _SampleEnd(request_id, {"state": "failed", "request_id": request_id})
                self._feeds[session, clone_of(request_id)].tell(end)

    def full(self, tenant: Tenant) -> bool:
        """The tenant has as many samples under way as it may have."""
        return self.count(tenant.name) >= tenant.max_samples

    def count(self, owner: str) -> int:
        """Completions of a tenant under way."""
        return self._counts.get(owner, 0)

    def count_in(self, sample: AcceptedSample) -> None:
        """Count a sample, which is accepted now, as under way."""
        self._counts[sample.future.owner] += sample.request.samples

    def count_out(self, sample: AcceptedSample) -> None:
        """Count a sample as under way no more: it has ended, or could not be accepted."""
        self._counts[sample.future.owner] -= sample.request.samples

    def start(self, sample: AcceptedSample) -> None:
        """Sample, finish the future, and tell the client; the sample was counted in."""
        future, count = sample.future, sample.request.samples
        self.waiting[future.request_id] = CompletionsUnderWay(
            future.owner, sample.weights.model_id, count, self._clock()
        )
        task = asyncio.create_task(self._sample(sample))
        self._running[sample.future.request_id] = task
        task.add_done_callback(lambda _: self._ended(sample))

    def awaited(self) -> list[tuple[str, str]]:
        """Session and name of each sample that has not ended, or of whose end its client may not have heard."""
        ended = [end.request_id for feed in self._feeds.values() for end in feed.told if end.awaited]
        return [(request_id.rpartition(":")[0], request_id) for request_id in (*self._running, *ended)]

    def heard_of(self, session: str, request_id: str) -> None:
        """The client was told in another way that the sample is lost."""
        for (of, _), feed in self._feeds.items():
            for end in feed.told if of == session else ():
                end.known = end.known or end.request_id == request_id

    def cancel(self, request_id: str) -> None:
        """Stop a sample that its client has given up; nothing if it has ended."""
        task = self._running.get(request_id)
        if task is not None:
            task.cancel()

    def cancel_all(self, owner: str) -> None:
        """Stop all samples of a tenant."""
        for request_id in [name for name, each in self.waiting.items() if each.owner == owner]:
            self.cancel(request_id)

    async def completions(
        self, session: str, clone: int, cursor: int, timeout_s: float
    ) -> tuple[list[dict[str, JsonValue]], int]:
        """Ends of samples after the cursor, waited for if there are none, and the next cursor."""
        life, number = divmod(cursor, 1 << _CURSOR_BITS)
        feed = self._feeds[session, clone]
        feed.polls += 1
        try:
            found = feed.after(number if life == self._life else 0)
            if not found and timeout_s > 0:
                feed.news.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(timeout_s):
                        await feed.news.wait()
                found = feed.after(0)
        finally:
            feed.polls -= 1
            if not (feed.polls or feed.first or feed.told):  # a client may ask by any number
                self._feeds.pop((session, clone), None)
        return found, (self._life << _CURSOR_BITS) + feed.first + len(feed.told)

    def forget(self, session: str) -> None:
        """Drop what a session's clients would be told."""
        for key in [key for key in self._feeds if key[0] == session]:
            del self._feeds[key]

    async def close(self) -> None:
        """Stop all samples."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _sample(self, sample: AcceptedSample) -> None:
        future, namespace = sample.future, sample.entry.sampling_session_id
        try:
            answer = await self._sampler.sample(sample.weights, sample.request, namespace=namespace)
            names = sequence_ids(future.request_id, sample.request.samples)
            self._sequences.remember(
                future.owner,
                names,
                sample.request,
                answer.sequences,
                model_id=sample.weights.model_id,
                recorded=bool(sample.body.record_stability_info),
            )
            future.finish(write_sample(answer, sample.body))
        except SampleFailed as error:
            future.finish({"error": str(error), "category": "server"})
        except ValueError as error:
            future.finish({"error": str(error), "category": "user"})

    def _ended(self, sample: AcceptedSample) -> None:
        future = sample.future
        task = self._running.pop(future.request_id)
        self.waiting.pop(future.request_id, None)
        self.count_out(sample)
        problem = None if task.cancelled() else task.exception()
        if problem is not None:
            logger.error("a sample of %s failed", future.owner, exc_info=problem)
        future.finish({"error": f"the sampler failed: {problem or 'cancelled'}", "category": "server"})
        completion: dict[str, JsonValue] = {"state": "failed", "request_id": future.request_id}
        if isinstance(future.payload, bytes):
            completion |= {"state": "finished", "response_payload_uncompressed_size": len(future.payload)}
        end = _SampleEnd(future.request_id, completion, future)
        self._feeds[sample.entry.sampling_session_id, clone_of(future.request_id)].tell(end)


def sequence_ids(request_id: str, samples: int) -> list[str]:
    """Names of the sequences of a sample."""
    return [f"{request_id}:{number}" for number in range(samples)]


def clone_of(request_id: str) -> int:
    """The client, among those of a sampling session, that a sample is of."""
    return int(request_id.rpartition(":")[2]) // CLONE_SEQ_IDS
