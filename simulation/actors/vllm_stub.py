"""vLLM without vLLM: the few classes on which the generator's real engine, gate and calls are built, scripted.

A completion's tokens come at a rate; each has a logprob that names the weights which the engine held when it was
sampled. A load takes time, and half of it the weights are neither the old ones nor the new.
"""

import asyncio
import importlib
import sys
import types
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from protocol.generation import GeneratePart
from simulation.actors.engine import EngineScripts, Truth, Worker, signer_of
from simulation.world.clock import active
from simulation.world.process import Process


class EngineDeadError(Exception):
    """The engine's process has died."""


class EngineGenerateError(Exception):
    """A request failed."""


@dataclass
class WeightTransferInitRequest:
    """Request to join a group."""

    init_info: dict[str, str]


@dataclass(eq=False)
class _Running:
    """A request: of each completion its tokens and spans so far."""

    prompt: list[int]
    sampling: Any
    n: int
    parts: "asyncio.Queue[list[GeneratePart] | None]" = field(default_factory=asyncio.Queue)
    aborted: bool = False


@dataclass(frozen=True)
class Output:
    """vLLM's RequestOutput, as far as it is read."""

    outputs: list[GeneratePart]
    logprobs: tuple[float, ...] = ()
    version: str = ""


class StubOutputProcessor:
    """Stands for generator.engine.gated_llm's."""

    def __init__(self, *_: object, **__: object) -> None:
        self.external_req_ids: dict[str, None] = {}
        self.idle = asyncio.Event()
        self.idle.set()
        self.tokens = 0
        self.began = active().now

    def counters(self) -> Any:
        """See there."""
        from generator.engine.records import EngineCounters

        return EngineCounters(
            running=len(self.external_req_ids), waiting=0, tokens_total=self.tokens, completions_total=0,
            cached_tokens_total=0, cache_queries_total=0, idle_s=0.0, uptime_s=active().now - self.began,
        )  # fmt: skip


class AsyncLLM:
    """Stands for vllm.v1.engine.async_llm.AsyncLLM. `script` says how the engine behaves."""

    cache_version: str

    def __init__(self, *_: object, **__: object) -> None:
        world = active()
        assert isinstance(world.current, Process)
        self.process = world.current
        self.script = world.part(EngineScripts).of(self.process)
        self.worker = Worker(self.process, self.script)
        self.script.worker, self.script.llm = self.worker, self
        self.output_handler = None
        self.renderer = types.SimpleNamespace(tokenizer=None)
        self.log_stats = False
        self.vllm_config = types.SimpleNamespace(scheduler_config=types.SimpleNamespace(stream_interval=2))
        self.engine_core = types.SimpleNamespace(
            pause_scheduler_async=self._pause, resources=types.SimpleNamespace(ctx=self)
        )
        self.requests: dict[str, _Running] = {}

    @classmethod
    def from_engine_args(cls, args: object) -> "AsyncLLM":
        """See vLLM."""
        return cls(vllm_config=None)

    @property
    def errored(self) -> bool:
        """True if the engine's process has died."""
        return self.script.dead

    def destroy(self, linger: int = 0) -> None:
        """Of the context of sockets."""

    def shutdown(self, timeout: float = 0) -> None:
        """See vLLM."""

    async def add_request(self, request_id: str, prompt: Any, params: Any = None, **_: object) -> _Running:
        """See vLLM."""
        await self.script.answer()
        if self.worker.paused_since is not None:
            self.script.broken("a pause is a pause", f"a request enters {self.process.name} in the middle of a commit")
        running = _Running(list(prompt["prompt_token_ids"]), params.sampling, params.n)
        self.requests[request_id] = running
        self.output_processor.external_req_ids[request_id] = None  # type: ignore[attr-defined]
        self.output_processor.idle.clear()  # type: ignore[attr-defined]
        return running

    async def generate(self, prompt: Any, params: Any, request_id: str, **_: object) -> AsyncIterator[Output]:
        """See vLLM."""
        from generator.engine.gated_llm import TurnedAway

        try:
            running = await self.add_request(request_id, prompt, params)
        except TurnedAway as error:
            raise EngineGenerateError from error
        try:
            if params.scores:
                yield await self._score(running)
                return
            await self.script.receive(running.n)
            async for parts in self.worker.sample(running):
                self.output_processor.tokens += sum(len(part.token_ids) for part in parts)  # type: ignore[attr-defined]
                yield Output(parts)
        finally:
            self._forget(request_id)

    async def _score(self, running: _Running) -> Output:
        if self.script.score_s:
            await asyncio.sleep(self.script.score_s)
        await self.worker.turn()
        version, logprobs = self.worker.version, self.worker.score(running.prompt)
        return Output([], logprobs=logprobs, version=version)

    def _forget(self, request_id: str) -> None:
        self.requests.pop(request_id, None)
        processor = self.output_processor  # type: ignore[attr-defined]
        processor.external_req_ids.pop(request_id, None)
        if not processor.external_req_ids:
            processor.idle.set()

    async def abort(self, request_ids: list[str]) -> None:
        """See vLLM."""
        for request_id in request_ids:
            if request_id in self.requests:
                self.requests[request_id].aborted = True
        self.worker.tell()

    async def get_weight_version(self) -> str:
        """See vLLM."""
        await self.script.answer()
        return self.worker.version

    async def update_weight_version(self, version: str) -> None:
        """See vLLM."""
        await self.script.answer()
        self.worker.stamp(version)

    async def _pause(self, *, mode: str, clear_cache: bool) -> None:
        await self.script.answer()
        self.worker.pause()

    async def resume_generation(self) -> None:
        """See vLLM."""
        await self.script.answer()
        self.worker.resume()

    async def init_weight_transfer_engine(self, request: WeightTransferInitRequest) -> None:
        """See vLLM."""
        await self.script.answer()
        self.worker.join(next(iter(request.init_info.values())))

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = (), **_: object) -> list[Any]:
        """See vLLM: one worker's answer."""
        await self.script.answer()
        answer = getattr(self.worker, method)(*args)
        return [await answer if asyncio.iscoroutine(answer) else answer]


@dataclass(frozen=True)
class Params:
    """Of a request; `scores`: it asks for the logprobs of its prompt."""

    n: int = 1
    sampling: Any = None
    scores: bool = False


def _signed(part: GeneratePart, *, instance: str, oldest_cache: Any) -> GeneratePart:
    world = active()
    assert isinstance(world.current, Process)
    world.part(Truth).signers[instance] = signer_of(world.current)
    signed: GeneratePart = part.signed(instance, oldest_cache=oldest_cache)
    return signed


def _answers() -> dict[str, object]:
    from generator.engine.records import ScoredSequence

    def scored_sequence(output: Output, *, entered_under: str, **_: object) -> ScoredSequence:
        version = output.version if output.version == entered_under else None
        return ScoredSequence(logprobs=output.logprobs, top_token_ids=(), top_logprobs=(), version=version)

    return {
        "adapter_answer": None,
        "adapter_sampling_params": None,
        "generate_part": _signed,
        "sampling_params": lambda *, n, sampling, **_: Params(n=n, sampling=sampling),
        "scored_sequence": scored_sequence,
        "scoring_params": lambda *, top=0: Params(scores=True),
    }


def install() -> None:
    """Puts the stubs where the generator looks for vLLM, before it is imported."""
    stubs: dict[str, dict[str, object]] = {
        "vllm": {},
        "vllm.distributed": {},
        "vllm.distributed.weight_transfer": {},
        "vllm.distributed.weight_transfer.base": {"WeightTransferInitRequest": WeightTransferInitRequest},
        "vllm.exceptions": {
            "GracefulHTTPError": type("GracefulHTTPError", (Exception,), {}),
            "VLLMClientError": type("VLLMClientError", (Exception,), {}),
        },
        "vllm.v1": {},
        "vllm.v1.engine": {},
        "vllm.v1.engine.exceptions": {
            "EngineDeadError": EngineDeadError, "EngineGenerateError": EngineGenerateError,
        },
        "vllm.v1.engine.async_llm": {"AsyncLLM": AsyncLLM},
        "vllm.outputs": {"CompletionOutput": object, "RequestOutput": object},
        "vllm.lora": {},
        "vllm.lora.request": {"LoRARequest": object},
        "vllm.v1.engine.output_processor": {"OutputProcessor": object, "RequestState": object},
        "generator.openai_routes": {"mount_openai_routes": None},
        "generator.engine.arguments": {
            "engine_args": lambda options, **_: options, "dtype_name": lambda config: "float32",
            "engine_kind": lambda config: "scripted", "capture_of_experts": lambda config: "none",
        },
        "generator.engine.answers": _answers(),
        "generator.engine.routed_experts": {"UntoldRows": object},
        "generator.weights.routing_capture": {"asks_for_experts": lambda params: False},
        "generator.engine.adapter_stamps": {"longer": None, "taken_stamp": None, "versioned": None},
        "generator.engine.socket_folder": {
            "make_socket_folder": lambda: None, "remove_socket_folder": lambda: None, "PREFIX": "",
        },
        "generator.engine.packing": {
            "pack_outputs": lambda config: False, "unpack": lambda output: None,
            "wants_sampled_only": lambda params: False,
        },
    }  # fmt: skip
    for name, members in stubs.items():
        module = types.ModuleType(name)
        for member, value in members.items():
            setattr(module, member, value)
        sys.modules[name] = module
    vars(importlib.import_module("generator.engine.gated_llm"))["CountingOutputProcessor"] = StubOutputProcessor
