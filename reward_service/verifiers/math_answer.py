"""`math`: the completion's final answer equals the right one as mathematics, by math-verify.

Loaded only in worker processes: importing sympy is slow, and a pathological expression must be killable.
"""

import logging
import re
from collections.abc import Sequence
from itertools import product

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from reward_service.extraction import boxed, strip_thinking
from reward_service.verifier import DataError, Score, Submission
from reward_service.verifiers.arguments import MathArguments

# It warns once that its own timeout is off. The worker's deadline replaces that: an alarm cannot interrupt C code.
logging.getLogger("math_verify").setLevel(logging.ERROR)

# Without a box the answer is at the end; a long text would only slow the extraction's regular expressions.
_TAIL_CHARS = 4096

_EXTRACTION = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
_BOLD = re.compile(r"(?<![\w)])\*\*(?=\S)(.+?)(?<=\S)\*\*(?![\w(])")


def math_answer(submission: Submission, arguments: MathArguments) -> Score:
    r"""1 when the final answer (the last \boxed{..}, else the last expression) equals the right one, else 0."""
    gold = _parse(_as_boxed(arguments.answer))
    if not gold:
        raise DataError(f"the right answer is not mathematics that math-verify can read: {arguments.answer!r}")
    candidates = [parsed for text in _answers(submission.completion) if (parsed := _parse(text))]
    correct = any(_equal(gold, candidate) for candidate in candidates)
    return Score(reward=float(correct), components={"parsed": float(bool(candidates))})


def _answers(completion: str) -> list[str]:
    """Texts that may hold the final answer. Several boxes may be one answer in parts, or a correction by the last."""
    text = strip_thinking(completion)
    boxes = tuple(dict.fromkeys(boxed(text)))
    if not boxes:
        return [_BOLD.sub(r"\1", text[-_TAIL_CHARS:])]
    last = boxed(text)[-1]
    return [_as_boxed(last)] if len(boxes) == 1 else [_as_boxed(last), _as_boxed(", ".join(boxes))]


def _as_boxed(answer: str) -> str:
    """Without an anchor math-verify reads `2\\sqrt{3}+1` as 2."""
    bare = boxed(answer)[-1] if boxed(answer) else answer.strip().strip("$")
    return rf"$\boxed{{{bare}}}$"


def _parse(text: str) -> list[object]:
    return list(parse(text, extraction_config=_EXTRACTION, parsing_timeout=None, raise_on_error=True))


def _equal(gold: Sequence[object], candidate: Sequence[object]) -> bool:
    """Whether any reading of one equals any reading of the other; DataError if none does and one cannot be compared."""
    fault: Exception | None = None
    for right, given in product(gold, candidate):
        try:
            if verify(right, given, timeout_seconds=None, raise_on_error=True):
                return True
        except Exception as error:  # noqa: BLE001  sympy raises anything; it decides only if no other reading is equal
            fault = error
    if fault is not None:
        raise DataError(f"the answers cannot be compared: {type(fault).__name__}: {fault}") from fault
    return False
