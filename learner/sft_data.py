"""Examples for supervised training, from JSONL: `prompt` and `completion`, or `messages` of a conversation."""

import json
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
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    examples.append(_example(json.loads(line), tokenizer))
                except (ValueError, TypeError) as error:
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
            parts = [(prompt, False), (completion, True)]
        case {"messages": list(messages)}:
            parts = _conversation(messages, tokenizer)
        case _:
            raise DataError("expected an object with `prompt` and `completion`, or with `messages`")
    token_ids: list[int] = []
    mask: list[bool] = []
    for text, trained in parts:
        tokens = tokenizer.encode(text, add_special_tokens=False)
        token_ids += tokens
        mask += [trained] * len(tokens)
    if tokenizer.eos_token_id is not None and token_ids[-1] != tokenizer.eos_token_id and mask[-1]:
        token_ids.append(tokenizer.eos_token_id)
        mask.append(True)
    if mask[0]:
        raise DataError("the first token would be trained, yet nothing precedes it: the prompt is empty")
    return TrainSequence.supervised(
        token_ids=np.array(token_ids, dtype=np.int32), loss_mask=np.array(mask, dtype=np.bool_)
    )


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
