"""The soak's engine in vLLM's place: a batch of completions, one token a step, in the generator's own process.

What vLLM's classes are asked for by `generator.engine` and `generator.weights` is here, and no more. The gate, the
calls with their deadlines, the transfer of weights, its proofs and all routes are the generator's own.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.soak.torch_policy import TorchPolicy
from generator.engine.options import EngineOptions
from generator.engine.records import EngineCounters, ScoredSequence
from protocol.generation import GeneratePart, Sampling
from protocol.trajectories import FinishReason, VersionSpan

if TYPE_CHECKING:
    from generator.weights.worker import WorkerExtension


class EngineDeadError(Exception):
    """The engine has died: this one dies with its process only."""


class EngineGenerateError(Exception):
    """A request failed."""


@dataclass(frozen=True)
class WeightTransferInitRequest:
    """Request to join a group."""

    init_info: dict[str, str]


@dataclass(frozen=True)
class TorchParams:
    """Of a request. `sampling` is None for one that asks for the logprobs of its prompt."""

    n: int = 1
    sampling: Sampling | None = None
    stream_interval: int = 32


@dataclass(frozen=True)
class TorchOutput:
    """Output of a request: parts of completions, or the logprobs of its prompt under one version."""

    outputs: list[GeneratePart] = field(default_factory=list)
    logprobs: tuple[float, ...] = ()
    version: str = ""


@dataclass(eq=False)
class EngineCompletion:
    """A completion of a request: all of its tokens, of which the first `told` were handed out."""

    index: int
    chance: torch.Generator
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    told: int = 0
    ended: FinishReason | None = None

    def add(self, token_id: int, logprob: float, *, version: str) -> None:
        """A token that the weights of `version` sampled."""
        at = len(self.token_ids)
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)
        start = self.spans.pop().start if self.spans and self.spans[-1].version == version else at
        self.spans.append(VersionSpan(version=version, start=start, end=at + 1))

    def part(self) -> GeneratePart:
        """The part that was not handed out yet."""
        since, self.told = self.told, len(self.token_ids)
        return GeneratePart(
            index=self.index,
            token_ids=tuple(self.token_ids[since:]),
            behavior_logprobs=tuple(self.logprobs[since:]),
            version_spans=tuple(self.spans),
            finish_reason=self.ended,
        )


@dataclass(eq=False)
class EngineRequest:
    """A request in the engine."""

    prompt: list[int]
    params: TorchParams
    completions: list[EngineCompletion]
    outputs: "asyncio.Queue[TorchOutput | None]" = field(default_factory=asyncio.Queue)

    @property
    def open(self) -> list[EngineCompletion]:
        """Completions that have not ended."""
        return [one for one in self.completions if one.ended is None]


class CountingOutputProcessor:
    """Requests in the engine, and counts of what it has sampled. Stands for generator.engine.gated_llm's."""

    def __init__(self, *_: object, **__: object) -> None:
        self.external_req_ids: dict[str, None] = {}
        self.idle = asyncio.Event()
        self.idle.set()
        self.tokens = 0
        self.completions = 0
        self._began = self._idle_since = time.monotonic()
        self._idle_s = 0.0

    def came(self, request_id: str) -> None:
        """A request is in the engine."""
        if not self.external_req_ids:
            self._idle_s += time.monotonic() - self._idle_since
        self.external_req_ids[request_id] = None
        self.idle.clear()

    def left(self, request_id: str) -> None:
        """A request has ended."""
        if request_id in self.external_req_ids:
            del self.external_req_ids[request_id]
        if not self.external_req_ids and not self.idle.is_set():
            self._idle_since = time.monotonic()
            self.idle.set()

    def counters(self) -> EngineCounters:
        """See there."""
        now = time.monotonic()
        return EngineCounters(
            running=len(self.external_req_ids),
            waiting=0,
            tokens_total=self.tokens,
            completions_total=self.completions,
            cached_tokens_total=0,
            cache_queries_total=0,
            idle_s=self._idle_s + (now - self._idle_since if self.idle.is_set() else 0.0),
            uptime_s=now - self._began,
        )


class AsyncLLM:
    """Stands for vLLM's. Steps run on the event loop: a step of the tiny policy takes less than a millisecond."""

    output_processor: CountingOutputProcessor

    def __init__(self, *, vllm_config: EngineOptions) -> None:
        options = vllm_config
        torch.set_num_threads(options.threads)
        self.policy = TorchPolicy.read(Path(options.model), positions=options.max_model_len)
        self.vllm_config = SimpleNamespace(
            scheduler_config=SimpleNamespace(stream_interval=options.stream_interval),
            parallel_config=SimpleNamespace(rank=0, tensor_parallel_size=1),
            model_config=None,
        )
        self.renderer = SimpleNamespace(tokenizer=None)
        self.log_stats = self.errored = False
        self.output_handler: asyncio.Task[None] | None = None
        self.engine_core = SimpleNamespace(
            pause_scheduler_async=self._pause, resources=SimpleNamespace(ctx=SimpleNamespace(destroy=_nothing))
        )
        self._worker = _worker(self.policy, self.vllm_config)
        self._version = options.initial_version
        self._seed = options.seed
        self._paused = False
        self._running: dict[str, EngineRequest] = {}
        self._work = asyncio.Event()

    @classmethod
    def from_engine_args(cls, options: EngineOptions) -> "AsyncLLM":
        """See vLLM."""
        return cls(vllm_config=options)

    def shutdown(self, timeout: float = 0) -> None:
        """See vLLM: there is no process to end."""

    # Requests

    async def add_request(self, request_id: str, prompt: Any, params: TorchParams, **_: object) -> EngineRequest:
        """See vLLM."""
        chances = [self._chance(params, index) for index in range(params.n)]
        completions = [EngineCompletion(index, chance) for index, chance in enumerate(chances)]
        running = self._running[request_id] = EngineRequest(prompt["prompt_token_ids"], params, completions)
        self.output_processor.came(request_id)
        if self.output_handler is None:
            self.output_handler = asyncio.create_task(self._steps(), name="engine")
        self._work.set()
        return running

    def _chance(self, params: TorchParams, index: int) -> torch.Generator:
        seed = params.sampling.seed if params.sampling is not None else None
        self._seed += 1
        return torch.Generator().manual_seed(self._seed if seed is None else seed + index)

    async def generate(
        self, prompt: Any, params: TorchParams, request_id: str, **_: object
    ) -> AsyncIterator[TorchOutput]:
        """See vLLM."""
        from generator.engine.gated_llm import TurnedAway

        try:
            running = await self.add_request(request_id, prompt, params)
        except TurnedAway as error:
            raise EngineGenerateError from error
        try:
            while (output := await running.outputs.get()) is not None:
                yield output
        finally:
            self._running.pop(request_id, None)
            self.output_processor.left(request_id)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """See vLLM: what has not ended does, with what it has."""
        for request_id in request_ids:
            if running := self._running.pop(request_id, None):
                for completion in running.open:
                    completion.ended = "abort"
                    running.outputs.put_nowait(TorchOutput([completion.part()]))
                running.outputs.put_nowait(None)

    # Steps

    async def _steps(self) -> None:
        while True:
            self._work.clear()
            if self._paused or not self._running:
                await self._work.wait()
            else:
                self._step()
                await asyncio.sleep(0)

    @torch.inference_mode()
    def _step(self) -> None:
        for request_id, running in list(self._running.items()):
            if running.params.sampling is None:
                self._score(running)
                del self._running[request_id]
        rows = [(running, one) for running in self._running.values() for one in running.open]
        for (running, completion), logits in zip(rows, self._logits(rows), strict=True):
            self._sample(running, completion, logits)
        for request_id, running in list(self._running.items()):
            if not running.open:
                running.outputs.put_nowait(None)
                del self._running[request_id]

    def _score(self, running: EngineRequest) -> None:
        logprobs = self.policy(torch.tensor([running.prompt]))[0, :-1].log_softmax(-1)
        found = logprobs.gather(1, torch.tensor(running.prompt[1:])[:, None])[:, 0]
        running.outputs.put_nowait(TorchOutput(logprobs=tuple(found.tolist()), version=self._version))
        running.outputs.put_nowait(None)

    def _logits(self, rows: Sequence[tuple[EngineRequest, EngineCompletion]]) -> Iterator[torch.Tensor]:
        """Logits of each row's next token."""
        if rows:
            texts = [torch.tensor(running.prompt + one.token_ids) for running, one in rows]
            logits = self.policy(torch.nn.utils.rnn.pad_sequence(texts, batch_first=True))
            yield from (logits[row, len(text) - 1] for row, text in enumerate(texts))

    def _sample(self, running: EngineRequest, completion: EngineCompletion, logits: torch.Tensor) -> None:
        sampling = running.params.sampling
        assert sampling is not None
        logprobs = (logits / sampling.temperature).log_softmax(-1)
        token_id = int(torch.multinomial(logprobs.exp(), 1, generator=completion.chance))
        completion.add(token_id, float(logprobs[token_id]), version=self._version)
        self.output_processor.tokens += 1
        if token_id in sampling.stop_token_ids:
            completion.ended = "stop"
        elif len(completion.token_ids) == sampling.max_tokens:
            completion.ended = "length"
        self.output_processor.completions += completion.ended is not None
        if completion.ended or len(completion.token_ids) - completion.told >= running.params.stream_interval:
            running.outputs.put_nowait(TorchOutput([completion.part()]))

    # Weights

    async def _pause(self, *, mode: str, clear_cache: bool) -> None:
        self._paused = True

    async def resume_generation(self) -> None:
        """See vLLM."""
        self._paused = False
        self._work.set()

    async def get_weight_version(self) -> str:
        """See vLLM."""
        return self._version

    async def update_weight_version(self, version: str) -> None:
        """See vLLM."""
        self._version = version

    async def init_weight_transfer_engine(self, request: WeightTransferInitRequest) -> None:
        """See vLLM."""
        engine = self._worker.weight_transfer_engine
        engine.init_transfer_engine(engine.init_info_cls(**request.init_info))

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = (), **_: object) -> list[Any]:
        """See vLLM: the one worker's answer."""
        with torch.inference_mode():
            return [getattr(self._worker, method)(*args)]


def _nothing(**_: object) -> None:
    """Of a context of sockets that is not there."""


def _worker(policy: TorchPolicy, config: SimpleNamespace) -> "WorkerExtension":
    """The generator's own extension of vLLM's worker, on a worker that has only what it asks for."""
    from generator.weights.transfer import HeadwayTransferEngine
    from generator.weights.worker import WorkerExtension

    worker = WorkerExtension()
    engine = HeadwayTransferEngine(SimpleNamespace(), config, torch.device("cpu"), policy)
    worker.weight_transfer_engine = engine
    worker.start_weight_update = engine.start_weight_update
    worker.update_weights = engine.update_weights
    worker.finish_weight_update = engine.finish_weight_update
    return worker


def scored_sequence(output: TorchOutput, *, entered_under: str, **_: object) -> ScoredSequence:
    """See generator.engine.answers."""
    version = output.version if output.version == entered_under else None
    return ScoredSequence(logprobs=output.logprobs, top_token_ids=(), top_logprobs=(), version=version)
