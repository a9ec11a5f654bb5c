r"""`numeric`: the completion's number is the right one, within tolerances."""

import re
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from reward_service.extraction import TAIL_CHARS, last_boxed, last_stated, last_tagged, strip_thinking
from reward_service.verifier import Score, Submission
from reward_service.verifiers.numbers_in_text import DecimalMark, Found, numbers, tidied

Place = Literal["tag", "boxed", "stated", "last"]
Percent = Literal["either", "share", "number"]
_Gold = Annotated[int | float, Field(allow_inf_nan=False)] | Annotated[str, Field(min_length=1, max_length=1000)]
_MAX_END_CHARS = 2000
_MAX_CONTENT_CHARS = 1000
_ALTERNATIVES = re.compile(r"\b(?:or|and)\b|[,;]")

_OR = re.compile(r"\W*(?:\w+\W+)?or\W+")


class NumericArguments(BaseModel):
    """`answer`: the right number, or several of which each is right."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    answer: _Gold | Annotated[tuple[_Gold, ...], Field(min_length=1, max_length=32, strict=False)] = Field(
        description="the right number, as a number or written (1/2, 12 %, 1,234); or a list of alternatives"
    )
    absolute_tolerance: float = Field(0.0, ge=0, allow_inf_nan=False, description="how far off the number may be")
    relative_tolerance: float = Field(
        0.0, ge=0, lt=1, description="how far off it may be as a share of the right one; the larger tolerance counts"
    )
    decimal_mark: DecimalMark = Field(
        "point", description="point: 1,234.5; comma: 1.234,5; in the completion, and in an answer that is text"
    )
    percent: Percent = Field(
        "either",
        description="what 25 % is where the right answer is no percentage (or the other way round); share: 0.25; "
        "number: 25; either: 0.25, and also 25, as no share is above 1",
    )
    extract: tuple[Place, ...] = Field(
        default=("tag", "boxed", "stated", "last"),
        min_length=1,
        strict=False,
        description=r"where the number is looked for, the first place that there is: tag: <answer>..</answer>; boxed: "
        r"\boxed{..}; stated: #### .. or 'the answer is ..'; last: the last number in the last 2,000 characters",
    )

    @model_validator(mode="after")
    def _is_one_number(self) -> "NumericArguments":
        for answer in self.golds():
            if isinstance(answer, str) and len(tuple(_in(answer, self.decimal_mark))) != 1:
                raise ValueError(f"expected one number as the answer, got {answer[:100]!r}")
        return self

    def golds(self) -> Sequence[int | float | str]:
        """The right answers, as given."""
        return self.answer if isinstance(self.answer, tuple) else (self.answer,)


def numeric(submission: Submission, arguments: NumericArguments) -> Score:
    """1 when the completion's final number is the right one within the larger of the two tolerances, else 0.

    Units and currency signs do not count. Several different numbers (`5 or 6`) are no answer. The
    last `TAIL_CHARS` characters are read.
    """
    given = _given(strip_thinking(submission.completion)[-TAIL_CHARS:], arguments)
    if given is None:
        return Score(reward=0.0, components={"parsed": 0.0})
    correct = any(_is_right(gold, given, arguments) for gold in arguments.golds())
    return Score(reward=float(correct), components={"parsed": 1.0})


def _end_of(text: str) -> str:
    """Its last characters, from a space on."""
    return text if len(text) <= _MAX_END_CHARS else text[-_MAX_END_CHARS:].partition(" ")[2]


def _in(text: str, mark: DecimalMark) -> Iterator[Found]:
    return numbers(tidied(text, mark=mark), mark=mark)


def _given(text: str, arguments: NumericArguments) -> Found | None:
    for place in arguments.extract:
        if place == "last":
            return next(reversed(tuple(_in(_end_of(text), arguments.decimal_mark))), None)
        content = _PLACES[place](text)
        if content is not None:
            return _said(content[:_MAX_CONTENT_CHARS], arguments.decimal_mark, final=place != "stated")
    return None


def _stated(text: str) -> str | None:
    _, marker, after = text.rpartition("####")
    return after.strip().partition("\n")[0] if marker else last_stated(text)


_PLACES: dict[Place, Callable[[str], str | None]] = {"tag": last_tagged, "boxed": last_boxed, "stated": _stated}


def _said(content: str, mark: DecimalMark, *, final: bool) -> Found | None:
    """The first number after the last equals sign. `final`: nothing but the answer should stand there."""
    text = tidied(content, mark=mark).rpartition("=")[2]
    found = list(numbers(text, mark=mark))
    if not found:
        return None
    first, *others = found
    if any(other.value != first.value for other in others):
        between = text[first.end : others[0].start]
        if _ALTERNATIVES.search(between) if final else _OR.fullmatch(between):
            return None
    return first


def _is_right(gold: int | float | str, given: Found, arguments: NumericArguments) -> bool:
    if isinstance(gold, str):
        right = next(_in(gold, arguments.decimal_mark))
        value, percent = right.value, right.percent
    else:
        # The shortest text of a float is what its writer meant by it: 0.1 and not 3602879701896397 / 2^55.
        value, percent = Fraction(repr(gold)), False
    if given.percent == percent:
        return _near(given.value, value, arguments)
    share = given.value / 100 if given.percent else given.value
    as_share = _near(share, value / 100 if percent else value, arguments)
    as_number = _near(given.value, value, arguments)
    if arguments.percent == "either":
        # No share is above 1, so 25 asks for percent, and 0.25 does not.
        return as_share or (as_number and abs(value) > 1)
    return as_share if arguments.percent == "share" else as_number


def _near(given: Fraction, right: Fraction, arguments: NumericArguments) -> bool:
    allowed = max(Fraction(arguments.absolute_tolerance), Fraction(arguments.relative_tolerance) * abs(right))
    return abs(given - right) <= allowed
