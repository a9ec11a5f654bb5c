"""`math`: the completion's final answer equals the right one as mathematics.

The answer is read (`final_answer`, `reading`) and compared (`equality`) exactly and within fixed limits; what cannot be
read (an integral, a sum, a limit) goes to math-verify, for at most `_MAX_CALLS` calls. It runs in workers only:
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

How much Python code of math-verify runs is bounded by counting calls: unlike a clock, that says the same on a slow
machine.
"""

import logging
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from types import FrameType

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from reward_service.verifier.submission import DataError, Score, Submission
from reward_service.verifiers.arguments import MathArguments
from reward_service.verifiers.extraction import boxed_together
from reward_service.verifiers.mathematics.answers import (
    MAX_CHARS,
    Answer,
    BracketedTuple,
    Listing,
    OverLimits,
    RealLine,
    Text,
    Unreadable,
)
from reward_service.verifiers.mathematics.equality import check, same_answer
from reward_service.verifiers.mathematics.final_answer import final_answers, words_of
from reward_service.verifiers.mathematics.quantities import QuantityRules
from reward_service.verifiers.mathematics.reading import read
from reward_service.verifiers.mathematics.tokens import commands, tokenise, trimmed

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
# What begins so is a bound, or is denied: math-verify passes over it, and would take `\neq 3` for 3.
_DENYING = frozenset(("<", ">", "<=", ">=", "!=")) | commands("not neg lnot notin ll gg lesssim gtrsim")
_SHOWN_CHARS = 200


class TooManyCalls(BaseException):
    """The limit was reached. Not an Exception: the code that is stopped must not take it for a failure of its own."""


@contextmanager
def at_most_calls(limit: int) -> Iterator[None]:
    """Raises TooManyCalls out of the code within it, soon after `limit` calls of Python functions.

    At its next call, or at one of those after it: Python drops what is raised in a function that it calls by itself,
    such as a finaliser or the callback of a weak reference. It tells of that, and the next call raises again.
    One C function that takes for ever is not stopped. No debugger or measurement of coverage can run at the same time.
    """
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        # A trace function hears of calls of Python functions alone, unlike a profile function: that is cheaper.
        nonlocal calls
        calls += 1
        if calls > limit and frame.f_code is not dropped.__code__:
            raise TooManyCalls(f"more than {limit} calls")

    def dropped(told: "sys.UnraisableHookArgs", /) -> None:
        sys.settrace(None)
        if not isinstance(told.exc_value, TooManyCalls):
            told_before(told)
        sys.settrace(count)  # Python takes a trace function away that raised

    before, told_before = sys.gettrace(), sys.unraisablehook
    sys.unraisablehook = dropped
    sys.settrace(count)
    try:
        yield
    finally:
        sys.settrace(before)
        sys.unraisablehook = told_before


# It warns once that its own timeout is off. The worker's deadline replaces that: an alarm cannot interrupt C code.
logging.getLogger("math_verify").setLevel(logging.ERROR)


@dataclass(frozen=True, kw_only=True)
class _Gold:
    """A right answer: its text, and its readings (none if only math-verify may read it)."""

    text: str
    readings: tuple[Answer, ...]

    @property
    def is_in_words(self) -> bool:
        """True if people write it in words, as `no solution` for the empty set."""
        return any(
            isinstance(reading, Text | RealLine) or (isinstance(reading, Listing) and not reading.items)
            for reading in self.readings
        )


def math_answer(submission: Submission, arguments: MathArguments) -> Score:
    r"""1 when the final answer (the last \boxed{..}, else the last statement or expression) equals a right one, else 0.

    Raises DataError if a right answer is no mathematics, or too large to be computed.
    """
    rules = QuantityRules(tolerance=arguments.tolerance, convert_units=arguments.convert_units)
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
        return _score(False, given, golds, over_limits=True)
    return _score(correct, given, golds)


def _score(correct: bool, given: str | None, golds: Sequence[_Gold], *, over_limits: bool = False) -> Score:
    right = " or ".join(gold.text[:_SHOWN_CHARS] for gold in golds[:3])
    read = "no answer was found" if given is None else f"read {given[:_SHOWN_CHARS]!r}"
    return Score(
        reward=float(correct),
        components={"parsed": float(given is not None), "over_limits": float(over_limits)},
        explanation=f"{read}, right is {right!r}{'; beyond the limits' if over_limits else ''}",
    )


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


def _is_right(gold: _Gold, given: str, boxes: Sequence[str], rules: QuantityRules) -> bool:
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
    several = any(isinstance(reading, Listing | BracketedTuple) for reading in gold.readings)
    return several and len(boxes) > 1 and _equals(gold, ", ".join(boxes), rules)


def _alike(one: str, other: str) -> bool:
    """True if the texts are the same but for spaces and notation."""
    left, right = ([token.text for token in tokenise(text)] for text in (one, other))
    return left == right and bool(left)


def _is_denied(gold: _Gold, given: str) -> bool:
    r"""True of `< 3` or `\neq 3`, unless the right answer is of that kind."""
    start = trimmed(tokenise(given[:MAX_CHARS]))[:1]
    return any(token.text in _DENYING for token in start) and not any(
        token.text in _DENYING for token in tokenise(gold.text)
    )


def _equals(gold: _Gold, given: str, rules: QuantityRules) -> bool:
    if _is_denied(gold, given):
        return False
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
    """True if math-verify holds the answers for equal. What it cannot parse equals nothing."""
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
