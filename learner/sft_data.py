"""Examples for supervised training, from JSONL: `prompt` and `completion`, or `messages` of a conversation."""

import json
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from learner.training.batch import TrainSequence


class DataError(ValueError):
    """A line of the data file does not fit; the text names file and line."""


class Tokenizer(Protocol):
    """What is used of a Hugging Face tokenizer."""

    eos_token_id: int | None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def apply_chat_template(
        self, conversation: Sequence[Mapping[str, str]], *, add_generation_prompt: bool, tokenize: bool
    ) -> str: ...


def read_examples(path: Path, tokenizer: Tokenizer) -> list[TrainSequence]:
    """All examples, tokenized; completions end with the end token. Raises DataError, FileNotFoundError."""
    examples = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    examples.append(_example(json.loads(line), tokenizer))
                except ValueError as error:
                    raise DataError(f"{path}, line {number}: {error}") from error
    if not examples:
        raise DataError(f"{path} holds no examples: expected one JSON object a line")
    return examples


def batches(examples: Sequence[TrainSequence], *, size: int, seed: int) -> Iterator[list[TrainSequence]]:
    """Endless batches: every epoch in another order, each example once an epoch."""
    epoch = 0
    queue: list[int] = []
    while True:
        while len(queue) < size:
            queue += np.random.default_rng((seed, epoch)).permutation(len(examples)).tolist()
            epoch += 1
        yield [examples[index] for index in queue[:size]]
        del queue[:size]


def _example(record: object, tokenizer: Tokenizer) -> TrainSequence:
    match record:
        case {"prompt": str(prompt), "completion": str(completion)}:
            if not completion:
                raise DataError("the completion is empty, which leaves nothing to train on")
            parts = [(prompt, False), (completion, True)]
        case {"messages": list(messages)}:
            parts = _conversation([_message(message) for message in messages], tokenizer)
        case _:
            raise DataError("expected an object with texts `prompt` and `completion`, or with a list `messages`")
    end = tokenizer.eos_token_id
    token_ids: list[int] = []
    mask: list[bool] = []
    for text, trained in parts:
        tokens = tokenizer.encode(text, add_special_tokens=False)
        token_ids += tokens
        mask += _until_end(tokens, end) if trained else [False] * len(tokens)
    if end is not None and mask and mask[-1] and token_ids[-1] != end:
        token_ids.append(end)
        mask.append(True)
    if not any(mask):
        raise DataError("nothing is left to train on: the completion has no tokens")
    if mask[0]:
        raise DataError("the first token would be trained, yet nothing precedes it: the prompt is empty")
    return TrainSequence.supervised(
        token_ids=np.array(token_ids, dtype=np.int32), loss_mask=np.array(mask, dtype=np.bool_)
    )


def _until_end(tokens: Sequence[int], end: int | None) -> list[bool]:
    """The mask of what the assistant wrote: a template's newline after the end token is never sampled."""
    stop = len(tokens) - list(reversed(tokens)).index(end) if end is not None and end in tokens else len(tokens)
    return [index < stop for index in range(len(tokens))]


def _message(message: object) -> dict[str, str]:
    match message:
        case {"role": str(role), "content": str(content)}:
            return {"role": role, "content": content}
        case _:
            raise DataError(f"expected messages with texts `role` and `content`, got {reprlib.repr(message)}")


def _conversation(messages: list[dict[str, str]], tokenizer: Tokenizer) -> list[tuple[str, bool]]:
    """The template's text, cut so that what the assistant wrote is trained and the rest is not."""
    parts: list[tuple[str, bool]] = []
    done = ""
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = tokenizer.apply_chat_template(messages[:index], add_generation_prompt=True, tokenize=False)
        after = tokenizer.apply_chat_template(messages[: index + 1], add_generation_prompt=False, tokenize=False)
        if not before.startswith(done) or not after.startswith(before):
            raise DataError("the chat template rewrites earlier turns, so that they cannot be told apart")
        parts += [(before[len(done) :], False), (after[len(before) :], True)]
        done = after
    if not parts:
        raise DataError("a conversation without an assistant's turn has nothing to train on")
    return parts
