"""Words in an answer: whole numbers, and names of variables, of functions, of what is asked for (|AB|, V_1 : V_2)."""

import re
from collections.abc import Sequence
from fractions import Fraction

from reward_service.verifiers.mathematics.answers import MAX_CHARS
from reward_service.verifiers.mathematics.tokens import Token, commands

_SMALL = {
    word: number
    for number, word in enumerate(
        (
            *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
            *("eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
        )
    )
}
_TENS = {
    word: 10 * number
    for number, word in enumerate(
        ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"), start=2
    )
}
# What multiplies the number before it: 3.5 million.
MULTIPLIERS = {
    "dozen": 12,
    "hundred": 100,
    "thousand": 1000,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
}


_SHARES = {
    "half": 2,
    "halves": 2,
    "third": 3,
    "quarter": 4,
    "fourth": 4,
    "fifth": 5,
    "sixth": 6,
    "eighth": 8,
    "tenth": 10,
}
_NAME = re.compile(r"\\?[A-Za-z]+'*(_\{?\w+\}?)?'*(\([A-Za-z\\](,[A-Za-z\\]+)*\)|\(\\?[a-z]+\)|\([-+]?[\d.]+\))?")
# A tuple of names is one too: (x, y) = (1, 2).
_TUPLE = re.compile(r"\(\\?[A-Za-z]\w*(_\{?\w+\}?)?([,;]\\?[A-Za-z]\w*(_\{?\w+\}?)?)*\)")
_LETTER_RATIO = re.compile(r"[a-z](:[a-z])+")
# Of what is measured in a figure: sides, angles, areas, and their ratios and products.
_MARKS = frozenset("|:/(){}_'*")
_PARTS = commands("frac angle triangle vec overline overrightarrow widehat sin cos tan cot perp odot operatorname")


def number_of(words: Sequence[str]) -> Fraction | None:
    """The number that the words name, such as `minus three hundred and twelve` or `two thirds`, or None."""
    share = _SHARES.get(words[-1], _SHARES.get(words[-1].removesuffix("s"))) if len(words) == 2 else None
    if share is not None:
        return Fraction(_SMALL[words[0]], share) if 0 < _SMALL.get(words[0], 0) < 10 else None
    whole = _whole_number_of(words)
    return None if whole is None else Fraction(whole)


def _whole_number_of(words: Sequence[str]) -> int | None:
    if words and words[0] in ("minus", "negative"):
        size = _whole_number_of(words[1:])
        return None if size is None else -size
    for scale in ("million", "thousand", "hundred"):
        if scale in words:
            return _scaled(words, scale)
    if len(words) == 1:
        return _SMALL.get(words[0], _TENS.get(words[0]))
    if len(words) == 2 and words[0] in _TENS and 0 < _SMALL.get(words[1], 0) < 10:
        return _TENS[words[0]] + _SMALL[words[1]]
    return None


def _scaled(words: Sequence[str], scale: str) -> int | None:
    at = words.index(scale)
    rest = words[at + 2 :] if "and" in words[at + 1 : at + 2] else words[at + 1 :]
    times = _whole_number_of(words[:at]) if at else 1
    more = _whole_number_of(rest) if rest else 0
    if times is None or more is None or not (0 < times < 1000 and 0 <= more < MULTIPLIERS[scale]):
        return None
    return times * MULTIPLIERS[scale] + more


def is_word(token: Token) -> bool:
    """A letter or word, or what joins words."""
    return token.kind in ("letter", "word") or token.text in ("'", "-")


def are_words(tokens: Sequence[Token]) -> bool:
    """True if it is a phrase. `x-y` and `-x` are none: beside a minus there has to be a real word."""
    if not all(is_word(token) for token in tokens):
        return False
    return all(token.text != "-" for token in tokens) or any(
        token.kind == "word" and (token.roman or len(token.text) > 2) for token in tokens
    )


def name_of(tokens: Sequence[Token]) -> str | None:
    """The tokens as a name, if they are one: a variable, a function of something, words, a quantity of a figure."""
    if not tokens:
        return None
    if are_words(tokens) or _is_quantity(tokens):
        return " ".join(token.text for token in tokens)
    text = "".join(token.text for token in tokens)
    named = _TUPLE.fullmatch(text) or _NAME.fullmatch(text) or _LETTER_RATIO.fullmatch(text)
    return text if len(text) < MAX_CHARS and named else None


def _is_quantity(tokens: Sequence[Token]) -> bool:
    r"""Made of capital letters, with figures in subscripts alone: `|AB|`, `\frac{NO}{BO}`, `V_1:V_2`, `S_{MBCN}:S`."""
    rest = _without_subscripts(tokens)
    capitals = [token.text.isascii() and token.text.isupper() for token in rest if token.kind in ("letter", "word")]
    others = (token for token in rest if token.kind not in ("letter", "word"))
    return bool(capitals) and all(capitals) and all(token.text in _MARKS or token.text in _PARTS for token in others)


def _without_subscripts(tokens: Sequence[Token]) -> list[Token]:
    found: list[Token] = []
    at = 0
    while at < len(tokens):
        if tokens[at].text != "_":
            found.append(tokens[at])
            at += 1
        elif at + 1 < len(tokens) and tokens[at + 1].text == "{":
            end = next((place for place in range(at, len(tokens)) if tokens[place].text == "}"), len(tokens) - 1)
            at = end + 1
        else:
            at += 2
    return found
