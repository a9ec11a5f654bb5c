"""Logprobs of sampled tokens on their way from the engine's process to this one: as ints behind the tokens.

vLLM carries them as three numpy arrays for each token of each completion, which one process encodes and the other
decodes, one by one: more work than all the rest of a token's way. Here a step's output for a completion that wants the
logprob of the sampled token alone is

    token ids, the bits of their logprobs as int32, minus the number of tokens

which no list of token ids ends with. What wants more than that (logprobs of a prompt, of likeliest tokens) is left as
it is. `PackingScheduler` packs, in the engine's process; `unpack` is for this one.
"""

import logging
import struct
from typing import Any

import numpy as np
import vllm
from vllm.config import VllmConfig
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.outputs import LogprobsLists

log = logging.getLogger(__name__)

TRIED = "0.32.0"
"""The release of vLLM whose outputs were looked at."""

_ONE_INT, _ONE_FLOAT = struct.Struct("i"), struct.Struct("f")


def internals_fault() -> str | None:
    """Why the outputs of this vLLM are not packed; None if it is the one that was tried."""
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
        log.warning("logprobs travel one by one within the generator, at twice the CPU for each token: %s", fault)
        return False
    chosen = config.scheduler_config
    if chosen.scheduler_cls is not None:
        log.warning("logprobs travel one by one within the generator: vLLM has chosen %s", chosen.scheduler_cls)
        return False
    kind = PackingAsyncScheduler if chosen.async_scheduling else PackingScheduler
    chosen.scheduler_cls = f"{__name__}.{kind.__name__}"
    return True


def wants_sampled_only(params: SamplingParams | None) -> bool:
    """Whether a request wants the logprobs of the tokens that were sampled, in parts, and of no others."""
    if params is None or not params.flat_logprobs or params.logprobs != 0 or params.detokenize:
        return False
    return params.prompt_logprobs is None and params.output_kind == RequestOutputKind.DELTA


def pack(output: EngineCoreOutput) -> None:
    """Puts the logprobs of a step's tokens behind them."""
    bits = np.ascontiguousarray(output.new_logprobs.logprobs[:, 0], dtype=np.float32).view(np.int32)
    count = len(output.new_token_ids)
    assert len(bits) == count, f"{len(bits)} logprobs of {count} tokens"
    output.new_token_ids = [*output.new_token_ids, *bits.tolist(), -count]
    output.new_logprobs = None


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


class _Packing:
    """Of a scheduler: its outputs, packed where the request wants no more than that."""

    requests: dict[str, Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._packed: set[str] = set()

    def add_request(self, request: Any) -> None:
        if wants_sampled_only(request.sampling_params):
            self._packed.add(request.request_id)
        super().add_request(request)  # type: ignore[misc]

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        answers = super().update_from_output(*args, **kwargs)  # type: ignore[misc]
        for answer in answers.values():
            for output in answer.outputs:
                if output.new_logprobs is not None and output.new_token_ids and output.request_id in self._packed:
                    pack(output)
        if len(self._packed) > 2 * len(self.requests) + 256:
            self._packed.intersection_update(self.requests)
        return answers


class PackingScheduler(_Packing, Scheduler):  # type: ignore[misc]
    """vLLM's scheduler, with packed outputs."""


class PackingAsyncScheduler(_Packing, AsyncScheduler):  # type: ignore[misc]
    """The one that plans a step while the one before runs."""
