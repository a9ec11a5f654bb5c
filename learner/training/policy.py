"""The policy: a causal language model of transformers that returns logprobs of chosen tokens of a packed row."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from learner.training.attention import ATTENTION_NAME, register_packed_attention
from learner.training.logprobs import Chunking, LogprobHead
from learner.training.packing import Microbatch


@dataclass(frozen=True)
class LogprobSettings:
    """`temperature` divides the logits; `with_entropy` adds the entropy of each prediction."""

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
        linear = _call(causal_lm, "get_output_embeddings")
        assert isinstance(linear, nn.Linear), f"an output projection of an unknown kind: {type(linear).__name__}"
        _call(causal_lm, "set_output_embeddings", LogprobHead.sharing(linear))

    @contextmanager
    def at_temperature(self, temperature: float) -> Iterator[None]:
        """Within it logprobs are those at another temperature."""
        usual, self.settings = self.settings, replace(self.settings, temperature=temperature)
        try:
            yield
        finally:
            self.settings = usual

    def forward(self, microbatch: Microbatch) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Logprobs [N] of the microbatch's targets with their gradient, and the entropy [N] of their predictions."""
        decoder = self.causal_lm.base_model
        assert isinstance(decoder, nn.Module), "the decoder is a module"
        hidden: Tensor = decoder(
            input_ids=microbatch.token_ids[None],
            position_ids=microbatch.positions[None],
            use_cache=False,
            packed_index=microbatch.index,
        ).last_hidden_state[0]
        head = _call(self.causal_lm, "get_output_embeddings")
        assert isinstance(head, LogprobHead), "set when the policy was made"
        # A row that trains nothing predicts one token all the same, and drops it: every rank has to run the same
        # modules in the same order, forward and backward, or the collectives of sharded parameters come apart.
        targets = len(microbatch.targets)
        logprobs, entropy = head(
            hidden.index_select(0, microbatch.rows) if targets else hidden[:1],
            microbatch.targets if targets else microbatch.token_ids[:1],
            temperature=self.settings.temperature,
            chunking=self.settings.chunking,
            with_entropy=self.settings.with_entropy,
        )
        return logprobs[:targets], None if entropy is None else entropy[:targets], None


def _call(model: nn.Module, method: str, *arguments: object) -> object:
    """A method that every causal language model of transformers has, but no type that mypy sees."""
    function = getattr(model, method)
    assert callable(function), f"{type(model).__name__}.{method} is a method"
    result: object = function(*arguments)
    return result


def load_causal_lm(path: Path, *, dtype: torch.dtype) -> nn.Module:
    """The model in the directory `path`, with packed attention, in training mode; nothing is downloaded."""
    register_packed_attention()
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation=ATTENTION_NAME, local_files_only=True
    )
    assert isinstance(model, nn.Module), "transformers returned something else than a module"
    return model.train()
