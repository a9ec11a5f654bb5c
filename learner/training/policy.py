"""The policy: a causal language model of transformers that returns logprobs of chosen tokens of a packed row."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from learner.training.attention import ATTENTION_NAME, register_packed_attention
from learner.training.logprobs import Chunking, LogprobHead
from learner.training.packing import Microbatch


@dataclass(frozen=True)
class LogprobSettings:
    """How logprobs are computed: `temperature` divides the logits; `with_entropy` adds the entropy of each prediction."""

    temperature: float
    chunking: Chunking
    with_entropy: bool


class PolicyModel(nn.Module):
    """Wraps a causal language model; its parameters are named `causal_lm.` and then as Hugging Face names them."""

    PREFIX = "causal_lm."

    def __init__(self, causal_lm: nn.Module, *, settings: LogprobSettings) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self.settings = settings
        get_head, set_head = causal_lm.get_output_embeddings, causal_lm.set_output_embeddings
        assert callable(get_head), "a causal language model has an output projection"
        assert callable(set_head), "a causal language model has an output projection"
        linear = get_head()
        assert isinstance(linear, nn.Linear), f"an output projection of an unknown kind: {type(linear).__name__}"
        self._head_of = get_head
        set_head(LogprobHead.sharing(linear))

    def forward(self, microbatch: Microbatch) -> tuple[Tensor, Tensor | None]:
        """Logprobs [N] of the microbatch's targets with their gradient, and the entropy [N] of their predictions."""
        decoder = self.causal_lm.base_model
        assert isinstance(decoder, nn.Module), "the decoder is a module"
        hidden: Tensor = decoder(
            input_ids=microbatch.token_ids[None],
            position_ids=microbatch.positions[None],
            use_cache=False,
            packed_index=microbatch.index,
        ).last_hidden_state[0]
        head = self._head_of()
        logprobs, entropy = head(
            hidden.index_select(0, microbatch.rows),
            microbatch.targets,
            temperature=self.settings.temperature,
            chunking=self.settings.chunking,
            with_entropy=self.settings.with_entropy,
        )
        if not len(microbatch.rows):
            # A row that trains nothing still has to reach every parameter, or the ranks' collectives come apart.
            logprobs = logprobs + 0.0 * hidden.sum()
        return logprobs, entropy


def load_causal_lm(path: Path, *, dtype: torch.dtype) -> nn.Module:
    """The model in the directory `path`, with packed attention, in training mode. It is never fetched from a network."""
    register_packed_attention()
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation=ATTENTION_NAME, local_files_only=True
    )
    assert isinstance(model, nn.Module), "transformers returned something else than a module"
    return model.train()
