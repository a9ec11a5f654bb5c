"""What the process of a reward model computes: rewards of inputs, each as if it stood alone.

From a job to the token ids that the model reads, and from those to its rewards. An input that does not fit is an error
of its own item.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol, cast

import torch
import transformers

from protocol.rewards import ScoreError
from reward_service.models.messages import ModelBatch, ModelJob, RewardModelToLoad, Rewards
from reward_service.models.pretrained import load_pretrained
from reward_service.verifier.submission import DataError, error_of, to_score
from reward_service.verifier.worker_pool import Reply

Turn = Mapping[str, str]


class Tokenizer(Protocol):
    """What is used of a Hugging Face tokenizer."""

    eos_token_id: int | None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def apply_chat_template(
        self, conversation: Sequence[Turn], *, add_generation_prompt: bool, tokenize: bool
    ) -> str: ...


def input_ids(job: ModelJob, tokenizer: Tokenizer) -> list[int]:
    """The input's tokens. Raises DataError for an input that is empty or too long: none is ever cut."""
    if job.tokenize == "whole":
        tokens = _whole(job, tokenizer)
    else:
        prompt, completion = _parts(job, tokenizer)
        before = tokenizer.encode(prompt, add_special_tokens=False)
        tokens = before + _until_end(tokenizer.encode(completion, add_special_tokens=False), tokenizer.eos_token_id)
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


def _whole(job: ModelJob, tokenizer: Tokenizer) -> list[int]:
    if job.format == "plain":
        return tokenizer.encode(job.prompt + job.completion, add_special_tokens=True)
    text = tokenizer.apply_chat_template(_conversation(job), add_generation_prompt=False, tokenize=False)
    return tokenizer.encode(text, add_special_tokens=False)


def _parts(job: ModelJob, tokenizer: Tokenizer) -> tuple[str, str]:
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
    """What is used of a Hugging Face model."""

    def __call__(self, *, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> _Output: ...


def load(given: RewardModelToLoad) -> "LoadedRewardModel":
    """Raises UserError for files that are not those expected, and for weights that do not fill the model."""
    model, tokenizer = load_pretrained(
        transformers.AutoModelForSequenceClassification, given, is_it="a reward model", num_labels=1
    )
    return LoadedRewardModel(
        model=cast(_Model, model),
        settings=cast(_TextSettings, model.config.get_text_config()),
        tokenizer=cast(Tokenizer, tokenizer),
        device=given.device,
        batch_tokens=given.batch_tokens,
    )


class LoadedRewardModel:
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

    def answer(self, line: bytes) -> bytes:
        """The replies to a batch, in its order."""
        return Rewards(replies=self.score(ModelBatch.model_validate_json(line).jobs)).model_dump_json().encode()

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
