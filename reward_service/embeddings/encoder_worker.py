"""The process of one encoder: `python -m reward_service.embeddings.encoder_worker MODEL_AS_JSON PARENT_PID`.

It answers batches from its standard input on its standard output, in order. A text that is too long is an error of its
batch; what goes wrong in the model itself ends the process.
"""

import base64
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, cast

import numpy as np
import torch
import transformers

from protocol.rewards import ScoreError
from reward_service.embeddings.messages import Encoded, EncoderToLoad, Texts
from reward_service.reward_models.folder import fingerprint
from reward_service.verifier.submission import UserError
from reward_service.verifier.worker import serve_lines


class _EncoderOutput(Protocol):
    last_hidden_state: torch.Tensor


class _EncoderModel(Protocol):
    """What is used of a Hugging Face model."""

    def __call__(self, *, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> _EncoderOutput: ...


class _Tokenizer(Protocol):
    def __call__(self, text: str) -> dict[str, list[int]]: ...


def main() -> None:
    """Load the model, say whether that went well, then answer batches until the input ends."""
    given, parent = EncoderToLoad.model_validate_json(sys.argv[1]), int(sys.argv[2])
    serve_lines(
        parent=parent,
        load=lambda: load(given),
        answer=lambda encoder, line: encoder.encode(Texts.model_validate_json(line).texts).model_dump_json().encode(),
    )


def load(given: EncoderToLoad) -> "LoadedEncoder":
    """Raises UserError for files that are not those expected, and for weights that do not fill the model."""
    torch.set_num_threads(given.threads)
    if fingerprint(Path(given.path)) != given.fingerprint:
        raise UserError(f"the files in {given.path} have changed since the service was started: start it again")
    model, report = transformers.AutoModel.from_pretrained(
        given.path,
        dtype=given.dtype,
        local_files_only=True,
        use_safetensors=True,  # the other format is a pickle
        output_loading_info=True,
    )
    # A head that sums up a whole text is not used, and many encoders are saved without it.
    missing = sorted(key for key in report["missing_keys"] if not key.startswith("pooler."))
    if missing:
        raise UserError(f"the weights in {given.path} lack {', '.join(missing[:5])}: is it an encoder?")
    tokenizer = transformers.AutoTokenizer.from_pretrained(given.path, local_files_only=True)
    model.eval().to(given.device)
    return LoadedEncoder(model=cast(_EncoderModel, model), tokenizer=cast(_Tokenizer, tokenizer), given=given)


class LoadedEncoder:
    """A model that makes embeddings: of each text its pooled hidden states of the last layer, at length 1."""

    def __init__(self, *, model: _EncoderModel, tokenizer: _Tokenizer, given: EncoderToLoad) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._given = given

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


if __name__ == "__main__":
    main()
