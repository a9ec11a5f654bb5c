"""Reads an answer's text: what kind of answer it is, and its parts.

    text -> tokens -> several answers? -> a relation? -> brackets, a matrix, a ratio? -> words, or a value with its unit

One text may have several readings (`1,234` is a number or two; `(B) 12` a choice or a value); all are given.
"""

import itertools
import re
from collections.abc import Sequence

from reward_service.mathematics.answers import (
    Answer,
    Combination,
    Grid,
    Listing,
    Ordered,
    Ratio,
    RealLine,
    Relation,
    Scalar,
    SetOperator,
    Side,
    Text,
)
from reward_service.mathematics.expressions import FUNCTIONS, parse_expression
from reward_service.mathematics.limits import MAX_CHARS, MAX_DEPTH, MAX_ITEMS, MAX_TOKENS, OverLimits, Unreadable
from reward_service.mathematics.nodes import Node
from reward_service.mathematics.number_words import MULTIPLIERS
from reward_service.mathematics.token_lists import CLOSING, OPENING, at_top, encloses, split, trimmed
from reward_service.mathematics.tokens import Token, tokenise
from reward_service.mathematics.units import CURRENCY, parse_unit, starts_unit

_RELATIONS = frozenset(("=", "<", ">", "<=", ">=", "!=", r"\approx", r"\in"))
_SEPARATORS = frozenset((",", ";", "or", "and", "&&"))
_SET_OPERATORS: dict[str, SetOperator] = {r"\cup": "union", r"\cap": "intersection", r"\setminus": "difference"}
_NO_SOLUTION = re.compile(r"(there (is|are) )?no (real |such |integer |valid )?(solutions?|roots?|values?)( exists?)?")
_ALL_REALS = re.compile(r"(all|any) (the )?(reals?|real (numbers?|values?)|values? of [a-z])")
_SAME_WORDS = {"does not exist": "undefined", "dne": "undefined", "not defined": "undefined"}
_NAME = re.compile(r"\\?[A-Za-z]+'*(_\{?\w+\}?)?'*(\([A-Za-z\\](,[A-Za-z\\]+)*\)|\(\\?[a-z]+\))?")
# `(B) or (C)` is no choice; `(A)(B)`, `(A)^2` and `A: B` are none either.
_NO_CHOICE_BEFORE = frozenset(("^", "+", "-", "(", "/", "*", "=", *_SEPARATORS))
_BASE = re.compile(r"\{?(\d{1,2}|two|ten)\}?")
_BAR_COLON = frozenset(("|", ":"))


def read(text: str, *, lenient_units: bool = False) -> tuple[Answer, ...]:
    """All readings of an answer. `lenient_units`: `5m` may be five metres. Raises OverLimits, Unreadable."""
    if len(text) > MAX_CHARS:
        raise OverLimits(f"an answer of {len(text)} characters")
    tokens = tokenise(text, thousands=False)
    if len(tokens) > MAX_TOKENS:
        raise OverLimits(f"an answer of {len(tokens)} tokens")
    variants: list[Sequence[Token]] = [tokens]
    joined = tokenise(text, thousands=True)
    # In brackets that hold nothing else, `(1,200)` is a pair.
    if joined != tokens and (tokens[0].text not in OPENING or any(token.text == "," for token in joined)):
        variants.insert(0, joined)
    variants.extend(variant for tokens in tuple(variants) for variant in _choice_readings(tokens))
    found = _all_readings(variants, _Reader(lenient_units=lenient_units))
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


def _is_choice_letter(token: Token) -> bool:
    return len(token.text) == 1 and token.text in "ABCDEFGHIJ"


class _Reader:
    def __init__(self, *, lenient_units: bool) -> None:
        self._lenient_units = lenient_units
        self._depth = 0

    def answer(self, tokens: Sequence[Token]) -> Answer:
        tokens = trimmed(tokens)
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
        return (
            self._combination(tokens) or self._bracketed(tokens) or self._ratio(tokens) or self._words_or_value(tokens)
        )

    def _several(self, tokens: Sequence[Token]) -> Answer | None:
        parts = split(tokens, _SEPARATORS)
        if len(parts) < 2:
            return None
        if len(parts) > MAX_ITEMS:
            raise OverLimits(f"{len(parts)} answers in one")
        if all(_is_word(token) for token in tokens if token.text not in _SEPARATORS) and len(tokens) > len(parts) * 2:
            return _text(tokens)
        items = _named_alike(tuple(self.answer(part) for part in parts if part))
        separators = {token.text for _, token in at_top(tokens)} & _SEPARATORS
        return Listing(items, "or" if separators == {"or"} else "bare")

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
        name = _name_of(tokens)
        try:
            return Side(answer=self.answer(tokens), name=name)
        except Unreadable:
            if name is None:
                raise
            return Side(answer=None, name=name)

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
            return self._set(inside)
        if first not in ("(", "[", r"\langle"):
            return None
        parts = split(inside, frozenset((",", ";")))
        if len(parts) < 2 or not all(parts):
            return self._unwrapped(inside) if first == "(" else None
        if len(parts) > MAX_ITEMS:
            raise OverLimits(f"{len(parts)} parts in one answer")
        return Ordered(tuple(self.answer(part) for part in parts), first, last)

    def _unwrapped(self, inside: Sequence[Token]) -> Answer | None:
        """What stands in superfluous parentheses, unless it is an expression like any other."""
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
        return Ordered(tuple(self.answer(part) for part in parts), opening, closing)

    def _set(self, inside: Sequence[Token]) -> Answer:
        if not inside:
            return Listing((), "set")
        bars = [at for at, token in at_top(inside) if token.text in _BAR_COLON]
        if bars and _name_of(inside[:1]) is not None:  # {x | x > 3}, {x \in R : x > 3}
            return self.answer(inside[bars[0] + 1 :])
        parts = [part for part in split(inside, frozenset((",", ";"))) if part]
        if len(parts) > MAX_ITEMS:
            raise OverLimits(f"{len(parts)} elements")
        return Listing(tuple(self.answer(part) for part in parts), "set")

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

    def _ratio(self, tokens: Sequence[Token]) -> Answer | None:
        parts = split(tokens, frozenset(":"))
        if len(parts) < 2 or len(parts) > MAX_DEPTH or not all(parts):
            return None
        if _is_word(parts[0][0]) and len(parts) == 2:  # `Area: 5`
            return self.answer(parts[1])
        return Ratio(tuple(self.answer(part) for part in parts))

    def _words_or_value(self, tokens: Sequence[Token]) -> Answer:
        if all(_is_word(token) for token in tokens) and (len(tokens) > 1 or _is_text(tokens[0])):
            return _text(tokens)
        if len(tokens) == 1 and tokens[0].text == r"\reals":
            return RealLine()
        if len(tokens) == 1 and tokens[0].text == r"\emptyset":
            return Listing((), "set")
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


def _is_word(token: Token) -> bool:
    return token.kind in ("letter", "word") or token.text in ("'", "-")


def _is_text(token: Token) -> bool:
    return token.kind == "word" and (token.roman or len(token.text) > 4)


def _text(tokens: Sequence[Token]) -> Text:
    words = tuple(token.text.lower() for token in tokens if token.text.lower() not in ("the", "a", "an", "-", "'"))
    phrase = _SAME_WORDS.get(" ".join(words))
    return Text((phrase,) if phrase else words or (tokens[0].text.lower(),))


def _phrase(tokens: Sequence[Token]) -> Answer | None:
    if not 2 <= len(tokens) <= 8 or not all(_is_word(token) for token in tokens):
        return None
    phrase = " ".join(token.text.lower() for token in tokens)
    if _NO_SOLUTION.fullmatch(phrase):
        return Listing((), "set")
    return RealLine() if _ALL_REALS.fullmatch(phrase) else None


def _name_of(tokens: Sequence[Token]) -> str | None:
    """The tokens as a name, if they are one: a variable, a function of variables, or words."""
    if not tokens:
        return None
    if all(_is_word(token) for token in tokens):
        return " ".join(token.text for token in tokens)
    text = "".join(token.text for token in tokens)
    # A tuple of names is one too: (x, y) = (1, 2).
    is_tuple = re.fullmatch(r"\(\\?[A-Za-z]\w*(_\{?\w+\}?)?(,\\?[A-Za-z]\w*(_\{?\w+\}?)?)*\)", text) is not None
    return text if len(text) < MAX_CHARS and (is_tuple or _NAME.fullmatch(text)) else None


def _named_alike(items: tuple[Answer, ...]) -> tuple[Answer, ...]:
    """In `x = 1, 2` the second value is of x too."""
    first = items[0]
    if not isinstance(first, Relation) or first.operators != ("=",) or any(isinstance(i, Relation) for i in items[1:]):
        return items
    head = first.sides[0]
    rest = (Relation(sides=(head, Side(answer=item, name=None)), operators=("=",)) for item in items[1:])
    return (first, *rest)
