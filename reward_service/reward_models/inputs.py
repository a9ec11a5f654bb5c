"""From a job to the token ids that a reward model reads."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from reward_service.reward_models.messages import ModelJob
from reward_service.verifier import DataError

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
