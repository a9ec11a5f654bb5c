"""Arguments of calls as the Gemma models write them: like JSON, but keys are bare and texts stand between marks.

{at:<|"|>north<|"|>,far:true,path:[1,{x:2}]}        Gemma 4
{at:<escape>north<escape>,far:true}                 FunctionGemma
"""

import json
import re

from pydantic import JsonValue

_MARKS = ('<|"|>', "<escape>")
_WORDS: dict[str, JsonValue] = {"true": True, "false": False, "null": None, "none": None}
_END_OF_BARE = re.compile(r"[,}\]]")
_MAX_BARE_CHARS = 1000
"""Of a number or a word: what has no end is not looked for in all of the text, at each mark again."""
_MAX_DEPTH = 64


class _NoValue(ValueError):
    """Nothing that can be read stands there."""


def gemma_arguments_at(text: str, at: int) -> tuple[JsonValue, int]:
    """The object that begins there, behind any space, and where it ends; 0, if there is none. In one pass."""
    at = _behind_space(text, at)
    if not text.startswith("{", at):
        return None, 0
    try:
        return _object(text, at, _MAX_DEPTH)
    except _NoValue:
        return None, 0


def _object(text: str, at: int, depth: int) -> tuple[JsonValue, int]:
    found: dict[str, JsonValue] = {}
    at = _behind_space(text, at + 1)
    while not text.startswith("}", at):
        key, at = _key(text, at)
        found[key], at = _value(text, at, depth - 1)
        at = _next(text, at, "}")
    return found, at + 1


def _list(text: str, at: int, depth: int) -> tuple[JsonValue, int]:
    found: list[JsonValue] = []
    at = _behind_space(text, at + 1)
    while not text.startswith("]", at):
        value, at = _value(text, at, depth - 1)
        found.append(value)
        at = _next(text, at, "]")
    return found, at + 1


def _key(text: str, at: int) -> tuple[str, int]:
    """The key, and the place behind its colon."""
    marked = _marked(text, at)
    if marked is None:
        end = text.find(":", at)
        key = text[at:end].strip() if end >= 0 else ""
    else:
        key, end = marked
        end = _behind_space(text, end)
    if not key or not text.startswith(":", end) or any(each in key for each in "{}[],"):
        raise _NoValue
    return key, end + 1


def _value(text: str, at: int, depth: int) -> tuple[JsonValue, int]:
    if depth < 0:
        raise _NoValue
    at = _behind_space(text, at)
    marked = _marked(text, at)
    if marked is not None:
        return marked
    if text.startswith("{", at):
        return _object(text, at, depth)
    if text.startswith("[", at):
        return _list(text, at, depth)
    return _bare(text, at)


def _bare(text: str, at: int) -> tuple[JsonValue, int]:
    """A number or a word; what is neither is text whose marks were left out."""
    ending = _END_OF_BARE.search(text, at, at + _MAX_BARE_CHARS)
    end = at if ending is None else ending.start()
    word = text[at:end].strip()
    if not word:
        raise _NoValue
    if word in _WORDS:
        return _WORDS[word], end
    try:
        number: JsonValue = json.loads(word, parse_constant=_refused)
    except (ValueError, RecursionError):
        return word, end
    return number, end


def _refused(name: str) -> JsonValue:
    raise ValueError(name)


def _marked(text: str, at: int) -> tuple[str, int] | None:
    """The text between two marks, and where it ends; None where no mark stands."""
    for mark in _MARKS:
        if text.startswith(mark, at):
            end = text.find(mark, at + len(mark))
            if end < 0:
                raise _NoValue
            return text[at + len(mark) : end], end + len(mark)
    return None


def _next(text: str, at: int, closer: str) -> int:
    """The place of the next element, or of the closer."""
    at = _behind_space(text, at)
    if text.startswith(",", at):
        return _behind_space(text, at + 1)
    if not text.startswith(closer, at):
        raise _NoValue
    return at


def _behind_space(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at
