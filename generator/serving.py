"""A generator towards its callers: it checks requests, serves a version, counts what it hands out, and drains."""

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import get_args

from generator.engine.engine import Engine, EngineGone
from generator.engine.refusals import RequestUnfit, RequestUntimely
from protocol.costs import CostSums
from protocol.fleet import CommitResult, Condition
from protocol.generation import GeneratePart, GenerateRequest, GeneratorState
from protocol.trajectories import FinishReason
from services.http.metrics import Metrics, one_label
from services.http.refusals import RequestRefused
from services.http.waiting import QUIET_S, Waiting

logger = logging.getLogger(__name__)

_NO_WEIGHTS = "it sends them when it has loaded its own model, which its log tells"

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)


class GeneratorMetrics:
    """Counters of tokens and completions, gauges of load, and what weight syncs took."""

    def __init__(self, metrics: Metrics, *, engine: Engine) -> None:
        self._tokens = metrics.counter("generated_tokens", "Tokens handed out.")
        self._finished = metrics.counter(
            "completions",
            "Completions finished, by reason.",
            labels=("finish_reason",),
            known=one_label(*get_args(FinishReason)),
        )
        self._scored = metrics.counter("scored_tokens", "Tokens given by others whose logprobs were handed out.")
        self._commits = metrics.counter("commits", "Versions committed.")
        self._failures = metrics.counter(
            "sync_failures",
            "Steps of a weight sync that failed, by step.",
            labels=("step",),
            known=one_label("group", "prepare", "pull", "commit", "probe"),
        )
        self._pulled = metrics.counter(
            "pulled_bytes",
            "Bytes of the learner's tree of weights that came, by source.",
            labels=("source",),
            known=one_label("learner", "relay"),
        )
        self._healed = metrics.counter(
            "healed_buckets", "Buckets that the tree of weights did not yield, brought whole."
        )
        self._version = metrics.gauge("policy_version", "Number of the policy version served; -1 before the first.")
        self._pause = metrics.histogram(
            "commit_pause_seconds", "How long no token was sampled for a commit.", buckets=_SECONDS
        )
        self._load = metrics.histogram("commit_load_seconds", "Loading time of a commit.", buckets=_SECONDS)
        self._version.set(-1)
        running = metrics.gauge("running_requests", "Completions being sampled.")
        running.set_function(lambda: engine.counters().running)
        waiting = metrics.gauge("waiting_requests", "Completions that have no token yet.")
        waiting.set_function(lambda: engine.counters().waiting)
        self._engine = engine
        self._occupancy = metrics.gauge(
            "occupancy_ratio", "Completions being sampled, of as many as are sampled at once (engine.max_num_seqs)."
        )
        metrics.count("idle_seconds", "Time without any request.", lambda: engine.counters().idle_s)
        metrics.count(
            "prefix_cache_queries",
            "Prompt tokens of finished completions that were looked up in the prefix cache.",
            lambda: engine.counters().cache_queries_total,
        )
        metrics.count(
            "prefix_cache_hits",
            "Prompt tokens that the prefix cache held, so that they were not computed.",
            lambda: engine.counters().cached_tokens_total,
        )

    def places(self, sequences: int) -> None:
        """Shows from now on how many of so many sequences are sampled."""
        self._occupancy.set_function(lambda: self._engine.counters().running / sequences)

    def parts(self, parts: Sequence[GeneratePart]) -> None:
        """Notes tokens handed out."""
        self._tokens.inc(sum([len(part.token_ids) for part in parts]))
        for part in parts:
            if part.finish_reason is not None:
                self._finished.labels(finish_reason=part.finish_reason).inc()

    def sampled(self, completions: Sequence[tuple[int, FinishReason]]) -> None:
        """Notes completions that were handed out whole: how many tokens, and why they ended."""
        for tokens, reason in completions:
            self._tokens.inc(tokens)
            self._finished.labels(finish_reason=reason).inc()

    def scored(self, tokens: int) -> None:
        """Notes tokens of others whose logprobs were handed out."""
        self._scored.inc(tokens)

    def committed(self, committed: CommitResult, *, number: int) -> None:
        """Notes a commit."""
        self._commits.inc()
        self._version.set(number)
        self._pause.observe(committed.pause_s)
        self._load.observe(committed.load_s)

    def pulled(self, source: str, nbytes: int) -> None:
        """Notes what came of the tree of weights from `learner` or `relay`."""
        self._pulled.labels(source=source).inc(nbytes)

    def healed(self) -> None:
        """Notes a bucket that was brought whole."""
        self._healed.inc()

    def sync_failed(self, step: str) -> None:
        """Notes a weight sync that failed at `step`."""
        self._failures.labels(step=step).inc()


class Serving:
    """Checks requests and passes them to the engine. `vocabulary_size` and `max_model_len` bound what is taken."""

    def __init__(
        self,
        *,
        engine: Engine,
        generator_id: str,
        vocabulary_size: int,
        max_model_len: int,
        max_waiting_requests: int,
        metrics: GeneratorMetrics,
    ) -> None:
        self._engine = engine
        self._generator_id = generator_id
        self._vocabulary_size = vocabulary_size
        self._max_model_len = max_model_len
        self._max_waiting_requests = max_waiting_requests
        self._metrics = metrics
        self._in_flight = 0
        self._draining = False
        self._stalled = False
        self._version: str | None = None
        self._version_changed = asyncio.Event()
        self._news = asyncio.Event()

    @property
    def version(self) -> str | None:
        """The version served; None until the first commit, and after a load that failed midway."""
        return self._version

    def holds(self, version: str | None) -> None:
        """The engine holds whole weights of this version from now on, or none."""
        self._version = version
        self._version_changed.set()
        self._news.set()

    @property
    def step_costs(self) -> CostSums | None:
        """Costs of the engine's steps so far; None if they are not counted."""
        return self._engine.step_costs

    @property
    def condition(self) -> Condition:
        """Tells others what it takes now: weights and requests, or neither."""
        if self._draining:
            return "leaving"
        return "stalled" if self._stalled else "able"

    def stall(self) -> None:
        """The engine does not answer: nothing is taken."""
        self._stalled = True
        self._news.set()

    def answers(self) -> None:
        """The engine answers."""
        if self._stalled:
            logger.info("the engine answers again")
            self._stalled = False
            self._news.set()

    async def news(self, *, within_s: float) -> None:
        """Returns when others should hear of a change, or after `within_s`. For one caller."""
        try:
            async with asyncio.timeout(within_s):
                await self._news.wait()
        except TimeoutError:
            return
        self._news.clear()

    async def watch_weights(self, waits: Waiting) -> None:
        """Tells `waits` when there are no weights to serve, until cancelled."""
        while True:
            self._version_changed.clear()
            if self._version is None:
                with waits.wait("weights of the learner", quiet_s=QUIET_S, remedy=_NO_WEIGHTS):
                    await self._version_changed.wait()
            else:
                await self._version_changed.wait()

    @property
    def ready(self) -> bool:
        """True if requests are taken."""
        return self._version is not None and self.condition == "able" and self._engine.is_alive

    @property
    def engine_is_alive(self) -> bool:
        """True if the engine's process lives."""
        return self._engine.is_alive

    def check_ready(self) -> None:
        """Raises RequestRefused if no request is taken now, whatever it asks for."""
        if self._draining:
            raise RequestRefused(503, "draining", "this generator is stopping: try another one")
        if self._stalled:
            raise RequestRefused(503, "stalled", "this generator's engine does not answer: try another one")
        if not self.ready:
            raise RequestRefused(503, "not_serving", "this generator holds no weights of a learner yet: try again")
        if self._in_flight >= self._max_waiting_requests:
            raise RequestRefused(429, "busy", f"{self._in_flight} requests are here already: try another generator")

    def check(self, request: GenerateRequest) -> None:
        """Raises RequestRefused for a request that cannot be served, before any of it is."""
        self.check_ready()
        self.check_tokens("prompt_token_ids", request.prompt_token_ids)
        self.check_tokens("sampling.stop_token_ids", request.sampling.stop_token_ids)
        self.check_length(len(request.prompt_token_ids), request.sampling.max_tokens)
        _check_sampling(request)

    def check_tokens(self, field: str, token_ids: tuple[int, ...]) -> None:
        """Raises RequestRefused for a token that the model does not have."""
        largest = max(token_ids, default=0)
        if largest >= self._vocabulary_size:
            raise RequestRefused(
                422, "token_out_of_range", f"{field}: token id {largest} is not in the vocabulary",
                field=field, expected=f"ids below {self._vocabulary_size}", got=largest,
            )  # fmt: skip

    def check_length(self, prompt: int, most: int) -> None:
        """Raises RequestRefused for a prompt of so many tokens that has no room for `most` more."""
        if prompt + most > self._max_model_len:
            raise RequestRefused(
                422, "too_long",
                f"prompt_token_ids: {prompt} tokens and max_tokens {most} together exceed the {self._max_model_len} "
                "tokens of this generator",
                field="prompt_token_ids", expected=f"at most {self._max_model_len} in all", got=prompt + most,
            )  # fmt: skip

    async def generate(self, request: GenerateRequest) -> AsyncIterator[tuple[GeneratePart, ...]]:
        """Parts of all completions, as they come together; to be used within `occupied`. The engine gets its own ids:
        clients may repeat theirs.
        """
        try:
            parts = self._engine.generate(
                request_id=f"{request.request_id}-{uuid.uuid4().hex[:8]}",
                prompt_token_ids=request.prompt_token_ids,
                n=request.n,
                sampling=request.sampling,
                routed_experts=request.routed_experts,
                routed_experts_from=request.routed_experts_from,
            )
            async with aclosing(parts):
                async for some in parts:
                    self._metrics.parts(some)
                    yield some
        except RequestUnfit as error:
            raise RequestRefused(422, "engine_refused", f"request {request.request_id}: {error}") from error
        except (EngineGone, RequestUntimely, ValueError) as error:
            raise RequestRefused(503, "engine", f"request {request.request_id}: {error}") from error

    @contextmanager
    def occupied(self) -> Iterator[None]:
        """Counts a request as being here while the body runs."""
        self._in_flight += 1
        try:
            yield
        finally:
            self._in_flight -= 1

    def leave(self) -> None:
        """Nothing new is taken from now on."""
        self._draining = True
        self._news.set()

    async def drain(self, *, timeout_s: float) -> None:
        """Leaves, lets what runs finish, and hands back what has not: each completion ends with a part that
        holds what was not yet sent, and "abort".
        """
        self.leave()
        if not await self._engine.drain(timeout_s=timeout_s):
            logger.info("%d requests did not finish within %.0f s and are handed back", self._in_flight, timeout_s)
        await self._engine.hand_back()

    def state(self) -> GeneratorState:
        """The answer to `GET /v1/state`."""
        counters = self._engine.counters()
        return GeneratorState(
            generator_id=self._generator_id,
            serving=self.ready,
            policy_version=self._version,
            running=counters.running + counters.waiting,
            waiting=counters.waiting,
            tokens_generated=counters.tokens_total,
            idle_s=counters.idle_s,
            uptime_s=counters.uptime_s,
        )


def _check_sampling(request: GenerateRequest) -> None:
    forbidden = request.sampling.forbidden_in_training()
    if request.purpose == "train" and forbidden:
        raise RequestRefused(
            422, "forbidden_in_training",
            f"sampling: {', '.join(forbidden)} would sample from another distribution than the learner's full "
            "softmax; leave them out, or ask with purpose 'evaluate'",
            field=f"sampling.{forbidden[0]}",
        )  # fmt: skip
    if request.n > 1 and request.sampling.temperature == 0:
        raise RequestRefused(
            422, "greedy_repeated", "n: greedy sampling gives the same completion each time",
            field="n", expected="1 at temperature 0", got=request.n,
        )  # fmt: skip
