"""`math`: the completion's final answer equals the right one as mathematics.

The answer is read and compared by `reward_service.mathematics`, exactly and within fixed limits; what that cannot read
(an integral, a sum, a limit) goes to math-verify, for at most `_MAX_CALLS` calls. It runs only in worker processes:
importing sympy is slow, and a call into C is stopped by the worker's deadline alone.

Answers that are out of all proportion. The policy must gain nothing by them:
- A completion whose answer is beyond these limits (9^9^9, a hundred nested fractions, a sum of a million sines) is 0,
  and its component `over_limits` is 1. That is a judgement by the answer's text, not by the clock: a slow machine gives
  the same, and no answer that we know needs as much.
- A right answer beyond the limits is a DataError, unless the completion repeats it; so is one that only math-verify
  reads, if the comparison with it is.
- A completion by which the worker is killed at its deadline all the same is an infrastructure error. It cannot be 0, as
  a slow machine can be the cause; the item leaves the batch, and `killed_workers` counts it. Watch that metric: what is
  neither punished nor rewarded, a policy might drift towards.

The text of the final answer in a completion, best guess first.

    <answer>..</answer>, else the last \boxed{..} with those beside it, else `#### ..`, else "the answer is ..",
    else the last line if it is all mathematics, else the last formula or number

The first guess that can be read is the answer: further ones are no second chances.

Bounds how much Python code runs, by counting calls: unlike a clock, it says the same on a slow machine.
"""

import gc
import inspect
import logging
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from types import FrameType

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from reward_service.verifier.submission import DataError, Score, Submission
from reward_service.verifiers.arguments import MathArguments
from reward_service.verifiers.extraction import (
    boxed,
    boxed_together,
    last_line,
    last_stated,
    last_tagged,
    strip_thinking,
)
from reward_service.verifiers.mathematics.answers import Answer, Listing, Ordered, RealLine, Text
from reward_service.verifiers.mathematics.equality import Rules, check, same_answer
from reward_service.verifiers.mathematics.nodes import MAX_CHARS, OverLimits, Unreadable
from reward_service.verifiers.mathematics.notation import number_of
from reward_service.verifiers.mathematics.reading import read
from reward_service.verifiers.mathematics.tokens import tokenise

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


# So many calls more are granted until one comes from no generator.
_MORE = 10_000

_CALLED_BACK = ("weakref", "_weakrefset")


class TooManyCalls(BaseException):
    """The limit was reached. Not an Exception: the code that is stopped must not take it for a failure of its own."""


@contextmanager
def at_most_calls(limit: int) -> Iterator[None]:
    """Raises TooManyCalls out of the code within it, soon after `limit` calls of Python functions.

    At its next call, but for those whose exceptions Python drops: the code would go on, and nobody would count it.
    One C function that takes for ever is not stopped. No debugger or measurement of coverage can run at the same time.
    """
    body = sys._getframe(2)
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        # A trace function hears of calls of Python functions alone, unlike a profile function: that is cheaper.
        nonlocal calls
        calls += 1
        if calls > limit and _is_heard(frame, body, in_generators=calls > limit + _MORE):
            raise TooManyCalls(f"more than {limit} calls")

    before = sys.gettrace()
    sys.settrace(count)
    try:
        yield
    finally:
        sys.settrace(before)


def _is_heard(frame: FrameType, body: FrameType, *, in_generators: bool) -> bool:
    """Whether an exception from the call that begins reaches `body`.

    What the interpreter calls by itself loses it: callbacks of the garbage collector and of weak references,
    finalisers, and generators that are closed since nobody needs them any more. These look like all generators, which
    may be around most of the work: so calls of functions by generators are heard if `in_generators` says so.
    """
    if frame.f_code.co_flags & inspect.CO_GENERATOR:
        return False
    collecting = {getattr(callback, "__code__", None) for callback in gc.callbacks}
    inner: FrameType | None = frame
    while inner is not None and inner is not body:
        code = inner.f_code
        if code in collecting or code.co_name == "__del__" or inner.f_globals.get("__name__") in _CALLED_BACK:
            return False
        if code.co_flags & inspect.CO_GENERATOR and not in_generators:
            return False
        inner = inner.f_back
    return True


# It warns once that its own timeout is off. The worker's deadline replaces that: an alarm cannot interrupt C code.
logging.getLogger("math_verify").setLevel(logging.ERROR)

# Units are our own matter: it would strip the s of 5s, be that a variable or not.
_NORMALISATION = replace(LatexExtractionConfig().normalization_config, units=False)
_EXTRACTION = (
    LatexExtractionConfig(boxed_match_priority=0, normalization_config=_NORMALISATION),
    ExprExtractionConfig(),
)
_MAX_VERIFIED_CHARS = 500  # its regular expressions, in C too, may take time that grows faster than the text
_MAX_CALLS = 2_000_000  # of Python functions; an integral of a polynomial takes up to 600,000
# What would keep sympy in C code for longer than any deadline: huge powers, towers of powers, large factorials.
_EXCESSIVE = re.compile(r"\^\s*\{?\s*\(?\s*-?\d{5}|(?:\^[^+=,&]{1,20}){3}|\d{5}\s*\}?\)?\s*!|!\s*!\s*!|\d{300}")


@dataclass(frozen=True, kw_only=True)
class _Gold:
    """A right answer: its text, and its readings (none if only math-verify may read it)."""

    text: str
    readings: tuple[Answer, ...]

    @property
    def is_in_words(self) -> bool:
        """Whether people write it in words, as `no solution` for the empty set."""
        return any(
            isinstance(reading, Text | RealLine) or (isinstance(reading, Listing) and not reading.items)
            for reading in self.readings
        )


def math_answer(submission: Submission, arguments: MathArguments) -> Score:
    r"""1 when the final answer (the last \boxed{..}, else the last statement or expression) equals a right one, else 0.

    Raises DataError if a right answer is no mathematics, or too large to be computed.
    """
    rules = Rules(tolerance=arguments.tolerance, convert_units=arguments.convert_units)
    answers = (arguments.answer,) if isinstance(arguments.answer, str) else arguments.answer
    golds = [_read_gold(answer) for answer in answers]
    guesses, boxes = final_answers(submission.completion)
    words = words_of(submission.completion)
    if any(gold.is_in_words for gold in golds):
        guesses = [*words, *guesses]
    repeated = any(len(word) <= MAX_CHARS and _alike(gold.text, word) for gold in golds for word in words[:1])
    given = words[0] if repeated else _first_readable(guesses, golds)
    try:
        correct = any(_is_right(gold, given, boxes, rules) for gold in golds) if given is not None else False
    except (OverLimits, RecursionError):
        return Score(reward=0.0, components={"parsed": 1.0, "over_limits": 1.0})
    return Score(reward=float(correct), components={"parsed": float(given is not None), "over_limits": 0.0})


def _read_gold(answer: str) -> _Gold:
    bare = ", ".join(boxed_together(answer)) or answer.strip()
    if not bare.strip("$ ."):
        raise DataError(f"the right answer holds no mathematics: {answer!r}")
    try:
        readings = read(bare)
    except Unreadable:
        readings = ()
    except OverLimits as error:
        raise DataError(f"the right answer is beyond the limits ({error}): {answer[:200]!r}") from error
    return _Gold(text=bare, readings=readings)


def _first_readable(guesses: Sequence[str], golds: Sequence[_Gold]) -> str | None:
    """The first guess that is mathematics to us, or the right answer's own text; if none is, the best one."""
    for guess in guesses:
        if len(guess) <= MAX_CHARS and any(_alike(gold.text, guess) for gold in golds):
            return guess
        try:
            read(guess[: MAX_CHARS + 1], lenient=True)
        except OverLimits:
            return guess
        except Unreadable:
            continue
        return guess
    return guesses[0] if guesses else None


def _is_right(gold: _Gold, given: str, boxes: Sequence[str], rules: Rules) -> bool:
    """Raises OverLimits if the completion's answer is beyond the limits, DataError if the right one is."""
    if len(given) <= MAX_CHARS and _alike(gold.text, given):
        return True
    for reading in gold.readings:
        try:
            check(reading)
        except OverLimits as error:
            raise DataError(f"the right answer is beyond the limits ({error}): {gold.text[:200]!r}") from error
    if _equals(gold, given, rules):
        return True
    several = any(isinstance(reading, Listing | Ordered) for reading in gold.readings)
    return several and len(boxes) > 1 and _equals(gold, ", ".join(boxes), rules)


def _alike(one: str, other: str) -> bool:
    """Whether the texts are the same but for spaces and notation."""
    left, right = ([token.text for token in tokenise(text)] for text in (one, other))
    return left == right and bool(left)


def _equals(gold: _Gold, given: str, rules: Rules) -> bool:
    try:
        readings = read(given, lenient=True)
    except Unreadable:
        readings = ()
    unsaid = not (gold.readings and readings)
    for ours, theirs in product(gold.readings, readings):
        try:
            if same_answer(ours, theirs, rules):
                return True
        except Unreadable:
            unsaid = True
    return unsaid and _verified(gold, given)


def _verified(gold: _Gold, given: str) -> bool:
    """Whether math-verify holds the answers for equal. What it cannot parse equals nothing."""
    if len(given) > _MAX_VERIFIED_CHARS or _EXCESSIVE.search(given):
        raise OverLimits("an answer too long for math-verify, or a power or factorial that is too large")
    if _EXCESSIVE.search(gold.text):
        raise DataError(f"the right answer is too large to be computed: {gold.text[:200]!r}")
    try:
        with at_most_calls(_MAX_CALLS):
            return any(_equal(*pair) for pair in product(_parsed(gold.text), _parsed(given)))
    except TooManyCalls as error:
        if not gold.readings:
            raise DataError(f"comparing with the right answer {gold.text[:200]!r} takes {error}") from error
        raise OverLimits(str(error)) from error


def _parsed(text: str) -> Sequence[object]:
    bare = text.strip().strip("$")
    return list(
        parse(rf"$\boxed{{{bare}}}$", extraction_config=_EXTRACTION, parsing_timeout=None, raise_on_error=False)
    )


def _equal(gold: object, given: object) -> bool:
    return bool(verify(gold, given, timeout_seconds=None, raise_on_error=False))
