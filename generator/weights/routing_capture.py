"""The experts that tokens are sent to, captured in the worker of an engine, for who asks for them.

A router tells its choice for all tokens of a step. A row of them is kept by the token's place in the cache of keys and
values as well: a prompt that is found in the cache has the rows of who computed it. Told are, with each step's output
and by request, the rows of tokens that were not told before, from the first token of the prompt on: of what is computed
again, after a preemption, the first ones count.
"""

import logging
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import bind_routed_experts_capturer
from vllm.sampling_params import SamplingParams
from vllm.v1.kv_cache_interface import FullAttentionSpec

from protocol.routed_experts import MAX_CHOSEN, MAX_LAYERS, NARROW, ExpertRows

logger = logging.getLogger(__name__)

ASKED = {"headway_routed_experts": True}
"""Extra arguments of a request that wants the experts of its tokens."""
FROM = "headway_routed_experts_from"
"""The extra argument that names the first token of which it wants them."""


def asks_for_experts(params: SamplingParams | None) -> bool:
    """True if a request wants the experts of its tokens."""
    return params is not None and params.extra_args is not None and ASKED.items() <= params.extra_args.items()


def first_wanted(params: SamplingParams | None) -> int:
    """The first token whose experts a request wants, if it asks for any."""
    first = (params.extra_args or {}).get(FROM, 0) if params is not None else 0
    return first if isinstance(first, int) else 0


class NotCaptured(ValueError):
    """This engine's worker cannot tell the experts of tokens; the text says why."""


class RoutingCapture:
    """Of a worker whose steps are done when they return, as on a CPU: tells with each step's output the rows of the
    requests in it that ask for them, as a dictionary of them by request.
    """

    def __init__(self, runner: Any) -> None:
        """Hooks itself into vLLM's model runner and its model. Raises NotCaptured."""
        config = runner.vllm_config
        model = config.model_config
        layers, experts = model.get_total_num_hidden_layers(), model.get_num_experts()
        chosen = model.get_num_experts_per_tok()
        if not 0 < layers <= MAX_LAYERS or not 0 < chosen <= MAX_CHOSEN:
            raise NotCaptured(f"{layers} layers with {chosen} experts of a token in each are not told")
        if not config.model_config.enforce_eager:
            raise NotCaptured("engine.enforce_eager is false, and compiled layers call nobody")
        groups = runner.kv_cache_config.kv_cache_groups
        full = [number for number, group in enumerate(groups) if isinstance(group.kv_cache_spec, FullAttentionSpec)]
        if not full:
            raise NotCaptured("no layer keeps the keys and values of a whole sequence")
        self._runner, self._group = runner, full[0]
        self._layers: dict[int, int] = {}
        """Number of tokens that each layer has routed in this step."""
        most = config.scheduler_config.max_num_batched_tokens
        self._step = torch.zeros((most, layers, chosen), dtype=torch.int32)
        self._dtype = np.dtype(np.uint8 if experts <= NARROW else np.uint16)
        places = runner.kv_cache_config.num_blocks * groups[self._group].kv_cache_spec.block_size
        self._kept: ExpertRows = np.zeros((places, layers, chosen), dtype=self._dtype)
        self._told: dict[str, int] = {}
        self._pending: dict[str, ExpertRows] = {}
        self._failed = False
        try:
            bind_routed_experts_capturer(runner.model, self)
        except ValueError as error:
            raise NotCaptured(str(error)) from error
        self._execute, self._sample = runner.execute_model, runner.sample_tokens
        runner.execute_model, runner.sample_tokens = self._execute_model, self._sample_tokens

    def capture(self, layer_id: int, topk_ids: torch.Tensor) -> None:
        """Called by a router with its choice [tokens, k]."""
        count = topk_ids.shape[0]
        self._layers[layer_id] = count
        if count <= self._step.shape[0]:
            self._step[:count, layer_id] = topk_ids

    def _execute_model(self, step: Any, *args: Any, **kwargs: Any) -> Any:
        self._pending = {}
        self._layers.clear()
        found = self._execute(step, *args, **kwargs)
        for request in step.finished_req_ids:
            self._told.pop(request, None)
        if step.total_num_scheduled_tokens and not self._failed:
            self._pending = self._rows(step)
        if found is not None:
            self._attach(found)
        return found

    def _sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        found = self._sample(*args, **kwargs)
        self._attach(found)
        return found

    def _attach(self, output: Any) -> None:
        if self._pending:
            output.aux_output_connector_output, self._pending = self._pending, {}

    def _rows(self, step: Any) -> dict[str, ExpertRows]:
        """The rows that a step tells. Those of all its requests are kept first: one may have found in the cache
        what another computes in this very step.
        """
        batch = self._runner.input_batch
        total = step.total_num_scheduled_tokens
        if not self._layers or min(self._layers.values()) < total or max(self._layers.values()) > len(self._step):
            self._failed = True
            logger.error(
                "a step of %d tokens has routed %s in its layers: routed experts are told no more", total, self._layers
            )
            return {}
        rows = self._step[:total].numpy().astype(self._dtype)
        begun = 0
        spans: list[tuple[str, int, int, int]] = []
        for number, request in enumerate(batch.req_ids):
            count = step.num_scheduled_tokens[request]
            start = int(batch.num_computed_tokens_cpu[number])
            self._kept[self._places(number, start, start + count)] = rows[begun : begun + count]
            spans.append((request, number, start, start + count))
            begun += count
        return {
            request: self._kept[self._places(number, told, end)]
            for request, number, _, end in spans
            if (told := self._advanced(request, end)) is not None
        }

    def _advanced(self, request: str, end: int) -> int | None:
        """The place up to which a request's tokens were told before; None if there is nothing to tell."""
        if not asks_for_experts(self._runner.requests[request].sampling_params):
            return None
        told = self._told.get(request, 0)
        if told >= end:
            return None
        self._told[request] = end
        return told

    def _places(self, number: int, start: int, end: int) -> npt.NDArray[np.int64]:
        """In the cache, of tokens of the `number`-th request of the batch."""
        table = self._runner.input_batch.block_table[self._group]
        tokens = np.arange(start, end)
        blocks = table.block_table.np[number, tokens // table.block_size].astype(np.int64)
        places: npt.NDArray[np.int64] = blocks * table.block_size + tokens % table.block_size
        return places
