"""Preferences: which of two completions is the better one, or whether one is good.

A pair is a record in one of three forms, each with an optional number `margin` (how much better the chosen one is):

    {"prompt": text,     "chosen": text,     "rejected": text}      the texts as they stand
    {"prompt": messages, "chosen": text,     "rejected": text}      the assistant's replies; or messages that go on
    {                    "chosen": messages, "rejected": messages}  whole conversations that begin alike

An unpaired record has `prompt` and `completion`, in the same forms, and `label`: true for a good completion. Messages
have `role` and `content`, and become text by the chat template of the model.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from learner.data.examples import (
    DataTokenizer,
    Message,
    TokenizedExample,
    check_record,
    read_messages,
    reply_parts,
    shape_of,
    tokenize,
)
from learner.data.sources import RecordError, read_parsed
from protocol.rewards import RewardFormat

_PAIR = (
    "expected `chosen` and `rejected` with a `prompt`, or as conversations that begin alike (lists of messages); "
    "a text `prompt` takes texts, a list of messages takes texts or lists of messages"
)
_LABELLED = "expected `prompt` (a text or messages), `completion` (a text or messages) and `label` (true or false)"


@dataclass(frozen=True, kw_only=True)
class PreferencePair:
    """Two completions of one prompt, whose tokens are equal in both. `margin` is how much better the chosen one is.

    `form`: whether the prompt was a text or messages.
    """

    chosen: TokenizedExample
    rejected: TokenizedExample
    margin: float = 0.0
    form: RewardFormat = "plain"


@dataclass(frozen=True, kw_only=True)
class LabelledCompletion:
    """A completion that is good (`label`) or is not."""

    completion: TokenizedExample
    label: bool


def read_pairs(path: Path, tokenizer: DataTokenizer) -> list[PreferencePair]:
    """All pairs, tokenized; both end with their last trained token. Raises RecordError, FileNotFoundError."""
    pairs = list(read_parsed(path, lambda record: _pair(record, tokenizer)))
    if not pairs:
        raise RecordError(f"{path} holds no preference pairs: {_PAIR}")
    return pairs


def read_labelled(path: Path, tokenizer: DataTokenizer) -> list[LabelledCompletion]:
    """All unpaired records, tokenized. Raises RecordError, FileNotFoundError."""
    labelled = list(read_parsed(path, lambda record: _labelled(record, tokenizer)))
    if not labelled:
        raise RecordError(f"{path} holds no records: {_LABELLED}")
    return labelled


def _pair(record: object, tokenizer: DataTokenizer) -> PreferencePair:
    if not isinstance(record, Mapping):
        raise RecordError(f"{_PAIR}; got {shape_of(record)}")
    check_record(record)
    prompt, chosen, rejected = _of_one_prompt(record)
    sides = [reply_parts(prompt, side, tokenizer) for side in (chosen, rejected)]
    if sides[0] is None or sides[1] is None:
        raise RecordError(f"{_PAIR}; got {shape_of(record)}")
    return PreferencePair(
        chosen=tokenize(sides[0], tokenizer).without_tail(),
        rejected=tokenize(sides[1], tokenizer).without_tail(),
        margin=_margin(record.get("margin")),
        form="plain" if isinstance(prompt, str) else "chat",
    )


def _labelled(record: object, tokenizer: DataTokenizer) -> LabelledCompletion:
    if isinstance(record, Mapping):
        check_record(record)
    match record:
        case {"prompt": prompt, "completion": completion, "label": bool(label)}:
            parts = reply_parts(prompt, completion, tokenizer)
            if parts is not None:
                return LabelledCompletion(completion=tokenize(parts, tokenizer).without_tail(), label=label)
    raise RecordError(f"{_LABELLED}; got {shape_of(record)}")


def _of_one_prompt(record: Mapping[str, object]) -> tuple[object, object, object]:
    prompt, chosen, rejected = record.get("prompt"), record.get("chosen"), record.get("rejected")
    match prompt, chosen, rejected:
        case None, [*first], [*second]:
            begin = _common_beginning(read_messages(first, trained=False), read_messages(second, trained=False))
            return first[:begin], first[begin:], second[begin:]
        case _:
            return prompt, chosen, rejected


def _common_beginning(chosen: Sequence[Message], rejected: Sequence[Message]) -> int:
    """Number of messages that the two share. Of equal ones the last is left, so that there is a completion."""
    alike = 0
    for first, second in zip(chosen, rejected, strict=False):
        if first != second:
            break
        alike += 1
    if alike == len(chosen) == len(rejected):
        alike -= 1
    if alike <= 0:
        raise RecordError("chosen and rejected do not begin alike: their first messages differ; give a `prompt`")
    after = [side[alike]["role"] if alike < len(side) else "nothing" for side in (chosen, rejected)]
    if after != ["assistant", "assistant"]:
        raise RecordError(
            f"chosen and rejected part at message {alike + 1}, which is from {after[0]} and {after[1]}: "
            "expected the assistant's in both, since they must answer one prompt"
        )
    return alike


def _margin(value: object) -> float:
    match value:
        case None:
            return 0.0
        case bool():
            pass
        case int() | float() if math.isfinite(value):
            return float(value)
    raise RecordError(f"`margin` is {value!r}, expected a finite number")
