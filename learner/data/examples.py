"""Examples for supervised training: records of `prompt` and `completion`, or `messages` of a conversation.

A prompt of messages takes the assistant's reply, a text, or messages that go on.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from learner.data.errors import DataError
from learner.data.sources import read_parsed
from learner.data.tokenizing import Part, Tokenizer, conversation_parts, read_messages, reply_parts, tokenize
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
    parts: list[Part] | None = None
    match record:
        case {"prompt": prompt, "completion": completion} if prompt is not None:
            parts = reply_parts(prompt, completion, tokenizer)
        case {"messages": [*messages]}:
            parts = conversation_parts(read_messages(messages), tokenizer)
    if parts is None:
        raise DataError(
            "expected an object with texts `prompt` and `completion`, or with a list `messages`; "
            "the prompt may be messages, too, and then so may the completion"
        )
    return parts


def _example(record: object, tokenizer: Tokenizer) -> TrainSequence:
    tokenized = tokenize(example_parts(record, tokenizer), tokenizer)
    return TrainSequence.supervised(token_ids=tokenized.token_ids, loss_mask=tokenized.loss_mask)
