"""The policy: a causal language model of transformers that returns logprobs of chosen tokens of a packed row."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from learner.training.logprobs import Chunking, LogprobHead, TopTokens
from learner.training.packing import ATTENTION_NAME, Microbatch, register_packed_attention


def predicting_states(model: nn.Module, microbatch: Microbatch) -> Tensor:
    """The last hidden states [N, H] from which the microbatch's N targets are predicted; one if there is no target.

    A row that trains nothing predicts from one token all the same, and its caller drops the result: every rank has to
    run the same modules in the same order, forward and backward, or the collectives of sharded parameters come apart.
    """
    decoder = model.base_model
    assert isinstance(decoder, nn.Module), "a model of transformers has a decoder"
    hidden: Tensor = decoder(
        input_ids=microbatch.token_ids[None],
        position_ids=microbatch.positions[None],
        use_cache=False,
        packed_index=microbatch.index,
    ).last_hidden_state[0]
    return hidden.index_select(0, microbatch.rows) if len(microbatch.rows) else hidden[:1]


def one_at_least(token_ids: Tensor) -> Tensor:
    """`token_ids` [N, ...] to go with the predicting states: a row of token 0 if there is none."""
    return token_ids if len(token_ids) else token_ids.new_zeros(1, *token_ids.shape[1:])


@dataclass(frozen=True)
class LogprobSettings:
    """`temperature` divides the logits; `with_entropy` adds the entropy of each prediction.

    `entropy_gradient` gives the entropy its gradient, and adds it in any case; for an entropy bonus. `with_states` adds
    the hidden states that predictions are made from; for a value head.
    """

    temperature: float
    chunking: Chunking
    with_entropy: bool
    entropy_gradient: bool = False
    with_states: bool = False


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

    @property
    def width(self) -> int:
        """H, the size of a hidden state."""
        return self._head().in_features

    def forward(self, microbatch: Microbatch) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Logprobs [N] of the targets, the entropy [N] of their predictions, logprobs [N, C] of the candidates, and
        the states [N, H] that they are predicted from.

        Candidates are those of the microbatch, if it has any. All but the entropy carry a gradient; it does if set so.
        """
        candidates = microbatch.candidates
        states = predicting_states(self.causal_lm, microbatch)
        logprobs, entropy, of_candidates = self._head()(
            states,
            one_at_least(microbatch.targets),
            candidates=None if candidates is None else one_at_least(candidates),
            temperature=self.settings.temperature,
            chunking=self.settings.chunking,
            with_entropy=self.settings.with_entropy,
            entropy_gradient=self.settings.entropy_gradient,
        )
        count = len(microbatch.targets)
        return (
            logprobs[:count],
            None if entropy is None else entropy[:count],
            None if of_candidates is None else of_candidates[:count],
            states[:count] if self.settings.with_states else None,
        )

    def top_candidates(self, microbatch: Microbatch, *, count: int) -> TopTokens:
        """The `count` tokens [N, count] that the policy finds most probable in place of each target. No gradient.

        A smaller vocabulary is there whole.
        """
        head = self._head()
        with torch.no_grad():
            token_ids, logprobs = head(
                predicting_states(self.causal_lm, microbatch),
                top=min(count, head.out_features),
                temperature=self.settings.temperature,
                chunking=self.settings.chunking,
            )
        targets = len(microbatch.targets)
        return TopTokens(token_ids=token_ids[:targets], logprobs=logprobs[:targets])

    def _head(self) -> LogprobHead:
        head = _call(self.causal_lm, "get_output_embeddings")
        assert isinstance(head, LogprobHead), "set when the policy was made"
        return head


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
