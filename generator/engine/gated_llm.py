"""vLLM's AsyncLLM with one door for every request, whichever route it came by.

At the door the prefix cache is salted with the version that is served, and requests wait while a commit is under way.
At the place where vLLM hands out the engine's outputs, every part of a completion gets its version spans, and counters
go on: vLLM stamps each step's outputs with the version that the engine holds, and adds the spans to the last part of a
completion only. Work that can go on elsewhere after a death needs them with every part. Tokens come several at a time,
their logprobs packed (`packing.py`), and a first token waits for those that follow it, as all later ones do.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import OutputProcessor, RequestState

from generator.engine.adapter_stamps import longer, taken_stamp
from generator.engine.packing import pack_outputs, unpack, wants_sampled_only
from generator.engine.records import EngineCounters
from generator.engine.routed_experts import UntoldRows
from generator.weights.routing_capture import asks_for_experts
from protocol.adapters import AdapterSpan
from protocol.costs import CostSums

BEFORE_OTHERS = "headway_before_others"
"""In a prompt: it does not wait behind others. No client can say so."""
_FIRST = -1
"""vLLM's priority of such a one; all others have 0."""
ARRIVE_S = 0.02
"""From the engine's answer until those that wait for tokens have those that came before it."""


class SpannedRequestState(RequestState):  # type: ignore[misc]
    """A completion in flight whose every part carries the spans so far, and the logprobs of its tokens if those came
    packed: `sampled` are those that no part has carried yet. `adapter_spans`: versions of its adapter, if it has one.
    `untold`: routed experts that no part has carried yet, if they were asked for.
    """

    sampled: list[float] | None = None
    adapter_spans: tuple[AdapterSpan, ...] = ()
    untold: UntoldRows | None = None

    def make_request_output(
        self, new_token_ids: list[int], pooling_output: Any, finish_reason: Any, *args: Any, **kwargs: Any
    ) -> Any:
        begins = finish_reason is None and self.detokenizer is not None and self.sent_tokens_offset == 0
        if begins and self.detokenizer.num_output_tokens() < self.stream_interval:
            return None  # vLLM would send a part for the first token alone, which costs as much as one for many
        return super().make_request_output(new_token_ids, pooling_output, finish_reason, *args, **kwargs)

    def _new_completion_output(self, *args: Any, **kwargs: Any) -> CompletionOutput:
        output = super()._new_completion_output(*args, **kwargs)
        if output.weight_versions is None:
            output.weight_versions = self._weight_version_spans()
        if self.sampled is not None:
            output.logprobs, self.sampled = self.sampled, []
        output.adapter_spans = self.adapter_spans
        output.untold = self.untold  # outputs that wait for the client are merged, and their parts count on here
        return output


class CountingOutputProcessor(OutputProcessor):  # type: ignore[misc]
    """vLLM's processor, with spanned states, a count of tokens and a clock of idle time."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.idle = asyncio.Event()
        self.idle.set()
        self.packed = False
        self._started = time.monotonic()
        self._idle_since: float | None = self._started
        self._idle_s = 0.0
        self._tokens = 0
        self._completions = 0
        self._cached_tokens = 0
        self._cache_queries = 0

    def add_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        super().add_request(request, *args, **kwargs)
        state = self.request_states[request.request_id]
        state.__class__ = SpannedRequestState
        if asks_for_experts(request.sampling_params):
            state.untold = UntoldRows.of_request(request.sampling_params, prompt=state.prompt_len)
        if self.packed and wants_sampled_only(request.sampling_params):
            # They were gathered on their way: all that comes makes a part, but for a token alone.
            state.stream_interval = min(state.stream_interval, 2)

    def process_outputs(self, engine_core_outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        for output in engine_core_outputs:
            sampled = unpack(output)
            version = taken_stamp(output)
            rows, output.routed_experts = output.routed_experts, None
            self._tokens += len(output.new_token_ids)
            if (state := self.request_states.get(output.request_id)) is None:
                continue
            if rows is not None and state.untold is not None:
                state.untold.add(rows)
            if sampled is not None:
                state.sampled = sampled if state.sampled is None else state.sampled + sampled
            if version is not None:
                state.adapter_spans = longer(state.adapter_spans, version=version, tokens=len(output.new_token_ids))
        return super().process_outputs(engine_core_outputs, *args, **kwargs)

    def counters(self) -> EngineCounters:
        """Costs a walk over the requests in flight."""
        now = time.monotonic()
        waiting = sum(state.is_prefilling for state in self.request_states.values())
        idle_s = self._idle_s + (now - self._idle_since if self._idle_since is not None else 0.0)
        return EngineCounters(
            running=len(self.request_states) - waiting,
            waiting=waiting,
            tokens_total=self._tokens,
            completions_total=self._completions,
            cached_tokens_total=self._cached_tokens,
            cache_queries_total=self._cache_queries,
            idle_s=idle_s,
            uptime_s=now - self._started,
        )

    def _finish_request(self, req_state: RequestState) -> None:
        self._completions += 1
        self._cached_tokens += req_state.num_cached_tokens
        if _looked_up(req_state):
            self._cache_queries += req_state.prompt_len
        super()._finish_request(req_state)

    def _update_admission_stats(self) -> None:
        """vLLM calls it at each change of the set of requests."""
        super()._update_admission_stats()
        if not self.request_states:
            if self._idle_since is None:
                self._idle_since = time.monotonic()
                self.idle.set()
        elif self._idle_since is not None:
            self._idle_s += time.monotonic() - self._idle_since
            self._idle_since = None
            self.idle.clear()


def _looked_up(state: RequestState) -> bool:
    """True if the prefix cache was asked for its prompt: not, if it did not begin, or if its prompt is scored."""
    logprobs = state.logprobs_processor
    return not state.is_prefilling and (logprobs is None or logprobs.num_prompt_logprobs is None)


class TurnedAway(Exception):
    """A request that waited for the engine, and that the engine will not begin."""


class HandedBack(Exception):
    """A request that the generator has ended before its answer was there."""


def entered_under(prompt: Mapping[str, Any]) -> str:
    """The version that was served when a prompt came through the gate, by its salt."""
    return str(prompt["cache_salt"]).partition("/")[0]


class GatedLLM(AsyncLLM):  # type: ignore[misc]
    """Build it outside of the event loop's thread, with `from_engine_args`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.cache_version = ""
        self.policy_adapter: LoRARequest | None = None
        """Of every request, if there is one; see `PolicyAdapter`."""
        self._closed = False
        self._waiters: set[asyncio.Future[None]] = set()
        self._entering = 0
        self._none_entering = asyncio.Event()
        self._none_entering.set()
        packed = pack_outputs(kwargs["vllm_config"])
        super().__init__(*args, **kwargs)
        assert self.output_handler is None, "the output handler would hold on to the processor that is replaced here"
        self.output_processor = CountingOutputProcessor(
            self.renderer.tokenizer,
            log_stats=self.log_stats,
            stream_interval=self.vllm_config.scheduler_config.stream_interval,
        )
        self.output_processor.packed = packed

    def __del__(self) -> None:
        """The owner shuts the engine down; vLLM would try again while the interpreter is being torn down."""

    async def add_request(self, request_id: str, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        """Every route of vLLM ends here. Raises ValueError for a prompt that vLLM has not rendered to tokens, and
        TurnedAway.
        """
        if not isinstance(prompt, dict):
            raise ValueError(f"request {request_id}: a prompt must be a rendered one, got {type(prompt).__name__}")
        await self._through_the_gate()
        self._entering += 1
        self._none_entering.clear()
        try:
            if self.policy_adapter is not None:
                kwargs["lora_request"] = self.policy_adapter
            # vLLM's own routes take a client's word for it, and its scheduler would put off all others' requests.
            kwargs["priority"] = _FIRST if prompt.pop(BEFORE_OTHERS, False) else 0
            prompt["cache_salt"] = f"{self.cache_version}/{prompt.get('cache_salt') or ''}"
            return await super().add_request(request_id, prompt, *args, **kwargs)
        finally:
            self._entering -= 1
            if not self._entering:
                self._none_entering.set()

    async def _add_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        """Forgets one that cannot be sent, such as for a text that UTF-8 does not have: vLLM would keep it for ever,
        where it is of one completion.
        """
        try:
            await super()._add_request(request, *args, **kwargs)
        except BaseException:
            await self.abort(request.request_id, internal=True)
            raise

    async def close_gate(self) -> None:
        """New requests wait from now on; returns when those that came before are in the engine."""
        self._closed = True
        await self._none_entering.wait()

    def open_gate(self) -> None:
        self._closed = False
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    @property
    def waiting_at_the_gate(self) -> int:
        """Number of requests that wait for it to open."""
        return len(self._waiters)

    async def send_at_once(self) -> None:
        """Returns when the tokens that the engine held are here; it holds none until its next pause."""
        if self._closed or not self.output_processor.packed or await self.is_paused():
            return  # an engine that is paused holds nothing, and must not be resumed
        await self.resume_generation()
        # An engine looks for calls between two steps, and may have planned one more: these wait for both.
        for _ in range(2):
            await self.get_weight_version()
        await asyncio.sleep(ARRIVE_S)

    async def hand_back(self) -> None:
        """Ends every request: with what it has so far, and those that wait at the gate with TurnedAway.

        Waits for no answer of the engine.
        """
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(TurnedAway("the generator hands its requests back"))
        await self.abort(list(self.output_processor.external_req_ids))

    async def _through_the_gate(self) -> None:
        while self._closed:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.add(waiter)
            try:
                await waiter
            finally:
                self._waiters.discard(waiter)

    async def stop(self, *, timeout_s: float) -> None:
        """End the engine's process, killing it after `timeout_s`, and close the sockets to it."""
        # The task that hands out the engine's outputs would take this for a crash.
        if self.output_handler is not None:
            self.output_handler.cancel()
            await asyncio.wait([self.output_handler])
        await asyncio.to_thread(self.shutdown, timeout_s)
        self.engine_core.resources.ctx.destroy(linger=0)

    def counters(self) -> EngineCounters:
        counters: EngineCounters = self.output_processor.counters()
        return counters

    async def step_costs(self) -> CostSums | None:
        """CPU of the engine's steps so far; None where its scheduler does not count them."""
        if not self.output_processor.packed:
            await self.get_weight_version()
            return None
        return CostSums.model_validate_json(await self.engine_core.call_utility_async("headway_step_costs"))

    async def idle(self) -> None:
        """Return as soon as no request is in flight."""
        await self.output_processor.idle.wait()
