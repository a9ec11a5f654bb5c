"""Lists of tokens with brackets in them."""

import itertools
from collections.abc import Sequence

from reward_service.mathematics.tokens import Token

OPENING = frozenset(("(", "[", "{", r"\{", r"\langle", r"\lfloor", r"\lceil", r"\begin"))
CLOSING = frozenset((")", "]", "}", r"\}", r"\rangle", r"\rfloor", r"\rceil", r"\end"))


def trimmed(tokens: Sequence[Token]) -> Sequence[Token]:
    """Without the punctuation around it, and without a word such as `and` or `approximately` before it."""
    start, end = 0, len(tokens)
    while end > start and tokens[end - 1].text in (".", ",", ";", ":", "?", r"\ldots"):
        end -= 1
    while start < end and tokens[start].text.lower() in (".", ",", ";", ":", "and", "or", "about", "approximately"):
        start += 1
    return tokens[start:end]


def at_top(tokens: Sequence[Token]) -> list[tuple[int, Token]]:
    """The tokens outside all brackets, with their places."""
    depth = 0
    found: list[tuple[int, Token]] = []
    for at, token in enumerate(tokens):
        if token.text in CLOSING:
            depth -= 1
        if depth == 0 and token.text not in OPENING and token.text not in CLOSING:
            found.append((at, token))
        if token.text in OPENING:
            depth += 1
    return found


def split(tokens: Sequence[Token], separators: frozenset[str]) -> list[Sequence[Token]]:
    """The parts between the separators outside all brackets; of a list with commas, those that are not empty."""
    places = [at for at, token in at_top(tokens) if token.text in separators]
    bounds = [-1, *places, len(tokens)]
    parts = [tokens[start + 1 : end] for start, end in itertools.pairwise(bounds)]
    return [part for part in parts if part] if {"and", ","} & separators else parts


def encloses(tokens: Sequence[Token]) -> bool:
    """Whether the first token's bracket closes with the last token."""
    depth = 0
    for at, token in enumerate(tokens):
        depth += (token.text in OPENING) - (token.text in CLOSING)
        if depth == 0:
            return at == len(tokens) - 1
    return False
