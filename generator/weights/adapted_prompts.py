"""Logits of a prompt under its own request's adapter, where that is on the output projection.

vLLM takes the adapters of the tokens that are sampled in the same step: those of other requests, or, if there are
not as many, its engine dies. To be used in the worker's process.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from vllm.lora.layers import LogitsProcessorWithLoRA


def score_prompts_with_their_adapters(runner: Any) -> None:
    """Has a model runner do so from now on."""
    model = runner.get_model()
    layers = [layer for layer in model.modules() if isinstance(layer, LogitsProcessorWithLoRA)]
    score, logits = runner._get_prompt_logprobs_dict, model.compute_logits
    if not layers:
        return

    def scored(hidden_states: Tensor, num_scheduled_tokens: Mapping[str, int]) -> Any:
        def of_prompt(rows: Tensor) -> Any:
            first = (rows.storage_offset() - hidden_states.storage_offset()) // hidden_states.stride(0)
            with _with_adapter_of(layers[0].punica_wrapper, first):
                return logits(rows)

        model.compute_logits = of_prompt
        try:
            return score(hidden_states, num_scheduled_tokens)
        finally:
            model.compute_logits = logits

    runner._get_prompt_logprobs_dict = scored


@contextmanager
def _with_adapter_of(punica: Any, row: int) -> Iterator[None]:
    """Within it all rows get the adapter of the step's token in this row: a prompt is of one request."""
    slot = int(punica._token_lora_indices[row])

    def add(logits: Tensor, hidden: Tensor, downs: Tensor, ups: Tensor, scale: float, **_: Any) -> None:
        if slot >= 0:
            low = hidden.float() @ downs[slot, 0].float().T
            added = scale * low @ ups[slot, 0].float().T
            common = min(added.shape[1], logits.shape[1])  # they may be padded to different sizes
            logits[:, :common] += added[:, :common].to(logits.dtype)

    punica.add_lora_logits = add
    try:
        yield
    finally:
        del punica.add_lora_logits
