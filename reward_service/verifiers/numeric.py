"""`numeric`: the completion's number is the right one, within tolerances; numbers are read as people write them:
`1,234.5`, `1.234,5`, `-3/4`, `2 1/2`, `6.02 x 10^23`, `$5`, `12 %`, `3 million`.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from reward_service.verifier.submission import Score, Submission
from reward_service.verifiers.extraction import TAIL_CHARS, boxed_together, last_stated, last_tagged, strip_thinking

DecimalMark = Literal["point", "comma"]

_MAX_DIGITS = 1000
_MAX_EXPONENT = 5000
_MAX_POWER_BITS = 20_000
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
_RAISED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺]+")
_LATEX_GAP = re.compile(r"(?<=\d)(?:\{,\}|,\\!|\\[,!;: ]|[\u00a0\u2009\u202f'’_])(?=\d{3}(?!\d))")
_SPACED = re.compile(r"(?<![\d.,/])\d{1,3}(?: \d{3})+(?![\d/])")
_DASHES = str.maketrans({"−": "-", "–": "-", "﹣": "-", "－": "-", "％": "%", "×": "x", "⁄": "/"})
_MAX_END_CHARS = 2000
_MAX_CONTENT_CHARS = 1000
_ALTERNATIVES = re.compile(r"\b(?:or|and)\b|[,;]")
_NEGATED = re.compile(r"\b(?:not|isn't|never)\s+[*_$(]*$", re.IGNORECASE)
_RANGE = re.compile(r"\b(?:between|from)\s*[$(\[]*$")
_OR = re.compile(r"\W*(?:\w+\W+)?or\W+|[\s,;|&]+(?:and\s+)?")
# Not the one of `x >= 12`.
_EQUALS = re.compile(r"(?<![<>!])=")
_BOUND = re.compile(r"(?:[<>≤≥≠]|[<>!]=|\\(?:leq?|geq?|neq?|lt|gt)(?![A-Za-z]))\s*[$({]*\s*$")
# A number before which this stands is only the argument of a function, or the lower part of a fraction.
_APPLIED = re.compile(
    r"(?:√|\\?(?:sqrt|log|ln|lg|exp|sin|cos|tan)\s?(?:\[\d\]|_\{?\w{1,3}\}?)?|(?<![A-Za-z])[A-Za-z](?=\())"
    r"\s*[({]?\s*$|\}\s*\{\s*$"
)
# `5π` and `5√2` are not 5.
_TIMES = re.compile(r"\s*(?:x\s|\*)?\s*(?:\\pi(?![A-Za-z])|π|\\?sqrt\b|√|e\^)")
# `2^x` is not 2; `2^{nd}` and `2^{\circ}` are.
_TO_A_POWER = re.compile(r"\s*\^\s*\{?\s*-?(?!(?:st|nd|rd|th)\b)[A-Za-z]")
# Fractions as LaTeX has them with fewer braces, too.
_FRACTION = re.compile(r"(\\[dt]?frac)\s*(?:\{\s?(-?\d+)\s?\}|(\d))\s*(?:\{\s?(\d+)\s?\}|(\d))")
# What leaves open which of two last numbers is meant.
_UNDECIDED = re.compile(r"\s*or\s*")
_BETWEEN = re.compile(r"\bbetween\s*[$(\[]*$")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_WORD = re.compile(r"[^\W\d_]{2,}")
_CALCULATED = re.compile(r"\s*(?:to|through|till|until|plus|minus|times|divided by|over)\s*", re.IGNORECASE)
_SCALES = {
    "thousand": 10**3,
    "k": 10**3,
    "million": 10**6,
    "m": 10**6,
    "billion": 10**9,
    "bn": 10**9,
    "b": 10**9,
    "trillion": 10**12,
}


@dataclass(frozen=True, slots=True)
class FoundNumber:
    """A number, whether it is a percentage (`12 %` is 12 here), and where in the tidied text it stands.

    Of `3 million` the value is 3, and the scale a million.
    """

    value: Fraction
    percent: bool
    start: int
    end: int
    scale: int = 1


def tidied(text: str, *, mark: DecimalMark) -> str:
    """The text with ASCII signs, superscripts as `^5`, and the usual separator of thousands."""
    text = _RAISED.sub(lambda match: "^" + match.group().translate(_SUPERSCRIPTS), text).translate(_DASHES)
    text = text.replace(r"\times", " x ").replace(r"\cdot", " x ").replace(r"\%", "%").replace(r"\$", "$")
    text = _FRACTION.sub(r"\1{\2\3}{\4\5}", text)
    text = _LATEX_GAP.sub("," if mark == "point" else ".", text)
    return _SPACED.sub(lambda match: match.group().replace(" ", ""), text)


def numbers(text: str, *, mark: DecimalMark) -> Iterator[FoundNumber]:
    """The numbers in a tidied text, in order. One beyond any size that we compute with is left out."""
    for match in _pattern(mark).finditer(text):
        value = _value(match, mark)
        if value is not None:
            scale = _SCALES.get((match["scale"] or match["letter"] or "").lower(), 1)
            yield FoundNumber(value, match["percent"] is not None, match.start(), match.end(), scale)


@cache
def _pattern(mark: DecimalMark) -> re.Pattern[str]:
    group, point = (",", r"\.") if mark == "point" else (r"\.", ",")
    # In India the thousands stand alone: `12,34,567`.
    grouped = rf"\d{{1,3}}(?:{group}\d{{3}})+(?!\d)|\d{{1,2}}(?:{group}\d{{2}})+{group}\d{{3}}(?![\d{group}])"
    plain = rf"(?:{grouped}|\d+)(?:{point}\d+)?|(?<!\d){point}\d+"
    exponent = r"[eE](?P<e>[+-]?\d+)(?![\w.])|\s*[xX*]\s*10\s?\^\s?\{?\s?(?P<ten>[+-]?\d+)\s?\}?"
    return re.compile(
        # Not an exponent or an index, as in `m^{2}`.
        rf"(?<![A-Za-z0-9_.^])(?<![_^]\{{)(?<![_^]-)(?<![_^]\{{-)(?P<sign>(?<![\d)\]}}])[-+])?\s?(?:[$€£¥]\s?)?(?P<minus>-)?(?:"
        rf"\\[dt]?frac\s?\{{\s?(?P<above>-?\d+)\s?\}}\s?\{{\s?(?P<below>\d+)\s?\}}"
        rf"|(?P<number>{plain})(?:{exponent})?"
        rf"(?:\s?\\[dt]?frac\s?\{{(?P<over>\d+)\}}\s?\{{(?P<under>\d+)\}}|\s(?P<part>\d+)/(?P<whole>\d+)(?!\d)"
        rf"|\s?/\s?(?P<divisor>{plain})(?!/)|\s?\^\s?\{{?\s?(?P<power>-?\d{{1,3}})(?!\d)\s?\}}?)?"
        r")(?:(?P<percent>\s?(?:%|percent\b|per\scent\b))|(?P<letter>[kKMB]|bn)(?![\w^])"
        r"|\s?(?:\\text\s?\{\s?)?(?P<scale>thousand|million|billion|trillion)s?\b)?"
    )


def _value(match: re.Match[str], mark: DecimalMark) -> Fraction | None:
    if len(match.group()) > _MAX_DIGITS:
        return None
    sign = -1 if (match["sign"] == "-") != (match["minus"] is not None) else 1
    try:
        return sign * _magnitude(match, mark)
    except (ZeroDivisionError, OverflowError):
        return None


def _magnitude(match: re.Match[str], mark: DecimalMark) -> Fraction:
    if match["above"] is not None:
        return Fraction(int(match["above"]), int(match["below"]))
    value = _decimal(match["number"], mark) * _power_of_ten(match["e"] or match["ten"] or "0")
    if match["over"] is not None:
        return value + Fraction(int(match["over"]), int(match["under"]))
    if match["part"] is not None:
        return value + Fraction(int(match["part"]), int(match["whole"]))
    if match["power"] is not None:
        return _power(value, int(match["power"]))
    return value if match["divisor"] is None else value / _decimal(match["divisor"], mark)


def _power(value: Fraction, exponent: int) -> Fraction:
    if abs(exponent) * max(value.numerator.bit_length(), value.denominator.bit_length()) > _MAX_POWER_BITS:
        raise OverflowError("a power of so many digits")
    return value**exponent


def _decimal(text: str, mark: DecimalMark) -> Fraction:
    group, point = (",", ".") if mark == "point" else (".", ",")
    return Fraction(text.replace(group, "").replace(point, "."))


def _power_of_ten(text: str) -> Fraction:
    exponent = int(text)
    if abs(exponent) > _MAX_EXPONENT:
        raise OverflowError(f"10 to the power of {text}")
    return Fraction(10) ** exponent


Place = Literal["tag", "boxed", "stated", "last"]
Percent = Literal["either", "share", "number"]
_Gold = Annotated[int | float, Field(allow_inf_nan=False)] | Annotated[str, Field(min_length=1, max_length=1000)]


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

    Units and currency signs do not count; `3 million` may be 3 where the right answer is that of a question for
    millions. Several different numbers (`5 or 6`, `5 6`), a bound (`> 5`), a range and what is still to be calculated
    (`5 - 1`, `5π`) are no answer. The last `TAIL_CHARS` characters are read.
    """
    given = _given(strip_thinking(submission.completion)[-TAIL_CHARS:], arguments)
    if given is None:
        return Score(reward=0.0, components={"parsed": 0.0}, explanation="no number was found")
    correct = any(_is_right(gold, given, arguments) for gold in arguments.golds())
    right = " or ".join(map(str, arguments.golds()))
    return Score(
        reward=float(correct), components={"parsed": 1.0}, explanation=f"read {_shown(given)}, right is {right}"
    )


def _shown(number: FoundNumber) -> str:
    try:
        return f"{float(number.value):.12g}{' %' if number.percent else ''}"
    except OverflowError:
        return "a number of more than 308 digits"


def _end_of(text: str) -> str:
    """Its last characters, from a space on."""
    return text if len(text) <= _MAX_END_CHARS else text[-_MAX_END_CHARS:].partition(" ")[2]


def _in(text: str, mark: DecimalMark) -> Iterator[FoundNumber]:
    return numbers(tidied(text, mark=mark), mark=mark)


def _given(text: str, arguments: NumericArguments) -> FoundNumber | None:
    for place in arguments.extract:
        if place == "last":
            return _last(_end_of(text), arguments.decimal_mark)
        content = _PLACES[place](text)
        if content is not None:
            final = place != "stated" or "####" in text
            return _said(content[:_MAX_CONTENT_CHARS], arguments.decimal_mark, final=final)
    return None


def _last(text: str, mark: DecimalMark) -> FoundNumber | None:
    """The last number that is not denied: `it is not 5`."""
    text = tidied(text, mark=mark)
    found = [one for one in numbers(text, mark=mark) if not _NEGATED.search(text[max(0, one.start - 20) : one.start])]
    return found[-1] if found and not _is_factor(text, found[-1]) and not _is_undecided(text, found) else None


def _is_undecided(text: str, found: Sequence[FoundNumber]) -> bool:
    """True of the last two numbers in `5 or 6` and `between 5 and 6`."""
    if len(found) < 2 or found[-2].value == found[-1].value:
        return False
    first, last = found[-2:]
    before, between = text[max(0, first.start - 20) : first.start], text[first.end : last.start]
    return _UNDECIDED.fullmatch(between) is not None or (
        between.strip() == "and" and _BETWEEN.search(before) is not None
    )


def _is_factor(text: str, number: FoundNumber) -> bool:
    """True of the 5 in `5π`, `5^x`, `\\sqrt{5}` or `\\frac{x}{5}`."""
    before = text[max(0, number.start - 20) : number.start]
    if _APPLIED.search(before) is not None or _TO_A_POWER.match(text, number.end) is not None:
        return True
    return _TIMES.match(text, number.end) is not None


def _stated(text: str) -> str | None:
    _, marker, after = text.rpartition("####")
    return after.strip().partition("\n")[0] if marker else last_stated(text)


def _boxed(text: str) -> str | None:
    return ", ".join(boxed_together(text)) or None


_PLACES: dict[Place, Callable[[str], str | None]] = {"tag": last_tagged, "boxed": _boxed, "stated": _stated}


def _said(content: str, mark: DecimalMark, *, final: bool) -> FoundNumber | None:
    """The first number after the last equals sign. `final`: nothing but the answer should stand there."""
    text = _EQUALS.split(tidied(content, mark=mark))[-1]
    found = list(numbers(text, mark=mark))
    if not found:
        return None
    first, *others = found
    before = text[: first.start]
    if _BOUND.search(before) or _is_factor(text, first) or (others and _RANGE.search(before)):
        return None
    if any(other.value != first.value for other in others):
        between = text[first.end : others[0].start]
        if _CALCULATED.fullmatch(between) or (_several(between) if final else _OR.fullmatch(between)):
            return None
    return first


def _several(between: str) -> bool:
    """True if what stands between two numbers lets the first not be the answer alone: `5 or 6`, `5 6`, `5 - 1`."""
    return _ALTERNATIVES.search(between) is not None or _WORD.search(_COMMAND.sub("", between)) is None


def _is_right(gold: int | float | str, given: FoundNumber, arguments: NumericArguments) -> bool:
    if isinstance(gold, str):
        right = next(_in(gold, arguments.decimal_mark))
    else:
        # The shortest text of a float is what its writer meant by it: 0.1 and not 3602879701896397 / 2^55.
        right = FoundNumber(Fraction(repr(gold)), percent=False, start=0, end=0)
    if given.scale != right.scale:
        if _near(given.value * given.scale, right.value * right.scale, arguments):
            return True
        if 1 not in (given.scale, right.scale):
            return False
    value, percent = right.value, right.percent
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
