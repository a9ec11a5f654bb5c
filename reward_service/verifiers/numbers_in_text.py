"""Numbers as people write them: `1,234.5`, `1.234,5`, `-3/4`, `2 1/2`, `6.02 x 10^23`, `$5`, `12 %`."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Literal

DecimalMark = Literal["point", "comma"]

_MAX_DIGITS = 1000
_MAX_EXPONENT = 5000
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
_RAISED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺]+")
_LATEX_GAP = re.compile(r"(?<=\d)(?:\{,\}|,\\!|\\[,!;: ]|[\u00a0\u2009\u202f'’_])(?=\d{3}(?!\d))")
_DASHES = str.maketrans({"−": "-", "–": "-", "﹣": "-", "－": "-", "％": "%", "×": "x", "⁄": "/"})


@dataclass(frozen=True, slots=True)
class Found:
    """A number, whether it is a percentage (`12 %` is 12 here), and where in the tidied text it stands."""

    value: Fraction
    percent: bool
    start: int
    end: int


def tidied(text: str, *, mark: DecimalMark) -> str:
    """The text with ASCII signs, superscripts as `^5`, and the usual separator of thousands."""
    text = _RAISED.sub(lambda match: "^" + match.group().translate(_SUPERSCRIPTS), text).translate(_DASHES)
    text = text.replace(r"\times", " x ").replace(r"\cdot", " x ").replace(r"\%", "%").replace(r"\$", "$")
    return _LATEX_GAP.sub("," if mark == "point" else ".", text)


def numbers(text: str, *, mark: DecimalMark) -> Iterator[Found]:
    """The numbers in a tidied text, in order. One beyond any size that we compute with is left out."""
    for match in _pattern(mark).finditer(text):
        value = _value(match, mark)
        if value is not None:
            yield Found(value, match["percent"] is not None, match.start(), match.end())


@cache
def _pattern(mark: DecimalMark) -> re.Pattern[str]:
    group, point = (",", r"\.") if mark == "point" else (r"\.", ",")
    plain = rf"(?:\d{{1,3}}(?:{group}\d{{3}})+(?!\d)|\d+)(?:{point}\d+)?|(?<!\d){point}\d+"
    exponent = r"[eE](?P<e>[+-]?\d+)(?![\w.])|\s*[xX*]\s*10\s?\^\s?\{?\s?(?P<ten>[+-]?\d+)\s?\}?"
    return re.compile(
        rf"(?<![\w.^])(?P<sign>(?<![\d)\]}}])[-+])?\s?(?:[$€£¥]\s?)?(?P<minus>-)?(?:"
        rf"\\[dt]?frac\s?\{{\s?(?P<above>-?\d+)\s?\}}\s?\{{\s?(?P<below>\d+)\s?\}}"
        rf"|(?P<number>{plain})(?:{exponent})?"
        rf"(?:\s?\\[dt]?frac\s?\{{(?P<over>\d+)\}}\s?\{{(?P<under>\d+)\}}|\s(?P<part>\d+)/(?P<whole>\d+)(?!\d)"
        rf"|\s?/\s?(?P<divisor>{plain})(?!/))?"
        r")(?P<percent>\s?(?:%|percent\b|per\scent\b))?"
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
    return value if match["divisor"] is None else value / _decimal(match["divisor"], mark)


def _decimal(text: str, mark: DecimalMark) -> Fraction:
    group, point = (",", ".") if mark == "point" else (".", ",")
    return Fraction(text.replace(group, "").replace(point, "."))


def _power_of_ten(text: str) -> Fraction:
    exponent = int(text)
    if abs(exponent) > _MAX_EXPONENT:
        raise OverflowError(f"10 to the power of {text}")
    return Fraction(10) ** exponent
