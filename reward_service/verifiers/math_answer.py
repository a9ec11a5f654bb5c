r"""`math`: the completion's final answer equals the right one as mathematics.

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
"""

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from reward_service.extraction import boxed
from reward_service.mathematics.answers import Answer, Listing, Ordered, Text
from reward_service.mathematics.call_limit import TooManyCalls, at_most_calls
from reward_service.mathematics.equality import check, same_answer
from reward_service.mathematics.final_answer import final_answers, words_of
from reward_service.mathematics.limits import MAX_CHARS, OverLimits, Unreadable
from reward_service.mathematics.quantities import Rules
from reward_service.mathematics.reading import read
from reward_service.mathematics.tokens import tokenise
from reward_service.verifier import DataError, Score, Submission
from reward_service.verifiers.arguments import MathArguments

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
    def is_text(self) -> bool:
        return any(isinstance(reading, Text) for reading in self.readings)


def math_answer(submission: Submission, arguments: MathArguments) -> Score:
    r"""1 when the final answer (the last \boxed{..}, else the last statement or expression) equals a right one, else 0.

    Raises DataError if a right answer is no mathematics, or too large to be computed.
    """
    rules = Rules(tolerance=arguments.tolerance, convert_units=arguments.convert_units)
    answers = (arguments.answer,) if isinstance(arguments.answer, str) else arguments.answer
    golds = [_read_gold(answer) for answer in answers]
    guesses, boxes = final_answers(submission.completion)
    if any(gold.is_text for gold in golds):
        guesses = [*words_of(submission.completion), *guesses]
    given = _first_readable(guesses)
    try:
        correct = any(_is_right(gold, given, boxes, rules) for gold in golds) if given is not None else False
    except (OverLimits, RecursionError):
        return Score(reward=0.0, components={"parsed": 1.0, "over_limits": 1.0})
    return Score(reward=float(correct), components={"parsed": float(given is not None), "over_limits": 0.0})


def _read_gold(answer: str) -> _Gold:
    bare = boxed(answer)[-1] if boxed(answer) else answer.strip()
    if not bare.strip("$ ."):
        raise DataError(f"the right answer holds no mathematics: {answer!r}")
    try:
        readings = read(bare)
    except Unreadable:
        readings = ()
    except OverLimits as error:
        raise DataError(f"the right answer is beyond the limits ({error}): {answer[:200]!r}") from error
    return _Gold(text=bare, readings=readings)


def _first_readable(guesses: Sequence[str]) -> str | None:
    """The first guess that is mathematics to us; if none is, the best one, for math-verify."""
    for guess in guesses:
        try:
            read(guess[: MAX_CHARS + 1], lenient_units=True)
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
    left, right = ([token.text for token in tokenise(text, thousands=True)] for text in (one, other))
    return left == right and bool(left)


def _equals(gold: _Gold, given: str, rules: Rules) -> bool:
    try:
        readings = read(given, lenient_units=True)
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
