"""What the process of an encoder computes: embeddings of texts. A text that is too long is an error of its batch."""

import base64
from collections.abc import Sequence
from typing import Protocol, cast

import numpy as np
import torch
import transformers

from protocol.rewards import ScoreError
from reward_service.models.messages import Encoded, EncoderToLoad, Texts
from reward_service.models.pretrained import load_pretrained


class _EncoderOutput(Protocol):
    last_hidden_state: torch.Tensor


class _EncoderModel(Protocol):
    """What is used of a Hugging Face model."""

    def __call__(self, *, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> _EncoderOutput: ...


class _Tokenizer(Protocol):
    def __call__(self, text: str) -> dict[str, list[int]]: ...


def load(given: EncoderToLoad) -> "LoadedEncoder":
    """Raises UserError for files that are not those expected, and for weights that do not fill the model."""
    # A head that sums up a whole text is not used, and many encoders are saved without it.
    model, tokenizer = load_pretrained(transformers.AutoModel, given, is_it="an encoder", unused="pooler.")
    return LoadedEncoder(model=cast(_EncoderModel, model), tokenizer=cast(_Tokenizer, tokenizer), given=given)


class LoadedEncoder:
    """A model that makes embeddings: of each text its pooled hidden states of the last layer, at length 1."""

    def __init__(self, *, model: _EncoderModel, tokenizer: _Tokenizer, given: EncoderToLoad) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._given = given

    def answer(self, line: bytes) -> bytes:
        """The embeddings of a batch, in its order."""
        return self.encode(Texts.model_validate_json(line).texts).model_dump_json().encode()

    def encode(self, texts: Sequence[str]) -> Encoded:
        """The texts' embeddings, as if each stood alone; an error if one of them is too long or has no token."""
        rows = [self._tokenizer(text)["input_ids"] for text in texts]
        longest, shortest = max(map(len, rows)), min(map(len, rows))
        if longest > self._given.max_tokens:
            return _refused(f"a text has {longest} tokens, and max_tokens of the encoder is {self._given.max_tokens}")
        if shortest == 0:
            return _refused("a text has no token that the encoder knows")
        vectors = self._forward(rows, longest=longest).cpu().numpy().astype(np.float32)
        return Encoded(vectors=tuple(base64.b64encode(vector.tobytes()).decode() for vector in vectors))

    @torch.inference_mode()
    def _forward(self, rows: Sequence[list[int]], *, longest: int) -> torch.Tensor:
        """[texts, size], float32."""
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
        output = self._model(input_ids=ids.to(self._given.device), attention_mask=mask.to(self._given.device))
        states = output.last_hidden_state.float()  # [texts, tokens, size]
        pooled = self._pooled(states, mask.to(states.device))
        return torch.nn.functional.normalize(pooled, dim=-1)

    def _pooled(self, states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if self._given.pooling == "first":
            return states[:, 0]
        lengths = mask.sum(dim=1)
        if self._given.pooling == "last":
            return states[torch.arange(len(states), device=states.device), lengths - 1]
        return (states * mask.unsqueeze(-1)).sum(dim=1) / lengths.unsqueeze(-1)


def _refused(message: str) -> Encoded:
    return Encoded(error=ScoreError(kind="data", message=message))
