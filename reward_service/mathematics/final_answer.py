r"""The text of the final answer in a completion, best guess first.

    <answer>..</answer>, else the last \boxed{..}, else `#### ..`, else "the answer is ..", else the last line if it is
    all mathematics, else the last formula or number

The first guess that can be read is the answer: further ones are no second chances.
"""

import re
from collections.abc import Iterable, Sequence

from reward_service.extraction import boxed, last_line, last_stated, last_tagged, strip_thinking

# Without a box the answer is at the end.
_TAIL_CHARS = 4096
_MAX_LINE_CHARS = 300

_SPAN = re.compile(r"\$\$(.+?)\$\$|(?<!\\)\$(?=\S)([^$\n]*?[^\s$\\])\$(?!\d)|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_JOINT = re.compile(r"\s*(?:,|,?\s*and|,?\s*or)\s*")
_NUMBER = re.compile(
    r"(?<![\w.])[-−]?(?:\\?[$€£]\s?)?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][+-]?\d+)?(?:\s?/\s?\d+)?(?:\s?\\?%)?"
)
_LEADING_WORDS = re.compile(r"[^\\\d=]*?[A-Za-z]{2}")
_NAMED = re.compile(r"\s*(?:sqrt|pi|sin|cos|tan|ln|log|exp|inf|abs|arc)")
_ONLY_NAME = re.compile(r"\s*\\?[A-Za-z]+(?:\([a-z]\))?\s*")


def final_answers(completion: str) -> tuple[Sequence[str], Sequence[str]]:
    """The guesses at the final answer, best first; and all boxes if there are several different ones.

    Several boxes may be the parts of one answer, or corrections by the last. Thoughts are not looked at.
    """
    text = strip_thinking(completion)
    tagged = last_tagged(text)
    boxes = boxed(text if tagged is None else tagged)
    if boxes:
        return _whole_first(boxes[-1]), list(dict.fromkeys(boxes))
    if tagged:
        return _whole_first(tagged), ()
    return list(_unmarked(text[-_TAIL_CHARS:])), ()


def _unmarked(text: str) -> Iterable[str]:
    _, marker, after = text.rpartition("####")
    if marker and (marked := last_line(after.strip().partition("\n")[0])):
        yield marked
        yield from _within(marked)
    stated = last_stated(text)
    if stated is not None:
        if not _is_prose(stated):
            yield stated
        yield from _within(stated)
    line = last_line(text)
    if line is not None:
        line = line.strip("*").strip()
        if len(line) <= _MAX_LINE_CHARS and not _is_prose(line):
            yield line
    if last := _last(text):
        yield last


def _whole_first(text: str) -> Sequence[str]:
    """What was set off as the answer; of a sentence, also the formula in it."""
    return [text, *_within(text)] if _is_prose(text) else [text]


def words_of(completion: str) -> Sequence[str]:
    """The guesses at a final answer that is in words, best first: also prose, which no formula is looked for in."""
    text = strip_thinking(completion)
    tagged = last_tagged(text)
    boxes = boxed(text if tagged is None else tagged)
    found = (boxes[-1] if boxes else None, tagged, last_stated(text[-_TAIL_CHARS:]), last_line(text[-_TAIL_CHARS:]))
    return [guess for guess in found if guess]


def _within(text: str) -> Iterable[str]:
    """The first formula or number of a sentence that says the answer."""
    spans = _spans(text)
    if spans:
        yield spans[0][2]
    number = _NUMBER.search(text)
    if number:
        yield number.group()


def _last(text: str) -> str | None:
    """The last formula or number; a formula that is only a name is none."""
    spans = [span for span in _spans(text) if not _ONLY_NAME.fullmatch(span[2])]
    numbers = tuple(_NUMBER.finditer(text))
    if spans and (not numbers or numbers[-1].start() < spans[-1][1]):
        return spans[-1][2]
    return numbers[-1].group() if numbers else None


def _spans(text: str) -> list[tuple[int, int, str]]:
    """The formulas, with where they start and end; those that only `and`, `or` or a comma parts are one."""
    found: list[tuple[int, int, str]] = []
    for match in _SPAN.finditer(text):
        content = next(group for group in match.groups() if group is not None)
        if found and _JOINT.fullmatch(text[found[-1][1] : match.start()]):
            start, end, before = found.pop()
            found.append((start, match.end(), f"{before} {text[end : match.start()]} {content}"))
        else:
            found.append((match.start(), match.end(), content))
    return found


def _is_prose(text: str) -> bool:
    """Whether words stand before anything mathematical."""
    text = re.sub(r"\$|\\\(|\\\[", "", text)
    return _NAMED.match(text) is None and _LEADING_WORDS.match(text) is not None
