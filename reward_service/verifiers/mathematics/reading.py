"""Reads an answer's text: what kind of answer it is, and its parts.

    text -> tokens -> several answers? -> a relation? -> brackets, a matrix, a ratio? -> words, or a value with its unit

One text may have several readings (`(B) 12` is a choice or a value); all are given. A number with separators, such as
`1,234`, is a number and no list.
"""

import itertools
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Literal

from reward_service.verifiers.mathematics.answers import (
    CURRENCY,
    MAX_CHARS,
    MAX_DEPTH,
    MAX_ITEMS,
    MAX_TOKENS,
    Answer,
    BracketedTuple,
    Combination,
    Grid,
    Listing,
    Node,
    Number,
    OverLimits,
    Ratio,
    RealLine,
    Relation,
    Scalar,
    SetOperator,
    Side,
    Text,
    Unreadable,
    parse_unit,
    starts_unit,
)
from reward_service.verifiers.mathematics.expressions import FUNCTIONS, parse_expression
from reward_service.verifiers.mathematics.tokens import (
    CLOSING,
    OPENING,
    Token,
    at_top,
    commands,
    encloses,
    split,
    tokenise,
    trimmed,
)
from reward_service.verifiers.mathematics.words import MULTIPLIERS, are_words, is_word, name_of, number_of

_RELATIONS = frozenset(("=", "<", ">", "<=", ">=", "!=", r"\approx", r"\in"))
_SEPARATORS = frozenset((",", ";", "or", "and", "&&"))
_SET_OPERATORS: dict[str, SetOperator] = {r"\cup": "union", r"\cap": "intersection", r"\setminus": "difference"}
_NO_SOLUTION = re.compile(r"(there (is|are) )?no (real |such |integer |valid )?(solutions?|roots?|values?)( exists?)?")
_ALL_REALS = re.compile(r"(all|any) (the )?(reals?|real (numbers?|values?)|values? of [a-z])")
_SAME_WORDS = {
    "does not exist": "undefined",
    "dne": "undefined",
    "not defined": "undefined",
    "infinitely many solutions": "infinitely many",
}
# `(B) or (C)` is no choice; `(A)(B)`, `(A)^2` and `A: B` are none either.
_NO_CHOICE_BEFORE = frozenset(("^", "+", "-", "(", "/", "*", "=", *_SEPARATORS))
_ROUNDED = frozenset(("approximately", "about", "roughly", r"\approx"))
_POSITIVE_REALS = frozenset((r"\reals^+", r"\reals^{+}", r"\reals_+", r"\reals_{+}", r"\reals_{>0}"))
_BEFORE_CHOICE = frozenset(("option", "choice", "answer"))
_BASE = re.compile(r"\{?(\d{1,2}|two|ten)\}?")
# Of what begins so the value is asked for, and then stands on the other side.
_ASKED_FOR = commands("lVert Vert sum prod int iint oint lim max min gcd det")
_BAR_COLON = frozenset(("|", ":"))


def read(text: str, *, lenient: bool = False) -> tuple[Answer, ...]:
    """All readings of an answer. `lenient`: `5m` may be five metres, and `2,5` a decimal.

    Raises OverLimits, Unreadable.
    """
    if len(text) > MAX_CHARS:
        raise OverLimits(f"an answer of {len(text)} characters")
    tokens = tokenise(text)
    if len(tokens) > MAX_TOKENS:
        raise OverLimits(f"an answer of {len(tokens)} tokens")
    variants: list[Sequence[Token]] = [
        tokens,
        *_choice_readings(tokens),
        *_point_readings(tokens),
        *_number_of_ways(tokens),
    ]
    if lenient:
        variants.extend((*_decimal_comma(tokens), *_odds(tokens)))
    found = _all_readings(variants, _Reader(lenient_units=lenient))
    words = trimmed(tokens)
    if len(words) == 1 and words[0].kind == "word":  # `yes` is no product
        found = (*found, _text(words))
    return tuple(dict.fromkeys(found))


def _all_readings(variants: Sequence[Sequence[Token]], reader: "_Reader") -> tuple[Answer, ...]:
    found: list[Answer] = []
    fault: Unreadable | None = None
    for variant in variants:
        try:
            answer = reader.answer(variant)
        except Unreadable as error:
            fault = fault or error
            continue
        found.append(answer)
    if fault is not None and not found:
        raise fault
    return tuple(found)


def _choice_readings(tokens: Sequence[Token]) -> tuple[Sequence[Token], ...]:
    """`(B) 12`, `B. 12` and `B: 12` as the letter, and as what follows it."""
    if len(tokens) > 1 and tokens[0].text.lower() in _BEFORE_CHOICE:
        tokens = tokens[1:]
        if len(tokens) == 1 and _is_choice_letter(tokens[0]):
            return (tokens,)
    texts = [token.text for token in tokens[:4]]
    if len(texts) > 3 and texts[0] == "(" and texts[2] == ")":
        letter, rest = tokens[1], tokens[3:]
    elif len(texts) > 2 and texts[1] in (".", ")", ":"):
        letter, rest = tokens[0], tokens[2:]
    else:
        return ()
    if not _is_choice_letter(letter) or rest[0].text in _NO_CHOICE_BEFORE or _is_choice_letter(rest[0]):
        return ()
    return ([letter], rest)


def _point_readings(tokens: Sequence[Token]) -> tuple[Sequence[Token], ...]:
    """`P(1, 2)` as the point alone."""
    named = len(tokens) > 4 and tokens[0].kind == "letter" and tokens[0].text.isupper() and tokens[1].text == "("
    listed = named and encloses(tokens[1:]) and any(token.text == "," for _, token in at_top(tokens[2:-1]))
    return (tokens[1:],) if listed else ()


def _number_of_ways(tokens: Sequence[Token]) -> tuple[Sequence[Token], ...]:
    """`C(10, 3)` as the binomial, and `P(10, 3)` as so many times more."""
    texts = [token.text for token in tokens]
    if len(texts) != 6 or texts[0] not in ("C", "P") or [texts[1], texts[3], texts[5]] != ["(", ",", ")"]:
        return ()
    if {tokens[2].kind, tokens[4].kind} != {"number"}:
        return ()
    orders = rf" \cdot {texts[4]}!" if texts[0] == "P" else ""
    return (tokenise(rf"\binom{{{texts[2]}}}{{{texts[4]}}}{orders}"),)


def _odds(tokens: Sequence[Token]) -> tuple[Sequence[Token], ...]:
    """`1 in 100` as the fraction; `3 out of 8` as that, or as the number of those that are counted."""
    texts = [token.text for token in tokens]
    size = 3 if texts[1:3] == ["out", "of"] else 2 if texts[:2] == ["1", "in"] else 0
    if not size or len(tokens) <= size or {tokens[0].kind, tokens[size].kind} != {"number"}:
        return ()
    if len(tokens) > size + 1 and not are_words(tokens[size + 1 :]):
        return ()
    share = [tokens[0], Token("symbol", "/"), tokens[size]]
    return (share, tokens[:1]) if size == 3 else (share,)


def _decimal_comma(tokens: Sequence[Token]) -> tuple[Sequence[Token], ...]:
    """`2,5` with nothing but a unit beside it, as 2.5."""
    at = 1 if tokens and tokens[0].text in ("-", *CURRENCY) else 0
    if [token.kind for token in tokens[at : at + 3]] != ["number", "symbol", "number"] or tokens[at + 1].text != ",":
        return ()
    whole, mark, part = tokens[at : at + 3]
    rest = tokens[at + 3 :]
    if mark.spaced or part.spaced or "." in whole.text + part.text or any(t.kind == "number" for t in rest):
        return ()
    number = Token("number", f"{whole.text}.{part.text}", whole.spaced, whole.roman)
    return ([*tokens[:at], number, *rest],)


def _is_choice_letter(token: Token) -> bool:
    return len(token.text) == 1 and token.text in "ABCDEFGHIJ"


class _Reader:
    def __init__(self, *, lenient_units: bool) -> None:
        self._lenient_units = lenient_units
        self._depth = 0

    def answer(self, tokens: Sequence[Token]) -> Answer:
        tokens = _without_rounding(trimmed(tokens))
        if not tokens:
            raise Unreadable("an empty answer")
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise OverLimits("nested too deeply")
        found = _phrase(tokens) or self._several(tokens) or self._single(tokens)
        self._depth -= 1
        return found

    def _single(self, tokens: Sequence[Token]) -> Answer:
        relation = self._relation(tokens)
        if relation is not None:
            return relation
        if tokens[0].text == "diag" and len(tokens) > 3 and encloses(tokens[1:]):
            return self._diagonal(tokens[2:-1])
        return (
            self._combination(tokens) or self._bracketed(tokens) or self._ratio(tokens) or self._words_or_value(tokens)
        )

    def _several(self, tokens: Sequence[Token]) -> Answer | None:
        parts = _groups(tokens) or split(tokens, _SEPARATORS)
        if len(parts) < 2:
            return None
        if len(parts) > MAX_ITEMS:
            raise OverLimits(f"{len(parts)} answers in one")
        if are_words([token for token in tokens if token.text not in _SEPARATORS]) and len(tokens) > len(parts) * 2:
            return _text(tokens)
        items = _named_alike(tuple(self.answer(part) for part in parts if part))
        separators = {token.text for _, token in at_top(tokens)} & _SEPARATORS
        return Listing(items, "or" if "or" in separators <= {"or", ","} else "bare")

    def _relation(self, tokens: Sequence[Token]) -> Answer | None:
        places = [at for at, token in at_top(tokens) if token.text in _RELATIONS]
        if not places:
            return None
        bounds = [-1, *places, len(tokens)]
        sides = [tokens[start + 1 : end] for start, end in itertools.pairwise(bounds)]
        operators = tuple(tokens[at].text for at in places)
        if not sides[0]:  # `= 5`, `\approx 5`
            return self.answer(sides[1]) if len(sides) == 2 and operators[0] in ("=", r"\approx") else None
        return Relation(sides=tuple(self._side(side) for side in sides), operators=operators)

    def _side(self, tokens: Sequence[Token]) -> Side:
        tokens = trimmed(tokens)
        name = name_of(tokens)
        try:
            return Side(answer=self.answer(tokens), name=name)
        except Unreadable:
            if name is None and not any(token.text in _ASKED_FOR for token in tokens[:2]):
                raise
            return Side(answer=None, name=name or "".join(token.text for token in tokens))

    def _combination(self, tokens: Sequence[Token]) -> Answer | None:
        places = [at for at, token in at_top(tokens) if token.text == "U" and at and tokens[at - 1].text in CLOSING]
        tokens = [Token("command", r"\cup") if at in places else token for at, token in enumerate(tokens)]
        for text, operator in _SET_OPERATORS.items():
            parts = split(tokens, frozenset((text,)))
            if len(parts) > 1 and all(parts):
                return Combination(operator, tuple(self.answer(part) for part in parts))
        return None

    def _bracketed(self, tokens: Sequence[Token]) -> Answer | None:
        first, last = tokens[0].text, tokens[-1].text
        if first == r"\begin":
            return self._environment(tokens)
        if (first == "]" and last in ("[", "]")) or (last == "[" and first in ("[", "(")):
            return self._foreign_interval(tokens)
        if len(tokens) < 2 or not encloses(tokens):
            return None
        inside = tokens[1:-1]
        if first == r"\{" or (first == "{" and any(token.text == "," for _, token in at_top(inside))):
            # LaTeX does not print bare braces, but people write sets in them.
            return self._set(inside, joined="set" if first == r"\{" else "bare")
        if first not in ("(", "[", r"\langle"):
            return None
        parts = split(inside, frozenset((",", ";")))
        if len(parts) < 2 or not all(parts):
            return self._unwrapped(inside) if first == "(" else None
        if len(parts) > MAX_ITEMS:
            raise OverLimits(f"{len(parts)} parts in one answer")
        return BracketedTuple(tuple(self.answer(part) for part in parts), first, last)

    def _unwrapped(self, inside: Sequence[Token]) -> Answer | None:
        """The text in superfluous parentheses, unless it is an expression like any other."""
        if any(token.text in _RELATIONS or token.text in OPENING for token in inside):
            return self.answer(inside)
        return None

    def _foreign_interval(self, tokens: Sequence[Token]) -> Answer | None:
        r"""`]0, 1[`: brackets that turn outward leave the end out."""
        parts = split(tokens[1:-1], frozenset((",", ";")))
        if len(parts) != 2:
            return None
        opening = "(" if tokens[0].text == "]" else tokens[0].text
        closing = ")" if tokens[-1].text == "[" else tokens[-1].text
        return BracketedTuple(tuple(self.answer(part) for part in parts), opening, closing)

    def _set(self, inside: Sequence[Token], *, joined: Literal["set", "bare"]) -> Answer:
        if not inside:
            return Listing((), "set")
        bars = [at for at, token in at_top(inside) if token.text in _BAR_COLON]
        if bars and name_of(inside[:1]) is not None:  # {x | x > 3}, {x \in R : x > 3}
            return self.answer(inside[bars[0] + 1 :])
        parts = [part for part in split(inside, frozenset((",", ";"))) if part]
        if len(parts) > MAX_ITEMS:
            raise OverLimits(f"{len(parts)} elements")
        return Listing(tuple(self.answer(part) for part in parts), joined)

    def _environment(self, tokens: Sequence[Token]) -> Answer | None:
        r"""`\begin{pmatrix} .. \end{pmatrix}`: a matrix; of `cases` and `aligned` the rows are several answers."""
        ends = [at for at, token in enumerate(tokens) if token.text == "}"]
        name = "".join(token.text for token in tokens[2 : ends[0]]) if ends else ""
        if not name or [token.text for token in tokens[-2 - len(tokens[2 : ends[0]]) : -1]][:1] != ["{"]:
            return None
        inside = tokens[ends[0] + 1 : len(tokens) - 3 - len(tokens[2 : ends[0]])]
        if name == "array" and inside and inside[0].text == "{":
            inside = inside[next(at for at, token in enumerate(inside) if token.text == "}") + 1 :]
        rows = [row for row in split(inside, frozenset((r"\\",))) if row]
        if len(rows) > MAX_ITEMS:
            raise OverLimits(f"a matrix of {len(rows)} rows")
        cells = tuple(tuple(self.answer(cell) for cell in split(row, frozenset("&"))) for row in rows)
        if (name.rstrip("*").endswith("matrix") and name != "vmatrix") or name == "array":
            return Grid(cells)
        return Listing(tuple(row[0] for row in cells)) if name in ("cases", "aligned", "gathered") else None

    def _diagonal(self, inside: Sequence[Token]) -> Answer:
        """The matrix `diag(1, 2)`."""
        entries = [self.answer(part) for part in split(inside, frozenset((",",)))]
        if len(entries) > MAX_ITEMS:
            raise OverLimits(f"a matrix of {len(entries)} rows")
        nothing = Scalar(Number(Fraction(0)))
        places = range(len(entries))
        return Grid(tuple(tuple(entries[row] if row == column else nothing for column in places) for row in places))

    def _ratio(self, tokens: Sequence[Token]) -> Answer | None:
        parts = split(tokens, frozenset(":"))
        if len(parts) < 2 or len(parts) > MAX_DEPTH or not all(parts):
            return None
        if is_word(parts[0][0]) and len(parts) == 2:  # `Area: 5`
            return self.answer(parts[1])
        return Ratio(tuple(self.answer(part) for part in parts), clock=_is_clock(parts))

    def _words_or_value(self, tokens: Sequence[Token]) -> Answer:
        if are_words(tokens) and (len(tokens) > 1 or _is_text(tokens[0])):
            return _text(tokens)
        if len(tokens) == 1 and tokens[0].text == r"\reals":
            return RealLine()
        if len(tokens) == 1 and tokens[0].text == r"\emptyset":
            return Listing((), "set")
        if "".join(token.text for token in tokens) in _POSITIVE_REALS:
            return self.answer(tokenise(r"(0, \infty)"))
        return self._value(tokens)

    def _value(self, tokens: Sequence[Token]) -> Answer:
        currency, tokens = _leading_currency(_with_multipliers(tokens))
        places = [at for at, token in at_top(tokens) if at and starts_unit(token, lenient=self._lenient_units)]
        for at in places:
            if tokens[at].text == "°" and any(token.text in FUNCTIONS for token in tokens[:at]):
                continue  # the angle of a sine
            unit = parse_unit(tokens[at:])
            node = None if unit is None or tokens[at - 1].text in "+-*/^_" else _expression_or_none(tokens[:at])
            if node is not None:
                return Scalar(node, unit)
        unit = parse_unit([currency]) if currency is not None else None
        if len(tokens) > 2 and tokens[0].kind == "number" and tokens[1].text == "_":
            base = _BASE.fullmatch("".join(token.text for token in tokens[2:]))
            if base is not None:
                return Scalar(parse_expression(tokens[:1]), unit, digits_base=base[1])
        return Scalar(parse_expression(tokens), unit)


def _without_rounding(tokens: Sequence[Token]) -> Sequence[Token]:
    """Of `7/9 or approximately 0.78` what is exact."""
    for at, token in at_top(tokens):
        if at and token.text in ("or", ",") and tokens[at + 1 : at + 2] and tokens[at + 1].text in _ROUNDED:
            return tokens[:at]
    return tokens


def _is_clock(parts: Sequence[Sequence[Token]]) -> bool:
    """True if it is written as a time of day or a duration is: `9:05`, `12:30 pm`, `1:02:03`."""
    hours, *others = (part[0].text for part in parts)
    bare = all(len(part) == 1 and not part[0].spaced for part in parts[1:-1]) and len(parts[0]) == 1
    in_order = hours.isdigit() and len(hours) <= 2 and int(hours) <= 24
    return bare and in_order and all(text.isdigit() and len(text) == 2 and int(text) < 60 for text in others)


def _groups(tokens: Sequence[Token]) -> list[Sequence[Token]]:
    """The solutions in `x = 1, y = 2; x = 3, y = 4`; empty if it is no such thing."""
    for separator in (";", "or", "and"):
        groups = split(tokens, frozenset((separator,)))
        members = [split(group, frozenset((",",))) for group in groups]
        sizes = {len(group) for group in members}
        equations = all(any(token.text == "=" for token in part) for group in members for part in group)
        if len(groups) > 1 and len(sizes) == 1 and min(sizes) > 1 and equations:
            return groups
    return []


def _with_multipliers(tokens: Sequence[Token]) -> Sequence[Token]:
    """`3.5 million` as 3.5 times a million."""
    found: list[Token] = []
    for token in tokens:
        factor = MULTIPLIERS.get(token.text.lower()) if found and found[-1].kind == "number" else None
        found.extend((token,) if factor is None else (Token("symbol", "*"), Token("number", str(factor))))
    return found


def _expression_or_none(tokens: Sequence[Token]) -> Node | None:
    try:
        return parse_expression(tokens)
    except Unreadable:
        return None


def _leading_currency(tokens: Sequence[Token]) -> tuple[Token | None, Sequence[Token]]:
    for at in (0, 1):
        if len(tokens) > at + 1 and tokens[at].text in CURRENCY and (at == 0 or tokens[0].text == "-"):
            return tokens[at], [*tokens[:at], *tokens[at + 1 :]]
    return None, tokens


def _is_text(token: Token) -> bool:
    return token.kind == "word" and (token.roman or len(token.text) > 4 or not token.text.isascii())


def _text(tokens: Sequence[Token]) -> Text:
    words = tuple(token.text.lower() for token in tokens if token.text.lower() not in ("the", "a", "an", "-", "'"))
    phrase = _SAME_WORDS.get(" ".join(words))
    return Text((phrase,) if phrase else words or (tokens[0].text.lower(),))


def _phrase(tokens: Sequence[Token]) -> Answer | None:
    if not 2 <= len(tokens) <= 8 or not all(is_word(token) for token in tokens):
        return None
    phrase = " ".join(token.text.lower() for token in tokens)
    if _NO_SOLUTION.fullmatch(phrase):
        return Listing((), "set")
    if number_of(phrase.replace("- ", "").split()) is not None:
        return _text(tokens)
    return RealLine() if _ALL_REALS.fullmatch(phrase) else None


def _named_alike(items: tuple[Answer, ...]) -> tuple[Answer, ...]:
    """In `x = 1, 2` the second value is of x too."""
    first = items[0]
    if not isinstance(first, Relation) or first.operators != ("=",) or any(isinstance(i, Relation) for i in items[1:]):
        return items
    head = first.sides[0]
    rest = (Relation(sides=(head, Side(answer=item, name=None)), operators=("=",)) for item in items[1:])
    return (first, *rest)
