r"""The text of the final answer in a completion, best guess first.

    <answer>..</answer>, else the last \boxed{..} with those beside it, else `#### ..`, else "the answer is ..",
    else the last line if it is all mathematics, else the last formula or number

The first guess that can be read is the answer: further ones are no second chances.
"""

import re
from collections.abc import Iterable, Sequence

from reward_service.verifiers.extraction import (
    boxed,
    boxed_together,
    last_line,
    last_stated,
    last_tagged,
    strip_thinking,
)
from reward_service.verifiers.mathematics.words import number_of

# Without a box the answer is at the end.
_TAIL_CHARS = 4096
_MAX_LINE_CHARS = 300

_DISPLAYED = re.compile(r"\$\$(.+?)\$\$|\\\((.+?)\\\)|\\\[(.+?)\\\]|(?<!\\)(?P<dollar>\$)", re.DOTALL)
_MAX_FORMULA_CHARS = 1000
_PROSE = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}\s+[A-Za-z]{2,}")
_ROMAN = re.compile(r"\\(?:text|mathrm|mbox)\s?\{[^{}]*\}")
_JOINT = re.compile(r"\s*(?:,|,?\s*and|,?\s*or)\s*")
# Formulas that stand in plain text, and numbers.
_LATEX_VALUE = (
    r"[-−]?\d{0,9}\s?\\(?:[dt]?frac\s?\{[^{}]{1,100}\}\s?\{[^{}]{1,100}\}|sqrt\s?(?:\[\d\])?\{[^{}]{1,100}\})"
    r"(?:\s?\\pi(?![A-Za-z]))?"
)
_NUMBER = re.compile(
    rf"(?<![A-Za-z0-9_.])(?:{_LATEX_VALUE}|[-−]?(?:\\?[$€£]\s?)?(?:(?:\d{{1,3}}(?:,\d{{3}})+|\d+)(?:\.\d+)?|\.\d+)"
    r"(?:[eE][+-]?\d+)?(?:\s?/\s?\d+)?(?:\s?\\?%)?)"
)
# What says that the value follows.
_COPULA = re.compile(
    r"(?:\b(?:is|are|be|was|equals?|gives?|yields?|est|ist|es|è)\b|[=:：]|是|为|等于)\s*"
    r"(?:(?:equal to|approximately|about|exactly|simply|just|only|therefore|thus|either|roughly|then)\s+){0,2}"
    r"[*_\s$(]*$"
)
_NEGATED = re.compile(r"\b(?:not|isn't|never)\s+[*_$(]*$", re.IGNORECASE)
_COPULA_CHARS = 60
_ASIDE = re.compile(r"(?:,\s*|(?<=[\d$)])\s+)(?:where|because|since|which|while|not|but)\b")
_LEADING_WORDS = re.compile(r"[^\\\d=]*?(?:[^\W\d_]{2}|[\u3040-\u30ff\u3400-\u9fff])")
_NAMED = re.compile(r"\s*(?:sqrt|pi|sin|cos|tan|ln|log|exp|inf|abs|arc)")
_ONLY_NAME = re.compile(
    r"\s*(?:\\(?:triangle|angle|overline|vec)\s?\{?)?\s*\\?[A-Za-z]+(?:_\{?\w+\}?)?'*(?:\(\w\))?\s*\}?\s*"
)


def final_answers(completion: str) -> tuple[Sequence[str], Sequence[str]]:
    """The guesses at the final answer, best first; and all boxes if there are several different ones.

    Several boxes may be the parts of one answer, or corrections by the last. Thoughts are not looked at.
    """
    text = strip_thinking(completion)
    tagged = last_tagged(text)
    within = text if tagged is None else tagged
    boxes = boxed(within)
    if boxes:
        return _whole_first(", ".join(boxed_together(within))), list(dict.fromkeys(boxes))
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
        stated = _main_clause(stated)
        if not _is_prose(stated) or number_of(stated.lower().split()) is not None:
            yield stated
        yield from _within(stated)
    line = last_line(text)
    if line is not None:
        line = _main_clause(line.strip("*").strip())
        if len(line) <= _MAX_LINE_CHARS and not _is_prose(line):
            yield line
    if last := _last(text):
        yield last


def _main_clause(text: str) -> str:
    """Without what is said of the answer: `$x = 42$, where $y = 3$`, `4, not 5`."""
    aside = _ASIDE.search(text)
    if aside is None or text.count("$", 0, aside.start()) % 2:
        return text
    return text[: aside.start()].strip() or text


def _whole_first(text: str) -> Sequence[str]:
    """What was set off as the answer; of a sentence, also the formula in it."""
    return [text, *_within(text)] if _is_prose(text) else [text]


def words_of(completion: str) -> Sequence[str]:
    """The guesses at a final answer that is in words, best first: also prose, which no formula is looked for in."""
    text = strip_thinking(completion)
    tagged = last_tagged(text)
    box = ", ".join(boxed_together(text if tagged is None else tagged))
    found = (box, tagged, last_stated(text[-_TAIL_CHARS:]), last_line(text[-_TAIL_CHARS:]))
    return [guess for guess in found if guess]


def _within(text: str) -> Iterable[str]:
    """What a sentence says the answer is: what follows the first `is`, else the first formula, else the first number.

    A formula that is only a name is none if there is another, or a number.
    """
    text = text[:_TAIL_CHARS]
    spans = _spans(text)
    numbers = _numbers_outside(text, spans)
    said = [
        span for span in sorted([*spans, *numbers]) if _COPULA.search(text[max(0, span[0] - _COPULA_CHARS) : span[0]])
    ]
    formulas = [span for span in spans if not _ONLY_NAME.fullmatch(span[2])]
    for found in (said, formulas, numbers, spans):
        if found:
            yield found[0][2]


def _follows_copula(text: str, at: int) -> bool:
    """Whether `is` or the like comes right before it; the beginning follows `the answer is`."""
    before = text[max(0, at - _COPULA_CHARS) : at]
    return not before.strip(" $*_(") or _COPULA.search(before) is not None


def _last(text: str) -> str | None:
    """The last formula or number that is not denied; a formula that is only a name is one if there is nothing else."""
    spans = _spans(text)
    found = [*(span for span in spans if not _ONLY_NAME.fullmatch(span[2])), *_numbers_outside(text, spans)]
    said = [span for span in found or spans if not _NEGATED.search(text[max(0, span[0] - _COPULA_CHARS) : span[0]])]
    return max(said)[2] if said else None


_Span = tuple[int, int, str]  # where it starts and ends, and what it holds


def _numbers_outside(text: str, spans: Sequence[_Span]) -> list[_Span]:
    """The numbers that stand in no formula."""
    bounds = [0, *(place for start, end, _ in spans for place in (start, end)), len(text)]
    gaps = zip(bounds[::2], bounds[1::2], strict=True)
    found = (match for start, end in gaps for match in _NUMBER.finditer(text, start, end))
    return [(match.start(), match.end(), match.group()) for match in found]


def _spans(text: str) -> list[_Span]:
    """The formulas; those that only `and`, `or` or a comma parts are one."""
    found: list[_Span] = []
    for start, end, content in _formulas(text):
        if found and _JOINT.fullmatch(text[found[-1][1] : start]):
            before = found.pop()
            found.append((before[0], end, f"{before[2]} {text[before[1] : start]} {content}"))
        else:
            found.append((start, end, content))
    return found


def _formulas(text: str) -> Iterable[_Span]:
    opened: int | None = None  # where a single dollar sign may have opened a formula
    for match in _DISPLAYED.finditer(text):
        if match["dollar"] is None:
            opened = None
            yield match.start(), match.end(), next(group for group in match.groups() if group is not None)
        elif opened is not None and _is_formula(text[opened + 1 : match.start()], text[match.end() : match.end() + 1]):
            yield opened, match.end(), text[opened + 1 : match.start()]
            opened = None
        else:
            opened = match.start()


def _is_formula(content: str, after: str) -> bool:
    """Whether what stands between two dollar signs is one, and not the words between two sums of money."""
    if not content.strip() or len(content) > _MAX_FORMULA_CHARS or after.isdigit() or "\n\n" in content:
        return False
    blanks = content[0].isspace(), content[-1].isspace()
    if not any(blanks):
        return "\n" not in content
    money = content[0].isdigit() if not all(blanks) else False
    return not money and _PROSE.search(_ROMAN.sub("", content)) is None


def _is_prose(text: str) -> bool:
    """Whether words stand before anything mathematical."""
    text = re.sub(r"\$|\\\(|\\\[", "", text)
    return _NAMED.match(text) is None and _LEADING_WORDS.match(text) is not None
