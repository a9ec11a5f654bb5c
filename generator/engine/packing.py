"""Tokens of completions on their way from the engine's process to this one: several at a time, their logprobs as ints
behind them.

vLLM sends each token of each completion by itself, with its logprob as three numpy arrays: one process encodes them
and the other decodes them, one by one, which is nearly all of the work for a token outside of the model. Here the
tokens of a completion that wants the logprob of the sampled token alone wait in the engine's process until they make a
part of an answer, and travel as

    token ids, the bits of their logprobs as int32, minus the number of tokens

which no list of token ids ends with. What wants more than that (logprobs of a prompt, of likeliest tokens, each token
at once) is left as it is. `PackingScheduler` holds and packs, in the engine's process; `unpack` is for this one.

    first token, last token ─────────────────────────▶ sent at once, with what is held of its completion
    tokens between them ─▶ held ─▶ `stream_interval` of one completion, or MAX_HELD_S ─▶ those of all are sent together

A message has one version for all that is in it. So nothing may be held across a change of weights: those change while
the engine is paused, and a pause is not complete before everything held was sent.
"""

import logging
import struct
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import vllm
from vllm.config import VllmConfig
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.engine.core import EngineCore
from vllm.v1.outputs import LogprobsLists

from generator.engine.adapter_stamps import AdapterStamps, tell_schedulers_of_adapters
from generator.engine.routed_experts import RoutedRows
from services.costs import CostTally

logger = logging.getLogger(__name__)

TRIED = "0.32.0"
"""The release of vLLM whose outputs were looked at."""

MAX_HELD_S = 2.0
"""Most seconds of output that are lost with an engine: a slow one gathers fewer than `stream_interval` tokens."""

_ONE_INT, _ONE_FLOAT = struct.Struct("i"), struct.Struct("f")


def internals_fault() -> str | None:
    """Reason for not packing the outputs of this vLLM; None if it is the one that was tried."""
    if vllm.__version__ != TRIED:
        return f"vLLM is {vllm.__version__}, and {TRIED} was tried"
    if EngineCoreOutput.__struct_fields__[:3] != ("request_id", "new_token_ids", "new_logprobs"):
        return f"an output of the engine holds {EngineCoreOutput.__struct_fields__[:3]} first"
    if LogprobsLists._fields[:2] != ("logprob_token_ids", "logprobs"):
        return f"the logprobs of a step are {LogprobsLists._fields}"
    return None


def pack_outputs(config: VllmConfig) -> bool:
    """Has the engine that is started with this config pack its outputs. False, with a warning, where it cannot."""
    fault = internals_fault()
    if fault is not None:
        logger.warning("tokens travel one by one within the generator, at several times the CPU for each: %s", fault)
        return False
    chosen = config.scheduler_config
    if chosen.scheduler_cls is not None:
        logger.warning("tokens travel one by one within the generator: vLLM has chosen %s", chosen.scheduler_cls)
        return False
    kind = PackingAsyncScheduler if chosen.async_scheduling else PackingScheduler
    chosen.scheduler_cls = f"{__name__}.{kind.__name__}"
    return True


def wants_sampled_only(params: SamplingParams | None) -> bool:
    """True if a request wants the logprobs of the tokens that were sampled, in parts, and of no others."""
    if params is None or not params.flat_logprobs or params.logprobs != 0 or params.detokenize:
        return False
    return params.prompt_logprobs is None and params.output_kind == RequestOutputKind.DELTA


def pack(output: EngineCoreOutput, token_ids: list[int], bits: list[int]) -> EngineCoreOutput:
    """The output with these tokens, and the bits of their logprobs behind them."""
    count = len(token_ids)
    assert len(bits) == count, f"{len(bits)} logprobs of {count} tokens"
    output.new_token_ids = [*token_ids, *bits, -count] if count else []
    output.new_logprobs = None
    return output


def unpack(output: EngineCoreOutput) -> list[float] | None:
    """Takes the logprobs off, each the very float32 that was sampled with; None if none are packed."""
    packed = output.new_token_ids
    if not packed or packed[-1] >= 0:
        return None
    count = -packed[-1]
    if count == 1:
        output.new_token_ids = packed[:1]
        return [*_ONE_FLOAT.unpack(_ONE_INT.pack(packed[1]))]
    output.new_token_ids = packed[:count]
    logprobs: list[float] = np.array(packed[count:-1], dtype=np.int32).view(np.float32).tolist()
    return logprobs


def _sampled(lists: LogprobsLists) -> list[int]:
    """The bits of the logprobs of sampled tokens, which are the first of each row."""
    bits: list[int] = np.ascontiguousarray(lists.logprobs[:, 0], dtype=np.float32).view(np.int32).tolist()
    return bits


class StepLogprobs:
    """The logprobs of a step in place of vLLM's, a row for each request: those of sampled tokens are taken out of
    numpy once for all, and not by three slices for each.
    """

    def __init__(self, lists: LogprobsLists) -> None:
        self.lists = lists
        self.bits = _sampled(lists)

    def slice_request(self, row: int, count: int) -> "Rows":
        """The part that the scheduler puts into an output."""
        return Rows(self, row, count)


class Rows(NamedTuple):
    """Of a step's logprobs those of one request."""

    step: StepLogprobs
    row: int
    tokens: int

    def lists(self) -> LogprobsLists:
        """The lists that vLLM would have put into the output."""
        return self.step.lists.slice_request(self.row, self.tokens)


def _bits(logprobs: Rows | LogprobsLists | None) -> list[int]:
    if isinstance(logprobs, Rows):
        return logprobs.step.bits[logprobs.row : logprobs.row + logprobs.tokens]
    return [] if logprobs is None else _sampled(logprobs)


@dataclass
class _WaitingOutput:
    """The waiting part of a completion, and the output that will carry it to `client`."""

    client: int
    output: EngineCoreOutput
    token_ids: list[int]
    bits: list[int]


class Holding:
    """Decides which of a scheduler's outputs go out with which step. `intervals` are those of the completions that are
    packed: how many tokens make a part.
    """

    def __init__(self) -> None:
        self.intervals: dict[str, int] = {}
        self._held: dict[str, _WaitingOutput] = {}
        self._oldest_s = 0.0
        self._full = False

    def __bool__(self) -> bool:
        """True if anything waits."""
        return bool(self._held)

    def pass_on(self, answers: dict[int, EngineCoreOutputs], *, at_once: bool, now_s: float) -> None:
        """Changes what a step would send, by client, into what it sends. `at_once`: nothing waits any longer."""
        for client, answer in answers.items():
            answer.outputs = [each for each in answer.outputs if not self._keeps(each, client=client, now_s=now_s)]
        if self._held and (at_once or self._full or now_s - self._oldest_s >= MAX_HELD_S):
            for held in self._held.values():
                output = pack(held.output, held.token_ids, held.bits)
                answers.setdefault(held.client, EngineCoreOutputs()).outputs.append(output)
            self._held.clear()
            self._full = False
        for client in [client for client, answer in answers.items() if _says_nothing(answer)]:
            del answers[client]

    def _keeps(self, output: EngineCoreOutput, *, client: int, now_s: float) -> bool:
        """Holds an output, or makes it ready to be sent."""
        interval = self.intervals.get(output.request_id)
        if interval is None:
            if isinstance(output.new_logprobs, Rows):
                output.new_logprobs = output.new_logprobs.lists()
            return False
        bits = _bits(output.new_logprobs)
        if interval > 1 and _is_plain(output):
            self._hold(output, bits, client=client, now_s=now_s)
            return True
        before = self._held.pop(output.request_id, None)
        if before is None:
            pack(output, output.new_token_ids, bits)
        else:
            pack(output, before.token_ids + output.new_token_ids, before.bits + bits)
        if output.finish_reason is not None:
            del self.intervals[output.request_id]
        return False

    def _hold(self, output: EngineCoreOutput, bits: list[int], *, client: int, now_s: float) -> None:
        held = self._held.get(output.request_id)
        if held is None:
            if not self._held:
                self._oldest_s = now_s
            held = self._held[output.request_id] = _WaitingOutput(client, output, [], [])
        held.token_ids += output.new_token_ids
        held.bits += bits
        self._full = self._full or len(held.token_ids) >= self.intervals[output.request_id]


def _is_plain(output: EngineCoreOutput) -> bool:
    """True if it holds tokens and their logprobs alone. A first token says more: how much of its prompt was cached."""
    return (
        output.finish_reason is None
        and output.prefill_stats is None
        and output.events is None
        and output.routed_experts is None
        and output.new_sampling_mask is None
    )


def _says_nothing(answer: EngineCoreOutputs) -> bool:
    return not answer.outputs and answer.finished_requests is None and answer.scheduler_stats is None


class _Packing:
    """Of a scheduler: its outputs, held and packed where the request wants no more than that."""

    requests: dict[str, Any]
    pause_state: PauseState
    aux_output_connector: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._holding = Holding()
        self._at_once = False
        self._stamps = AdapterStamps()
        self._routed = RoutedRows()
        self.costs = CostTally(3)
        """Of steps, by what each holds: itself, its sequences, and those of them that begin."""
        tell_schedulers_of_adapters()
        tell_step_costs()

    def adapter_loaded(self, request: LoRARequest) -> None:
        """The engine tells of it."""
        self._stamps.loaded(request)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self.costs.turn()
        step = super().schedule(*args, **kwargs)  # type: ignore[misc]
        if step.num_scheduled_tokens:
            self.costs.hold(1, len(step.num_scheduled_tokens), len(step.scheduled_new_reqs))
        self._stamps.planned(step)
        return step

    def add_request(self, request: Any) -> None:
        self._stamps.added(request)
        self._routed.added(request)
        if wants_sampled_only(request.sampling_params):
            self._holding.intervals[request.request_id] = request.sampling_params.stream_interval or 1
        super().add_request(request)  # type: ignore[misc]

    def set_pause_state(self, pause_state: PauseState) -> None:
        """While it is paused, nothing is held; to resume one that is not paused has it hold nothing from now on."""
        self._at_once = pause_state != PauseState.UNPAUSED or self.pause_state == PauseState.UNPAUSED
        self.costs.drop()  # weights are loaded now, or were
        super().set_pause_state(pause_state)  # type: ignore[misc]

    def has_requests(self) -> bool:
        """A pause is complete when it has none: so there is one more step, which sends what is held."""
        return super().has_requests() or (self._at_once and bool(self._holding))  # type: ignore[misc]

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        lists = model_runner_output.logprobs
        if lists is not None and lists.cu_num_generated_tokens is None:
            model_runner_output.logprobs = StepLogprobs(lists)
        if self.aux_output_connector is None:  # vLLM's own has its rows put onto outputs
            self._routed.note(model_runner_output.aux_output_connector_output)
        answers = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        for answer in answers.values():
            self._stamps.stamp(scheduler_output, answer.outputs)
            self._routed.take_off(answer.outputs)
        self._holding.pass_on(answers, at_once=self._at_once, now_s=time.monotonic())
        for answer in answers.values():
            self._routed.attach(answer.outputs)
        intervals = self._holding.intervals
        if len(intervals) > 2 * len(self.requests) + 256:
            self._holding.intervals = {name: intervals[name] for name in intervals.keys() & self.requests.keys()}
        if len(self._stamps) > 2 * len(self.requests) + 256:
            self._stamps.keep(self.requests)
        if len(self._routed) > 2 * len(self.requests) + 256:
            self._routed.keep(self.requests)
        return answers


def tell_step_costs() -> None:
    """Has vLLM's engine answer a call for what its steps have cost so far, as JSON of CostSums."""
    EngineCore.headway_step_costs = lambda engine: engine.scheduler.costs.sums().model_dump_json()


class PackingScheduler(_Packing, Scheduler):  # type: ignore[misc]
    """vLLM's scheduler, with packed outputs."""


class PackingAsyncScheduler(_Packing, AsyncScheduler):  # type: ignore[misc]
    """The one that plans a step while the one before runs."""
