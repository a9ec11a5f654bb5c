"""Logprobs of tokens that others give: what a teacher is asked for."""

import asyncio
import itertools
import math
import uuid
from collections.abc import Iterable

from generator.engine.engine import Engine, EngineGone
from generator.engine.gated_llm import HandedBack
from generator.engine.records import ScoredSequence
from generator.engine.refusals import RequestUnfit, RequestUntimely
from generator.serving import GeneratorMetrics, Serving
from protocol.generation import LogprobsAnswer, LogprobsRequest, SequenceLogprobs
from services.http.refusals import RequestRefused

_ROUNDS = 4


class LogprobScoring:
    """Answers `POST /v1/logprobs`. A request falls wholly under one version.

    Sequences that a commit met on their way are scored again, and so are those that are under an older version than
    others of their request. `tokenizer` is the fingerprint of the model's. Answers are signed by `instance`.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        serving: Serving,
        metrics: GeneratorMetrics,
        generator_id: str,
        instance: str,
        tokenizer: str,
        vocabulary_size: int,
        max_model_len: int,
    ) -> None:
        self._engine = engine
        self._serving = serving
        self._metrics = metrics
        self._generator_id = generator_id
        self._instance = instance
        self._tokenizer = tokenizer
        self._vocabulary_size = vocabulary_size
        self._max_model_len = max_model_len

    async def answer(self, request: LogprobsRequest) -> LogprobsAnswer:
        """The logprobs of all sequences. Raises RequestRefused."""
        self._check(request)
        with self._serving.occupied():
            scored, version = await self._under_one_version(request)
        self._metrics.scored(sum(map(len, request.sequences)))
        return LogprobsAnswer(
            generator_id=self._generator_id,
            instance=self._instance,
            policy_version=version,
            tokenizer=self._tokenizer,
            sequences=tuple(_body(one, request_id=request.request_id) for one in scored),
        )

    def _check(self, request: LogprobsRequest) -> None:
        self._serving.check_ready()
        for number, sequence in enumerate(request.sequences):
            self._serving.check_tokens(f"sequences.{number}", sequence)
            # The engine cannot but sample a token more.
            if len(sequence) >= self._max_model_len:
                raise RequestRefused(
                    422, "too_long",
                    f"sequences.{number}: {len(sequence)} tokens; this generator scores at most "
                    f"{self._max_model_len - 1}, one less than its engine.max_model_len",
                    field=f"sequences.{number}", expected=f"at most {self._max_model_len - 1}", got=len(sequence),
                )  # fmt: skip
        if request.top > self._vocabulary_size:
            raise RequestRefused(
                422, "top_too_large", f"top: {request.top} tokens of a vocabulary of {self._vocabulary_size}",
                field="top", expected=f"at most {self._vocabulary_size}", got=request.top,
            )  # fmt: skip

    async def _under_one_version(self, request: LogprobsRequest) -> tuple[list[ScoredSequence], str]:
        scored: dict[int, ScoredSequence] = {}
        pending = set(range(len(request.sequences)))
        for _ in range(_ROUNDS):
            scored.update(await self._round(request, sorted(pending)))
            versions = {one.version for one in scored.values()}
            agreed = versions.pop() if len(versions) == 1 else None
            if agreed is not None:
                return [scored[number] for number in range(len(request.sequences))], agreed
            newest = self._engine.version
            pending = {number for number, one in scored.items() if one.version != newest}
        raise RequestRefused(
            503, "weights_changed",
            f"request {request.request_id}: the weights changed under each of {_ROUNDS} attempts to score its "
            f"{len(request.sequences)} sequences: try again, with fewer of them",
        )  # fmt: skip

    async def _round(self, request: LogprobsRequest, numbers: Iterable[int]) -> dict[int, ScoredSequence]:
        async with asyncio.TaskGroup() as group:
            tasks = {number: group.create_task(self._one(request, number)) for number in numbers}
        results = {number: task.result() for number, task in tasks.items()}
        for result in results.values():
            if isinstance(result, RequestRefused):
                raise result
        return {number: result for number, result in results.items() if isinstance(result, ScoredSequence)}

    async def _one(self, request: LogprobsRequest, number: int) -> ScoredSequence | RequestRefused:
        """A sequence scored, or why it was not: raised, it would cancel the others in a group of errors."""
        request_id = f"{request.request_id}-{number}-{uuid.uuid4().hex[:8]}"
        try:
            return await self._engine.score(request_id=request_id, token_ids=request.sequences[number], top=request.top)
        except HandedBack as error:
            return RequestRefused(503, "handed_back", f"{error}: try another generator")
        except RequestUnfit as error:
            return RequestRefused(422, "engine_refused", f"request {request.request_id}: {error}")
        except (EngineGone, RequestUntimely, ValueError) as error:
            return RequestRefused(503, "engine", f"request {request.request_id}: {error}")


def _body(scored: ScoredSequence, *, request_id: str) -> SequenceLogprobs:
    """Raises RequestRefused for numbers that no client could use."""
    if not all(map(math.isfinite, itertools.chain(scored.logprobs, *scored.top_logprobs))):
        message = f"request {request_id}: the model gave a logprob that is not finite: check its weights and dtype"
        raise RequestRefused(503, "not_finite", message)
    return SequenceLogprobs(
        logprobs=scored.logprobs, top_token_ids=scored.top_token_ids, top_logprobs=scored.top_logprobs
    )
