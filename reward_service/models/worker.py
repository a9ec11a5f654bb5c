"""The process of one model: `python -m reward_service.models.worker MODEL_AS_JSON PARENT_PID`.

It answers batches from its standard input on its standard output, in order: a reward model's rewards of inputs, or an
encoder's embeddings of texts. What goes wrong in the model itself ends the process: after a fault of a GPU nothing that
it computes can be trusted. Only this process loads torch.

A model is read from a Hugging Face directory that is still the one that was meant. From a job to the token ids that a
reward model reads, and from those to its rewards, each as if its input stood alone; one that does not fit is an error
of its own item. A text that is too long for an encoder is an error of its batch.
"""

import base64
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
import transformers

from protocol.rewards import ScoreError
from reward_service.models.folder import fingerprint
from reward_service.models.process import (
    EncoderToLoad,
    ModelBatch,
    ModelJob,
    ModelToLoad,
    RewardModelToLoad,
    RewardReplies,
    TextEmbeddings,
    Texts,
    read_model_to_load,
)
from reward_service.verifier.submission import DataError, UserError, error_of, to_score
from reward_service.verifier.worker_pool import WorkerReply
from services.opening_tokens import opening_tokens
from services.worker_process import serve_lines


def load_pretrained(
    auto: Any, given: ModelToLoad, *, is_it: str, unused: str | None = None, **settings: object
) -> tuple[Any, Any]:
    """The model of the class that `auto` finds, on its device, and its tokenizer. `unused` begins names of weights that
    may be missing.

    Raises UserError for files that are not those expected, and for weights that do not fill the model.
    """
    torch.set_num_threads(given.threads)
    if fingerprint(Path(given.path)) != given.fingerprint:
        raise UserError(f"the files in {given.path} have changed since the service was started: start it again")
    model, report = auto.from_pretrained(
        given.path,
        dtype=given.dtype,
        local_files_only=True,
        use_safetensors=True,  # the other format is a pickle
        output_loading_info=True,
        **settings,
    )
    missing = sorted(key for key in report["missing_keys"] if unused is None or not key.startswith(unused))
    if missing:
        raise UserError(f"the weights in {given.path} lack {', '.join(missing[:5])}: is it {is_it}?")
    tokenizer = transformers.AutoTokenizer.from_pretrained(given.path, local_files_only=True)
    model.eval().to(given.device)
    return model, tokenizer


Turn = Mapping[str, str]


class ModelTokenizer(Protocol):
    """The used part of a Hugging Face tokenizer."""

    eos_token_id: int | None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def apply_chat_template(
        self, conversation: Sequence[Turn], *, add_generation_prompt: bool, tokenize: bool
    ) -> str: ...


def input_ids(job: ModelJob, tokenizer: ModelTokenizer) -> list[int]:
    """The input's tokens. Raises DataError for an input that is empty or too long: none is ever cut."""
    if job.tokenize == "whole":
        tokens = _whole(job, tokenizer)
    else:
        prompt, completion = _parts(job, tokenizer)
        encode, opens = tokenizer.encode, job.format == "plain" and job.special_tokens
        before = opening_tokens(prompt, encode) if opens else encode(prompt, add_special_tokens=False)
        tokens = before + _until_end(encode(completion, add_special_tokens=False), tokenizer.eos_token_id)
    if not tokens:
        raise DataError("the input has no tokens")
    if job.max_tokens is not None and len(tokens) > job.max_tokens:
        raise DataError(f"the input has {len(tokens)} tokens, and the reward model takes at most {job.max_tokens}")
    return tokens


def chunks_by_length(lengths: Sequence[int], *, batch_tokens: int) -> list[list[int]]:
    """Indices in groups of like length; a group's rows padded to its longest have at most `batch_tokens` tokens.

    An input that is longer than that by itself has a group of its own.
    """
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if groups and lengths[groups[-1][0]] * (len(groups[-1]) + 1) <= batch_tokens:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def unused_token(rows: Sequence[Sequence[int]], *, vocabulary: int) -> int | None:
    """A token that stands in no row; None if all do."""
    used = {token for row in rows for token in row}
    return next((token for token in range(vocabulary) if token not in used), None)


def _whole(job: ModelJob, tokenizer: ModelTokenizer) -> list[int]:
    if job.format == "plain":
        return tokenizer.encode(job.prompt + job.completion, add_special_tokens=True)
    text = tokenizer.apply_chat_template(_conversation(job), add_generation_prompt=False, tokenize=False)
    return tokenizer.encode(text, add_special_tokens=False)


def _parts(job: ModelJob, tokenizer: ModelTokenizer) -> tuple[str, str]:
    if job.format == "plain":
        return job.prompt, job.completion
    conversation = _conversation(job)
    before = tokenizer.apply_chat_template(conversation[:-1], add_generation_prompt=True, tokenize=False)
    after = tokenizer.apply_chat_template(conversation, add_generation_prompt=False, tokenize=False)
    if not after.startswith(before):
        raise DataError("the chat template rewrites earlier turns, so that the completion cannot be told apart")
    return before, after[len(before) :]


def _conversation(job: ModelJob) -> list[Turn]:
    turns = [{"role": message.role, "content": message.content} for message in job.messages]
    return [*turns, {"role": "assistant", "content": job.completion}]


def _until_end(tokens: list[int], end: int | None) -> list[int]:
    """Up to the last end token, or with one added: what a template writes after it was never scored in training."""
    if end is None:
        return tokens
    if end not in tokens:
        return [*tokens, end]
    return tokens[: len(tokens) - tokens[::-1].index(end)]


class _TextSettings(Protocol):
    pad_token_id: int | None
    vocab_size: int


class _Output(Protocol):
    logits: torch.Tensor


class _Model(Protocol):
    """The used part of a Hugging Face model."""

    def __call__(self, *, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> _Output: ...


def load_reward_model(given: RewardModelToLoad) -> "LoadedRewardModel":
    """Raises UserError for files that are not those expected, weights that do not fill the model, and a template that
    cannot be used.
    """
    model, tokenizer = load_pretrained(
        transformers.AutoModelForSequenceClassification, given, is_it="a reward model", num_labels=1
    )
    if given.chat_template:
        _use_template(tokenizer, given)
    return LoadedRewardModel(
        model=cast(_Model, model),
        settings=cast(_TextSettings, model.config.get_text_config()),
        tokenizer=cast(ModelTokenizer, tokenizer),
        device=given.device,
        batch_tokens=given.batch_tokens,
    )


def _use_template(tokenizer: Any, given: RewardModelToLoad) -> None:
    """In place of the tokenizer's own. Raises UserError for one that cannot render a question and its answer."""
    tokenizer.chat_template = given.chat_template
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    try:
        tokenizer.apply_chat_template(turns, add_generation_prompt=False, tokenize=False)
    except Exception as error:  # a template raises anything
        raise UserError(f"the chat template that {given.path} was given cannot be used: {error}") from error


class LoadedRewardModel:
    """A model that scores: of each input its one logit, as Hugging Face's own class gives it for that input alone.

    That class takes the score at the last token that is not the padding which the configuration names. Of what is
    tokenized `apart` it is taken at the last token whatever is named: many models pad with their end token.
    """

    def __init__(
        self, *, model: _Model, settings: _TextSettings, tokenizer: ModelTokenizer, device: str, batch_tokens: int
    ) -> None:
        self._model = model
        self._settings = settings
        self._pad = settings.pad_token_id
        self._tokenizer = tokenizer
        self._device = device
        self._batch_tokens = batch_tokens

    def answer(self, line: bytes) -> bytes:
        """The replies to a batch, in its order."""
        return RewardReplies(replies=self.score(ModelBatch.model_validate_json(line).jobs)).model_dump_json().encode()

    def score(self, jobs: Sequence[ModelJob]) -> tuple[WorkerReply, ...]:
        """A reward or an error for each job, in order."""
        replies = [self._tokenized(job) for job in jobs]
        for tokenize, pad in (("apart", None), ("whole", self._pad)):
            chosen = [index for index, job in enumerate(jobs) if job.tokenize == tokenize]
            rows = {index: row for index in chosen if isinstance(row := replies[index], list)}
            for index, reward in zip(rows, self._rewards(list(rows.values()), pad=pad), strict=True):
                replies[index] = _reply(reward)
        return tuple(reply for reply in replies if isinstance(reply, WorkerReply))

    def _tokenized(self, job: ModelJob) -> list[int] | WorkerReply:
        try:
            return input_ids(job, self._tokenizer)
        except Exception as error:  # noqa: BLE001  a template raises anything; it becomes an error of this item alone
            return WorkerReply(error=error_of(error))

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


def _reply(reward: float) -> WorkerReply:
    try:
        return WorkerReply(reward=to_score(reward).reward)
    except Exception as error:  # noqa: BLE001  a reward that is not finite is an error of its item
        return WorkerReply(error=ScoreError(kind="data", message=f"the reward model: {error}"))


class _EncoderOutput(Protocol):
    last_hidden_state: torch.Tensor


class _EncoderModel(Protocol):
    """The used part of a Hugging Face model."""

    def __call__(self, *, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> _EncoderOutput: ...


class _Tokenizer(Protocol):
    def __call__(self, text: str) -> dict[str, list[int]]: ...


def load_encoder(given: EncoderToLoad) -> "LoadedEncoder":
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

    def encode(self, texts: Sequence[str]) -> TextEmbeddings:
        """The texts' embeddings, as if each stood alone; an error if one of them is too long or has no token."""
        rows = [self._tokenizer(text)["input_ids"] for text in texts]
        longest, shortest = max(map(len, rows)), min(map(len, rows))
        if longest > self._given.max_tokens:
            return _refused(
                f"a text has {longest} tokens, and the encoder takes at most {self._given.max_tokens} (max_tokens, or "
                "what the files of the model say)"
            )
        if shortest == 0:
            return _refused("a text has no token that the encoder knows")
        vectors = self._forward(rows, longest=longest).cpu().numpy().astype(np.float32)
        return TextEmbeddings(vectors=tuple(base64.b64encode(vector.tobytes()).decode() for vector in vectors))

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


def _refused(message: str) -> TextEmbeddings:
    return TextEmbeddings(error=ScoreError(kind="data", message=message))


class LoadedModel(Protocol):
    """A model that is loaded."""

    def answer(self, line: bytes) -> bytes:
        """The answer to a batch, both as JSON in one line."""
        ...


def main() -> None:
    """Load the model, say whether that went well, then answer batches until the input ends."""
    given, parent = read_model_to_load(sys.argv[1]), int(sys.argv[2])
    serve_lines(parent=parent, load=lambda: _load(given), answer=lambda model, line: model.answer(line))


def _load(given: ModelToLoad) -> LoadedModel:
    return load_encoder(given) if isinstance(given, EncoderToLoad) else load_reward_model(given)


if __name__ == "__main__":
    main()
