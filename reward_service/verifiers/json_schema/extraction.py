"""Where a JSON value stands in a text. Each search reads the text once, whatever it holds."""

import re
from collections.abc import Callable, Iterator, Mapping

from reward_service.verifiers.json_schema.arguments import Place

_OPENING = re.compile(r"[{\[]")
# Within a value: a string on one line, an escaped character outside of one, or a bracket.
_TOKEN = re.compile(r'"(?:[^"\\\n]|\\.)*+"|\\.|[{}\[\]]')
_PAIRS = {"}": "{", "]": "["}


def candidates(text: str, place: Place) -> Iterator[str]:
    """What may be the value, best first; nothing where the text has no such place."""
    return _FINDERS[place](text)


def _last_fenced(text: str) -> Iterator[str]:
    """The content of the last closed block that is fenced as json; of the last without a language, if none is."""
    found: dict[str, str] = {}
    language: str | None = None
    block: list[str] = []
    for line in text.split("\n"):
        mark = line.strip()
        if language is None and mark.startswith("```"):
            language, block = mark[3:].strip().lower(), []
        elif language is not None and mark == "```":
            found[language] = "\n".join(block)
            language = None
        elif language is not None:
            block.append(line)
    yield from [found[name] for name in ("json", "") if name in found][:1]


def _last_values(text: str) -> Iterator[str]:
    """The balanced objects and arrays that stand in no other, the last one first."""
    for start, end in reversed(_balanced(text)):
        yield text[start:end]


def _balanced(text: str) -> list[tuple[int, int]]:
    """Spans from a bracket to its counterpart that lie in no other such span.

    A bracket that never closes hides nothing after it, and one that closes another kind closes all that is open.
    """
    closed: list[tuple[int, int]] = []
    open_at: list[int] = []
    position = 0
    while found := (_TOKEN if open_at else _OPENING).search(text, position):
        position = found.end()
        token = found.group()
        if token in "{[":
            open_at.append(found.start())
        elif token in _PAIRS and text[open_at[-1]] != _PAIRS[token]:
            open_at.clear()
        elif token in _PAIRS:
            start = open_at.pop()
            while closed and closed[-1][0] > start:
                closed.pop()
            closed.append((start, position))
    return closed


def _whole(text: str) -> Iterator[str]:
    yield text


_FINDERS: Mapping[Place, Callable[[str], Iterator[str]]] = {
    "fenced": _last_fenced,
    "last_value": _last_values,
    "whole": _whole,
}
