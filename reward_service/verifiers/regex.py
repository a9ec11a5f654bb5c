"""`regex`: what patterns the completion matches.

A pattern can take longer than the age of the universe, so this runs in worker processes, which are killed at their
deadline: Python's own engine needs no more, and its syntax is the one that is documented with the language.
"""

import re
import warnings
from functools import lru_cache
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from reward_service.extraction import strip_thinking
from reward_service.verifier import Score, Submission, UserError

Flag = Literal["ignorecase", "multiline", "dotall", "ascii", "verbose"]


class Pattern(BaseModel):
    """One pattern, as Python's `re` reads it, and what it is worth."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    pattern: str = Field(max_length=10_000, description="regular expression in the syntax of Python's re")
    match: Literal["search", "full"] = Field(
        "search", description="search: it matches somewhere; full: it matches all of the completion"
    )
    forbidden: bool = Field(False, description="it must not match")
    weight: float = Field(1.0, gt=0, le=1e6, description="its part of the sum of weights")
    flags: tuple[Flag, ...] = Field((), strict=False, description="as in Python's re; dotall: a dot matches new lines")


class RegexArguments(BaseModel):
    """Patterns that are required or forbidden."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    patterns: tuple[Pattern, ...] = Field(
        min_length=1, max_length=64, strict=False, description="the patterns; each counts by its weight"
    )
    reward: Literal["fraction", "all"] = Field(
        "fraction", description="fraction: weight of those satisfied over the sum; all: 1 when all are, else 0"
    )
    strip_thinking: bool = Field(False, description="judge only what stands after the last </think>")


def regex(submission: Submission, arguments: RegexArguments) -> Score:
    """The weighted share of patterns that the completion matches, or does not match where they are forbidden."""
    text = strip_thinking(submission.completion) if arguments.strip_thinking else submission.completion
    satisfied = [_satisfied(text, pattern) for pattern in arguments.patterns]
    weights = [pattern.weight for pattern in arguments.patterns]
    fraction = sum(weight for weight, is_met in zip(weights, satisfied, strict=True) if is_met) / sum(weights)
    reward = fraction if arguments.reward == "fraction" else float(all(satisfied))
    components = {f"pattern_{index}": float(is_met) for index, is_met in enumerate(satisfied, start=1)}
    return Score(reward=reward, components={"fraction": fraction, "all": float(all(satisfied)), **components})


def _satisfied(text: str, given: Pattern) -> bool:
    compiled = _compiled(given.pattern, given.flags)
    found = compiled.search(text) if given.match == "search" else compiled.fullmatch(text)
    return (found is None) is given.forbidden


@lru_cache(maxsize=1024)
def _compiled(pattern: str, flags: tuple[Flag, ...]) -> re.Pattern[str]:
    combined = re.NOFLAG
    for flag in flags:
        combined |= re.RegexFlag[flag.upper()]
    try:
        with warnings.catch_warnings(action="ignore"):
            return re.compile(pattern, combined)
    except (re.error, OverflowError, RecursionError) as error:
        raise UserError(f"pattern {pattern[:200]!r} is no regular expression of Python's re: {error}") from error
