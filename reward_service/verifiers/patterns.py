"""The verifiers of form: `regex` (patterns), `format` (tags in order) and `exact_match` (the answer itself).

A pattern can take longer than the age of the universe, so this runs in worker processes, which are killed at their
deadline: Python's own engine needs no more, and its syntax is the one that is documented with the language.
"""

import re
import warnings
from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from reward_service.verifier.submission import Score, Submission, UserError
from reward_service.verifiers.extraction import boxed, strip_thinking

Flag = Literal["ignorecase", "multiline", "dotall", "ascii", "verbose"]


class Pattern(BaseModel):
    """A pattern, as Python's `re` reads it, and what it is worth."""

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


TagName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z][A-Za-z0-9_.-]{0,63}$")]


class FormatArguments(BaseModel):
    r"""Tags that follow each other, as <think>..</think><answer>..</answer>, and a \boxed{..}."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    tags: tuple[TagName, ...] = Field(
        ("think", "answer"), max_length=16, strict=False, description="names of the tags, in order; none if empty"
    )
    first_tag_in_prompt: bool = Field(
        False, description="the prompt opens the first tag, the completion only closes it"
    )
    nothing_outside: bool = Field(True, description="outside the tags there is only white space")
    boxed: bool = Field(
        False, description=r"a \boxed{..} that is not empty stands in the last tag; anywhere, if no tags"
    )
    reward: Literal["fraction", "all"] = Field(
        "all", description="all: 1 when all checks pass, else 0; fraction: the share of checks that pass"
    )

    @model_validator(mode="after")
    def _some_check(self) -> Self:
        if len(set(self.tags)) < len(self.tags):
            raise ValueError("tags names one twice; each tag stands once in the completion")
        if not self.tags and not self.boxed:
            raise ValueError("there is nothing to check; name tags or set boxed")
        return self


def well_formed(submission: Submission, arguments: FormatArguments) -> Score:
    """Requires the completion to have its tags, each once and in order, and its box."""
    text = submission.completion
    if arguments.first_tag_in_prompt and arguments.tags:
        text = f"<{arguments.tags[0]}>{text}"
    checks = {**_tag_checks(text, arguments), **_box_check(text, arguments)}
    fraction = sum(checks.values()) / len(checks)
    reward = fraction if arguments.reward == "fraction" else float(all(checks.values()))
    return Score(reward=reward, components={name: float(passed) for name, passed in checks.items()})


def _tag_checks(text: str, arguments: FormatArguments) -> Mapping[str, bool]:
    """For each tag: it opens once, then closes once, around something. And for all of them: the order, the outside."""
    if not arguments.tags:
        return {}
    checks = {f"tag_{name}": bool((_content(text, name) or "").strip()) for name in arguments.tags}
    marks = re.findall(rf"</?(?:{'|'.join(map(re.escape, arguments.tags))})>", text)
    expected = [mark for name in arguments.tags for mark in (f"<{name}>", f"</{name}>")]
    checks["order"] = marks == expected
    if arguments.nothing_outside:
        checks["outside"] = marks == expected and not _outside(text, arguments).strip()
    return checks


def _box_check(text: str, arguments: FormatArguments) -> Mapping[str, bool]:
    if not arguments.boxed:
        return {}
    where = _content(text, arguments.tags[-1]) if arguments.tags else text
    return {"boxed": where is not None and bool(boxed(where))}


def _content(text: str, name: str) -> str | None:
    """The text in the tag; None unless it opens once and then closes once."""
    if text.count(f"<{name}>") != 1 or text.count(f"</{name}>") != 1:
        return None
    _, _, rest = text.partition(f"<{name}>")
    content, close, _ = rest.partition(f"</{name}>")
    return content if close else None


def _outside(text: str, arguments: FormatArguments) -> str:
    """The text outside the tags, which are known to be in order."""
    for name in arguments.tags:
        before, _, rest = text.partition(f"<{name}>")
        text = before + rest.partition(f"</{name}>")[2]
    return text


class ExactMatchArguments(BaseModel):
    """`strip`: white space around either text does not count. `case`: upper and lower case differ."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    answer: str
    strip: bool = True
    case: bool = True


def exact_match(submission: Submission, arguments: ExactMatchArguments) -> Score:
    """1 when the completion equals the answer, else 0."""
    completion, answer = submission.completion, arguments.answer
    if arguments.strip:
        completion, answer = completion.strip(), answer.strip()
    if not arguments.case:
        completion, answer = completion.casefold(), answer.casefold()
    return Score(reward=1.0 if completion == answer else 0.0)
