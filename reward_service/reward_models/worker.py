"""The process of one reward model: `python -m reward_service.reward_models.worker MODEL_AS_JSON PARENT_PID`.

Only this and the process of an encoder load torch. It answers batches from its standard input on its standard output,
in order. An input that does not fit is an error of its own item. What goes wrong in the model itself ends the process:
after a fault of a GPU nothing that it computes can be trusted.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol, cast

import torch
import transformers

from protocol.rewards import ScoreError
from reward_service.jobs import Reply
from reward_service.reward_models.folder import fingerprint
from reward_service.reward_models.inputs import Tokenizer, chunks_by_length, input_ids, unused_token
from reward_service.reward_models.messages import Batch, ModelJob, ModelToLoad, Rewards
from reward_service.verifier import UserError, error_of, to_score
from reward_service.worker import serve_lines


class _TextSettings(Protocol):
    pad_token_id: int | None
    vocab_size: int


class _Output(Protocol):
    logits: torch.Tensor


class _Model(Protocol):
    """What is used of a Hugging Face model."""

    def __call__(self, *, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> _Output: ...


def main() -> None:
    """Load the model, say whether that went well, then answer batches until the input ends."""
    given, parent = ModelToLoad.model_validate_json(sys.argv[1]), int(sys.argv[2])
    serve_lines(
        parent=parent,
        load=lambda: load(given),
        answer=lambda model, line: (
            Rewards(replies=model.score(Batch.model_validate_json(line).jobs)).model_dump_json().encode()
        ),
    )


def load(given: ModelToLoad) -> "LoadedModel":
    """Raises UserError for files that are not those expected, and for weights that do not fill the model."""
    torch.set_num_threads(given.threads)
    found = fingerprint(Path(given.path))
    if found != given.fingerprint:
        raise UserError(f"the files in {given.path} have changed since the service was started: start it again")
    model, report = transformers.AutoModelForSequenceClassification.from_pretrained(
        given.path,
        dtype=given.dtype,
        num_labels=1,
        local_files_only=True,
        use_safetensors=True,  # the other format is a pickle
        output_loading_info=True,
    )
    missing = sorted(report["missing_keys"])
    if missing:
        raise UserError(f"the weights in {given.path} lack {', '.join(missing[:5])}: is it a reward model?")
    tokenizer = transformers.AutoTokenizer.from_pretrained(given.path, local_files_only=True)
    model.eval().to(given.device)
    return LoadedModel(
        model=cast(_Model, model),
        settings=cast(_TextSettings, model.config.get_text_config()),
        tokenizer=cast(Tokenizer, tokenizer),
        device=given.device,
        batch_tokens=given.batch_tokens,
    )


class LoadedModel:
    """A model that scores: of each input its one logit, as Hugging Face's own class gives it for that input alone.

    That class takes the score at the last token that is not the padding which the configuration names. Of what is
    tokenized `apart` it is taken at the last token whatever is named: many models pad with their end token.
    """

    def __init__(
        self, *, model: _Model, settings: _TextSettings, tokenizer: Tokenizer, device: str, batch_tokens: int
    ) -> None:
        self._model = model
        self._settings = settings
        self._pad = settings.pad_token_id
        self._tokenizer = tokenizer
        self._device = device
        self._batch_tokens = batch_tokens

    def rewards(self, batch: Batch) -> Rewards:
        """The replies to a batch, in its order."""
        return Rewards(replies=self.score(batch.jobs))

    def score(self, jobs: Sequence[ModelJob]) -> tuple[Reply, ...]:
        """A reward or an error for each job, in order."""
        replies = [self._tokenized(job) for job in jobs]
        for tokenize, pad in (("apart", None), ("whole", self._pad)):
            chosen = [index for index, job in enumerate(jobs) if job.tokenize == tokenize]
            rows = {index: row for index in chosen if isinstance(row := replies[index], list)}
            for index, reward in zip(rows, self._rewards(list(rows.values()), pad=pad), strict=True):
                replies[index] = _reply(reward)
        return tuple(reply for reply in replies if isinstance(reply, Reply))

    def _tokenized(self, job: ModelJob) -> list[int] | Reply:
        try:
            return input_ids(job, self._tokenizer)
        except Exception as error:  # noqa: BLE001  a template raises anything; it becomes an error of this item alone
            return Reply(error=error_of(error))

    def _rewards(self, rows: Sequence[list[int]], *, pad: int | None) -> list[float]:
        rewards = [0.0] * len(rows)
        for group in chunks_by_length([len(row) for row in rows], batch_tokens=self._batch_tokens):
            for part, padding in self._padded(group, rows, pad=pad):
                found = self._forward([rows[index] for index in part], pad=padding)
                for index, reward in zip(part, found, strict=True):
                    rewards[index] = reward
        return rewards

    def _padded(
        self, group: list[int], rows: Sequence[list[int]], *, pad: int | None
    ) -> Iterator[tuple[list[int], int | None]]:
        """The group and what to pad it with: if no padding is named, a token that stands in no row.

        Otherwise the model would not find the last token. Where every token stands in some row, they go one by one.
        """
        if pad is None:
            pad = unused_token([rows[index] for index in group], vocabulary=self._settings.vocab_size)
        if pad is not None:
            yield group, pad
            return
        for index in group:
            yield [index], None

    @torch.inference_mode()
    def _forward(self, rows: Sequence[list[int]], *, pad: int | None) -> list[float]:
        longest = max(map(len, rows))
        ids = torch.tensor([row + [pad or 0] * (longest - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
        self._settings.pad_token_id = pad
        output = self._model(input_ids=ids.to(self._device), attention_mask=mask.to(self._device))
        rewards: list[float] = output.logits.float().squeeze(-1).tolist()
        return rewards


def _reply(reward: float) -> Reply:
    try:
        return Reply(reward=to_score(reward).reward)
    except Exception as error:  # noqa: BLE001  a reward that is not finite is an error of its item
        return Reply(error=ScoreError(kind="data", message=f"the reward model: {error}"))


if __name__ == "__main__":
    main()
