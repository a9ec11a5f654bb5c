"""A teacher behind the addresses of generators: token ids go out, logprobs at temperature 1 come back.

sequences ─▶ requests ─▶ endpoint ─▶ checked answer ─▶ logprobs
                ▲            └─ is gone, hangs, starts, is busy: the same request elsewhere, without end
                │            └─ fails, or answers nonsense: again, a few times
                └────────────┘  refuses: TeacherFailed, since it would refuse it again
"""

import asyncio
import logging
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from learner.teachers.config import TeacherConfig
from protocol.generation import MOST_SCORED_TOKENS, LogprobsAnswer, LogprobsRequest, SequenceLogprobs
from services.http.calls import Backoff, Breakers, Endpoints, fault_of, see_alive
from services.http.client import HttpClient, ServiceError, ServiceFailed, ServiceRefused, ServiceUnreachable
from services.http.metrics import Metrics


class TeacherMeasures:
    """Tokens that teachers have scored, requests that came to nothing, and how long steps waited for either."""

    def __init__(self, metrics: Metrics) -> None:
        self._tokens = metrics.counter("teacher_tokens", "Tokens scored by a teacher.", labels=("teacher",))
        self._failures = metrics.counter(
            "teacher_failures", "Requests to a teacher that came to nothing.", labels=("teacher", "endpoint")
        )
        self._waited = metrics.counter(
            "teacher_wait_seconds", "Time that steps waited for a teacher's logprobs.", labels=("teacher",)
        )

    def scored(self, teacher: str, tokens: int) -> None:
        """Notes an answer."""
        self._tokens.labels(teacher=teacher).inc(tokens)

    def failed(self, teacher: str, endpoint: str) -> None:
        """Notes a request without a usable answer."""
        self._failures.labels(teacher=teacher, endpoint=endpoint).inc()

    def waited(self, teacher: str, seconds: float) -> None:
        """Notes a wait of a step."""
        self._waited.labels(teacher=teacher).inc(seconds)


log = logging.getLogger(__name__)

_ATTEMPTS = 8
"""How often a request may fail after it was taken up."""
_MOST_SEQUENCES = 256
_LONGEST_PAUSE_S = 5.0


class TeacherFailed(RuntimeError):
    """A teacher's logprobs cannot be had. The text names the teacher, its counterpart, and what to do."""


@dataclass(frozen=True)
class TeacherTopLogprobs:
    """The likeliest tokens at each of tokens 1 to T - 1 of a sequence, the likeliest first, at temperature 1.

    `token_ids` int32 and `logprobs` float32, in nats, both [T - 1, top].
    """

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]


class RemoteTeacher:
    """Asks the generators of one teacher. `tokenizer` is the fingerprint of the learner's; `client` shows its token.

    At most `requests_at_once` requests for each address are under way. `breakers` are those of its addresses.
    Once all of them have failed there is a pause of `pause_s` seconds, twice as long each time.
    """

    def __init__(
        self,
        config: TeacherConfig,
        *,
        client: HttpClient,
        tokenizer: str,
        measures: TeacherMeasures,
        breakers: Breakers | None = None,
        pause_s: float = 0.2,
    ) -> None:
        self.config = config
        self._client = client
        self._tokenizer = tokenizer
        self._measures = measures
        urls = [url.rstrip("/") for url in config.urls]
        self._endpoints = Endpoints(urls, breakers=breakers or Breakers(f"teacher {config.name} at"))
        self._room = asyncio.Semaphore(config.requests_at_once * len(config.urls))
        self._backoff = Backoff(first_s=pause_s, max_s=_LONGEST_PAUSE_S)
        self._first_version: str | None = None
        self._changes = False
        self.answered_at = float("-inf")
        """When it last gave logprobs, in the event loop's time."""
        self.last_problem = "no request has ended yet"

    def __str__(self) -> str:
        return f"teacher {self.config.name} at {' or '.join(self.config.urls)}"

    async def logprobs(self, sequences: Sequence[NDArray[np.int32]]) -> list[NDArray[np.float32]]:
        """For each sequence of T tokens the logprobs of tokens 1 to T - 1, float32 [T - 1], in nats, at temperature 1.

        Waits without end for a teacher that is away. Raises TeacherFailed for what will not pass.
        """
        return [np.array(one.logprobs, dtype=np.float32) for one in await self._scored(sequences, top=0)]

    async def top_logprobs(self, sequences: Sequence[NDArray[np.int32]], *, top: int) -> list[TeacherTopLogprobs]:
        """For each sequence, at each of its tokens 1 to T - 1, the `top` tokens that the teacher holds likeliest there.

        Waits and raises as `logprobs` does.
        """
        return [
            TeacherTopLogprobs(
                token_ids=np.array(one.top_token_ids, dtype=np.int32),
                logprobs=np.array(one.top_logprobs, dtype=np.float32),
            )
            for one in await self._scored(sequences, top=top)
        ]

    async def _scored(self, sequences: Sequence[NDArray[np.int32]], *, top: int) -> list[SequenceLogprobs]:
        found: list[SequenceLogprobs] = []
        most_tokens = MOST_SCORED_TOKENS // max(1, top)
        longest = max(map(len, sequences), default=0)
        if longest > most_tokens:
            raise TeacherFailed(
                f"{self}: a sequence of {longest} tokens is too long for an answer with top {top}: at most "
                f"{most_tokens} are taken"
            )
        for part in _parts(sequences, most_tokens=min(most_tokens, self.config.request_tokens)):
            token_ids = tuple(tuple(one.tolist()) for one in part)
            request = LogprobsRequest(request_id=uuid.uuid4().hex, sequences=token_ids, top=top)
            async with self._room:
                answer = await self._answer(request)
            found += answer.sequences
            self._measures.scored(self.config.name, sum(map(len, part)))
        return found

    async def _answer(self, request: LogprobsRequest) -> LogprobsAnswer:
        tried: list[str] = []
        failures = rounds = 0
        while True:
            url = await self._endpoints.choose(avoid=tried)
            try:
                return await self._attempt(url, request)
            except ServiceError as error:
                if isinstance(error, ServiceRefused) and not _is_away(error):
                    raise self._refused(error) from error
                self._note(url, error)
                failures += not _is_away(error)
                if failures >= _ATTEMPTS:
                    raise TeacherFailed(
                        f"{self}: {failures} attempts at one request failed, last: {error}. Its log says why"
                    ) from error
            tried.append(url)
            if len(tried) >= len(self._endpoints):  # a pause only once all of them have been tried
                tried, rounds = [], rounds + 1
                await self._backoff.pause(rounds)

    async def _attempt(self, url: str, request: LogprobsRequest) -> LogprobsAnswer:
        with self._endpoints.call(url) as call:
            if call.is_probe:
                await see_alive(self._client, url)
            answer = await self._client.post(
                f"{url}/v1/logprobs", request, LogprobsAnswer, deadline_s=self.config.request_timeout_s
            )
            self._check(url, request, answer)
        self.answered_at = asyncio.get_running_loop().time()
        return answer

    def _refused(self, error: ServiceRefused) -> TeacherFailed:
        remedy = {
            401: "set the teacher's token to the generator's http.token",
            404: "is it a generator of this release?",
            422: "a teacher needs the learner's vocabulary, and an engine.max_model_len above the longest trajectory",
        }.get(error.status, "its log says more")
        return TeacherFailed(f"teacher {self.config.name} refuses: {error}. Remedy: {remedy}")

    def _check(self, url: str, request: LogprobsRequest, answer: LogprobsAnswer) -> None:
        wanted = [(len(sequence) - 1, request.top) for sequence in request.sequences]
        got = [(len(one.logprobs), len(next(iter(one.top_token_ids), ()))) for one in answer.sequences]
        if wanted != got:
            text = f"expected {len(wanted)} sequences of (logprobs, top) {_some(wanted)}, got {len(got)}: {_some(got)}"
            raise ServiceFailed(url, status=200, kind="bad_answer", message=text)
        if self.config.same_tokenizer and answer.tokenizer != self._tokenizer:
            raise TeacherFailed(
                f"teacher {self.config.name} at {url} has a tokenizer of fingerprint {answer.tokenizer}, the learner's "
                f"has {self._tokenizer}: its logprobs would be of other text. Use a teacher of the same tokenizer, or "
                "set same_tokenizer = false for it if token ids mean the same in both"
            )
        self._look_at_the_version(answer.policy_version)

    def _look_at_the_version(self, version: str) -> None:
        """Said once: one that changes may do so at every step."""
        self._first_version = self._first_version or version
        if version != self._first_version and not self._changes:
            self._changes = True
            log.warning(
                "teacher %s changes: it answered with version %s at first, now with %s; a resumed run that asks it "
                "again gets other logprobs", self.config.name, self._first_version, version,
            )  # fmt: skip

    def _note(self, url: str, error: ServiceError) -> None:
        self.last_problem = str(error)
        self._measures.failed(self.config.name, url)
        log.debug("a request to teacher %s failed: %s", self.config.name, error)


def _is_away(error: ServiceError) -> bool:
    """True if the request may be sent again at no risk: it was not taken up, or the connection broke on the way."""
    return fault_of(error) == "unavailable" or isinstance(error, ServiceUnreachable)


def _parts(sequences: Sequence[NDArray[np.int32]], *, most_tokens: int) -> Iterator[list[NDArray[np.int32]]]:
    """The sequences in order, in as few parts as have at most `most_tokens`, or a single sequence."""
    part: list[NDArray[np.int32]] = []
    for sequence in sequences:
        if part and (sum(map(len, part)) + len(sequence) > most_tokens or len(part) == _MOST_SEQUENCES):
            yield part
            part = []
        part.append(sequence)
    if part:
        yield part


def _some(values: Sequence[tuple[int, int]]) -> str:
    return ", ".join(map(str, values[:8])) + (", …" if len(values) > 8 else "")
