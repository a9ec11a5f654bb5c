"""Examples for supervised training: records of `prompt` and `completion`, or `messages` of a conversation."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from learner.data.errors import DataError
from learner.data.sources import read_parsed
from learner.data.tokenizing import Part, Tokenizer, conversation_parts, read_messages, text_parts, tokenize
from learner.training.batch import TrainSequence

Example = TypeVar("Example")


def read_examples(path: Path, tokenizer: Tokenizer) -> list[TrainSequence]:
    """All examples, tokenized; completions end with the end token. Raises DataError, FileNotFoundError."""
    examples = list(read_parsed(path, lambda record: _example(record, tokenizer)))
    if not examples:
        raise DataError(f"{path} holds no examples: expected one JSON object a line, or rows")
    return examples


def batches(examples: Sequence[Example], *, size: int, seed: int) -> Iterator[list[Example]]:
    """Endless batches: every epoch in another order, each example once an epoch."""
    epoch = 0
    queue: list[int] = []
    while True:
        while len(queue) < size:
            queue += np.random.default_rng((seed, epoch)).permutation(len(examples)).tolist()
            epoch += 1
        yield [examples[index] for index in queue[:size]]
        del queue[:size]


def example_parts(record: object, tokenizer: Tokenizer) -> list[Part]:
    """The parts of one record. Raises DataError."""
    match record:
        case {"prompt": str(prompt), "completion": str(completion)}:
            return text_parts(prompt=prompt, completion=completion)
        case {"messages": list(messages)}:
            return conversation_parts(read_messages(messages), tokenizer)
        case _:
            raise DataError("expected an object with texts `prompt` and `completion`, or with a list `messages`")


def _example(record: object, tokenizer: Tokenizer) -> TrainSequence:
    tokenized = tokenize(example_parts(record, tokenizer), tokenizer)
    return TrainSequence.supervised(token_ids=tokenized.token_ids, loss_mask=tokenized.loss_mask)
