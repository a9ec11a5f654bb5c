"""Examples for supervised training: records of texts or conversations, read and turned into token ids and loss masks.

A prompt of messages takes the assistant's reply, a text, or messages that go on.

A completion ends with the tokenizer's end token, which is trained on. Prompt and completion are tokenized apart, as
they are sampled, so that equal prompts have equal tokens whatever follows. A prompt that is a text begins with the
tokens that the tokenizer adds by itself, as it does for env services; a chat template writes its own.

A part of the data may be held out.
"""

import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import jinja2
import numpy as np
import xxhash
from numpy.typing import NDArray

from learner.data.sources import RecordError, read_parsed
from learner.training.batch import TrainSequence
from services.model_folder import positions
from services.opening_tokens import opening_tokens

Message = Mapping[str, str]

_SAID_BESIDE_CONTENT = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
_TRAINED = ("weight", "train")  # of a message, in formats of other trainers
_TOLD_TO_TEMPLATE = ("tools", "functions", "chat_template_kwargs")
_NO_TEXT = ("image", "images", "video", "videos", "audio", "audios")
_NOTHING: tuple[object, ...] = (None, "", "null", "[]", "{}", (), [], {})  # columns of tools are also JSON in a text


class DataTokenizer(Protocol):
    """The used part of a Hugging Face tokenizer."""

    eos_token_id: int | None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def apply_chat_template(
        self, conversation: Sequence[Message], *, add_generation_prompt: bool, tokenize: bool
    ) -> str: ...


@dataclass(frozen=True)
class TextPart:
    """A stretch of text; `trained`: it was written by the assistant, and is trained on. `opens`: it is plain text with
    which a sequence begins.
    """

    text: str
    trained: bool
    opens: bool = False


@dataclass(frozen=True, kw_only=True)
class TokenizedExample:
    """A prompt with a completion of T tokens in all. `token_ids` int32 [T]; `loss_mask` bool [T], the tokens to train.

    At least one token is trained, and never the first one, which nothing predicts.
    """

    token_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]

    @property
    def prompt_length(self) -> int:
        """Tokens before the first trained one."""
        return int(self.loss_mask.argmax())

    @property
    def trained_length(self) -> int:
        """Number of tokens that are trained."""
        return int(self.loss_mask.sum())

    def without_tail(self) -> "TokenizedExample":
        """Ends with the last trained token: a template's newline after the end token is never sampled nor scored."""
        length = len(self.loss_mask) - int(self.loss_mask[::-1].argmax())
        return TokenizedExample(token_ids=self.token_ids[:length], loss_mask=self.loss_mask[:length])


def tokenize(parts: Iterable[TextPart], tokenizer: DataTokenizer) -> TokenizedExample:
    """The parts end to end, with an end token after the last one if it is trained. Raises RecordError."""
    end = tokenizer.eos_token_id
    token_ids: list[int] = []
    mask: list[bool] = []
    for part in parts:
        _check_text(part.text)
        tokens = opening_tokens(part.text, tokenizer.encode) if part.opens else _tokens(part.text, tokenizer)
        token_ids += tokens
        mask += _until_end(tokens, end) if part.trained else [False] * len(tokens)
    if end is not None and mask and mask[-1] and token_ids[-1] != end:
        token_ids.append(end)
        mask.append(True)
    if not any(mask):
        raise RecordError("nothing is left to train on: the completion has no tokens")
    if mask[0]:
        raise RecordError("the first token would be trained, yet nothing precedes it: the prompt is empty")
    return TokenizedExample(token_ids=np.array(token_ids, dtype=np.int32), loss_mask=np.array(mask, dtype=np.bool_))


def _tokens(text: str, tokenizer: DataTokenizer) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def _check_text(text: str) -> None:
    """Raises RecordError for half of a surrogate pair, which JSON can name (`\\ud800`): tokenizers say only that it is
    no text.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start]
        raise RecordError(
            f"the text has half of a surrogate pair (\\u{ord(half):04x}) at character {error.start + 1}, which is no "
            "character: expected Unicode text; write the character whole, or leave it out"
        ) from error


def text_parts(*, prompt: str, completion: str) -> list[TextPart]:
    """A prompt and its completion, as they stand. Raises RecordError for an empty completion."""
    if not completion:
        raise RecordError("the completion is empty, which leaves nothing to train on")
    return [TextPart(prompt, False, opens=True), TextPart(completion, True)]


def conversation_parts(
    messages: Sequence[Message], tokenizer: DataTokenizer, *, trained_from: int = 0
) -> list[TextPart]:
    """The template's text, cut so that what the assistant wrote in `messages[trained_from:]` is trained, and no more.

    Ends with the last assistant's turn. Raises RecordError.
    """
    parts: list[TextPart] = []
    done = ""
    for index in range(trained_from, len(messages)):
        if messages[index]["role"] != "assistant":
            continue
        before = _template(messages[:index], tokenizer, open_turn=True)
        after = _template(messages[: index + 1], tokenizer, open_turn=False)
        if not before.startswith(done) or not after.startswith(before):
            raise RecordError("the chat template rewrites earlier turns, so that they cannot be told apart")
        parts += [TextPart(before[len(done) :], False), TextPart(after[len(before) :], True)]
        done = after
    if not parts:
        raise RecordError("a conversation without an assistant's turn has nothing to train on")
    return parts


def reply_parts(prompt: object, completion: object, tokenizer: DataTokenizer) -> list[TextPart] | None:
    """A prompt and completion in any of their forms; None if they have none of them. Raises RecordError."""
    match prompt, completion:
        case str(prompt_text), str(text):
            return text_parts(prompt=prompt_text, completion=text)
        case [*messages], str(text):
            if not text:
                raise RecordError("the completion is empty, which leaves nothing to train on")
            reply = [{"role": "assistant", "content": text}]
            return _reply(read_messages(messages, trained=False), reply, tokenizer)
        case [*messages], [*replies]:
            return _reply(read_messages(messages, trained=False), read_messages(replies), tokenizer)
        case _:
            return None


def read_messages(messages: Sequence[object], *, trained: bool = True) -> list[Message]:
    """Messages with role and content; `trained`: the assistant's are to be. Raises RecordError, also for a message that
    says more than these two, since that would be lost.
    """
    read = []
    for message in messages:
        _check_message(message, trained=trained)
        read.append(_message(message))
    return read


def check_record(record: Mapping[str, object]) -> None:
    """Raises RecordError for a record that says by a key what is not read, and would be lost: pictures, and what a
    conversation's template is to be told. A prompt that is a text may have been made of that.
    """
    for key in _NO_TEXT:
        if _says(record.get(key)):
            raise RecordError(f"`{key}` is not read: expected texts alone; leave such records out, or take the key out")
    if not any(isinstance(record.get(key), list) for key in ("messages", "prompt", "chosen")):
        return
    for key in _TOLD_TO_TEMPLATE:
        if _says(record.get(key)):
            remedy = (
                "give it to all records alike as run.chat_template_kwargs, and take the key out"
                if key == "chat_template_kwargs"
                else "write what the model is told of them into a message, or give `prompt` as the template's text"
            )
            raise RecordError(f"`{key}` is not read, and the chat template would not be told: {remedy}")


def _check_message(message: object, *, trained: bool) -> None:
    given = message if isinstance(message, Mapping) else {}
    for key in _SAID_BESIDE_CONTENT:
        if _says(given.get(key)):
            raise RecordError(
                f"a message has `{key}`, which is not read: expected all that it says in its text `content`; write it "
                "there as the model is to write it, or take the key out"
            )
    for key in _TRAINED:
        if trained and given.get("role") == "assistant" and given.get(key, 1) == 0:
            raise RecordError(
                f"an assistant's message has `{key}` {given[key]!r}, and would be trained all the same: put what is "
                "not to be trained into `prompt` and what follows into `completion`, or take the key out"
            )


def _says(value: object) -> bool:
    if isinstance(value, Mapping):  # columns of Parquet name keys that other rows have
        return any(each is not None for each in value.values())
    return value not in _NOTHING


def _reply(prompt: Sequence[Message], reply: Sequence[Message], tokenizer: DataTokenizer) -> list[TextPart]:
    """Of all turns only the reply's are trained."""
    if not prompt:
        raise RecordError("the prompt has no messages")
    if prompt[-1]["role"] == "assistant":
        raise RecordError(
            "the prompt ends with a message of the assistant, and the completion would be a second one behind it: "
            "expected the user's last; put the assistant's message into the completion, or both into `messages`"
        )
    if not reply or reply[0]["role"] != "assistant":
        begins = f"begins with a message of {reply[0]['role']}" if reply else "has no messages"
        raise RecordError(
            f"the completion {begins}: expected one of the assistant first, and only what follows the prompt; take out "
            "what the prompt says already"
        )
    return conversation_parts([*prompt, *reply], tokenizer, trained_from=len(prompt))


def _message(message: object) -> Message:
    match message:
        case {"role": str(role), "content": str(content)}:
            return {"role": role, "content": content}
        case _:
            raise RecordError(f"expected messages with texts `role` and `content`, got {reprlib.repr(message)}")


def _template(messages: Sequence[Message], tokenizer: DataTokenizer, *, open_turn: bool) -> str:
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=open_turn, tokenize=False)
    except jinja2.TemplateError as error:
        raise RecordError(f"the model's chat template refuses the conversation: {error}") from error


def _until_end(tokens: Sequence[int], end: int | None) -> list[bool]:
    """The mask of what the assistant wrote: a template's newline after the end token is never sampled."""
    stop = len(tokens) - list(reversed(tokens)).index(end) if end is not None and end in tokens else len(tokens)
    return [index < stop for index in range(len(tokens))]


Example = TypeVar("Example")


def read_examples(path: Path, tokenizer: DataTokenizer) -> list[TrainSequence]:
    """All examples, tokenized; completions end with the end token. Raises RecordError, FileNotFoundError."""
    examples = list(read_parsed(path, lambda record: _example(record, tokenizer)))
    if not examples:
        raise RecordError(f"{path} holds no examples: expected one JSON object a line, or rows")
    return examples


def check_lengths(examples: Iterable[TrainSequence], *, path: Path, model: Path) -> None:
    """Raises RecordError for an example of the file in `path` that is longer than a text of the model may be."""
    most, longest = positions(model), max(len(each.token_ids) for each in examples)
    if most is not None and longest - 1 > most:  # the last token is only predicted
        raise RecordError(
            f"{path} has an example of {longest} tokens, prompt included, and {model} takes {most} by its config.json: "
            "shorten such examples, or leave them out"
        )


def batches(examples: Sequence[Example], *, size: int, seed: int, first: int = 0) -> Iterator[list[Example]]:
    """Endless batches, from number `first` on: every epoch in another order, each example once an epoch."""
    epoch, skipped = divmod(first * size, len(examples))
    queue: list[int] = []
    while True:
        while len(queue) < size:
            queue += np.random.default_rng((seed, epoch)).permutation(len(examples)).tolist()[skipped:]
            epoch, skipped = epoch + 1, 0
        yield [examples[index] for index in queue[:size]]
        del queue[:size]


def example_parts(record: object, tokenizer: DataTokenizer) -> list[TextPart]:
    """The parts of one record. Raises RecordError."""
    parts: list[TextPart] | None = None
    if isinstance(record, Mapping):
        check_record(record)
    match record:
        case {"prompt": prompt, "completion": completion} if prompt is not None:
            parts = reply_parts(prompt, completion, tokenizer)
        case {"messages": [*messages]}:
            parts = conversation_parts(read_messages(messages), tokenizer)
    if parts is None:
        raise RecordError(
            "expected an object with texts `prompt` and `completion`, or with a list `messages`; "
            f"the prompt may be messages, too, and then so may the completion; got {shape_of(record)}"
        )
    return parts


def shape_of(record: object) -> str:
    """The content of a record, in few words."""
    if not isinstance(record, Mapping):
        return type(record).__name__
    return ", ".join(f"{key} ({type(value).__name__})" for key, value in list(record.items())[:8]) or "nothing"


def _example(record: object, tokenizer: DataTokenizer) -> TrainSequence:
    tokenized = tokenize(example_parts(record, tokenizer), tokenizer)
    return TrainSequence.supervised(token_ids=tokenized.token_ids, loss_mask=tokenized.loss_mask)


Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class DataSplit(Generic[Item]):
    """Training and held-out examples, both in the order of the data."""

    training: Sequence[Item]
    held_out: Sequence[Item]


def split(items: Sequence[Item], *, prompt: Callable[[Item], bytes], share: float, seed: int) -> DataSplit[Item]:
    """Holds out `share` (0 to below 1) of the prompts, at least one if it is above 0, with all that answers them.

    Which ones depends on seed and prompt only: where the records stand does not matter. Raises RecordError if nothing
    would be left to train on.
    """
    assert 0 <= share < 1, f"a share of {share} is not within 0 and 1"
    keys = [_rank(prompt(item), seed) for item in items]
    ranked = sorted(set(keys))
    out = set(ranked[: max(1, round(share * len(ranked)))]) if share > 0 else set()
    training = [item for item, key in zip(items, keys, strict=True) if key not in out]
    if not training:
        raise RecordError(f"holding out {share:g} of {len(ranked)} prompts leaves nothing to train on")
    return DataSplit(training=training, held_out=[item for item, key in zip(items, keys, strict=True) if key in out])


def prompt_of(tokenized: TokenizedExample) -> bytes:
    """The prompt's tokens, by which records with one prompt stay on one side of a split."""
    return tokenized.token_ids[: tokenized.prompt_length].tobytes()


def _rank(prompt: bytes, seed: int) -> bytes:
    return xxhash.xxh3_128_digest(seed.to_bytes(8, "little") + prompt)


@dataclass(frozen=True, kw_only=True)
class LengthStatistics:
    """Lengths in tokens of `count` sequences, prompts included; `trained` is how many tokens are trained in all."""

    count: int
    total: int
    trained: int
    mean: float
    median: float
    p90: float
    p99: float
    longest: int

    def __str__(self) -> str:
        return (
            f"{self.count} sequences, {self.total} tokens ({self.trained} trained); length {self.mean:.1f} on average, "
            f"median {self.median:.0f}, p90 {self.p90:.0f}, p99 {self.p99:.0f}, longest {self.longest}"
        )


def length_statistics(sequences: Sequence[TokenizedExample]) -> LengthStatistics:
    """At least one sequence is needed."""
    assert sequences, "lengths of nothing"
    lengths = np.array([len(sequence.token_ids) for sequence in sequences])
    median, p90, p99 = np.percentile(lengths, [50, 90, 99])
    return LengthStatistics(
        count=len(lengths),
        total=int(lengths.sum()),
        trained=sum(sequence.trained_length for sequence in sequences),
        mean=float(lengths.mean()),
        median=float(median),
        p90=float(p90),
        p99=float(p99),
        longest=int(lengths.max()),
    )
