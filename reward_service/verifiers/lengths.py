"""The verifiers of length: `length` (in a range), `overlong` (near or over a maximum) and `repetition`."""

import re
from collections.abc import Hashable, Sequence
from operator import eq
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from reward_service.verifier.submission import Score, Submission, UserError
from reward_service.verifiers.extraction import strip_thinking

Unit = Literal["characters", "words", "whitespace", "tokens"]
UNITS = (
    "characters: Unicode code points; words: runs of letters, digits and underscores; whitespace: what stands between "
    "white space; tokens: the model's, as the caller counted them in token_count"
)
# Far above any text, and small enough to be a float.
MOST = 1 << 40
TOKEN_COUNT = "tokens of the completion, counted by the caller; for the unit tokens, and for no other"

_WORD = re.compile(r"\w+")


def measure(text: str, *, unit: Unit, token_count: int | None) -> int:
    """The length in the unit. Raises UserError if it is tokens and the caller sent no count, or the reverse."""
    if (unit == "tokens") is (token_count is None):
        missing = "token_count is missing" if token_count is None else "token_count is given"
        raise UserError(f"unit is {unit!r} and {missing}; send the completion's token_count with the unit tokens only")
    if token_count is not None:
        return token_count
    if unit == "characters":
        return len(text)
    return sum(1 for _ in _WORD.finditer(text)) if unit == "words" else len(text.split())


class LengthArguments(BaseModel):
    """Reward = max(floor, in_range - penalty * distance to the range), all lengths in `unit`."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    minimum: int = Field(0, ge=0, le=MOST, description="shortest length in the range")
    maximum: int | None = Field(None, ge=0, le=MOST, description="longest length in the range; none if not given")
    unit: Unit = Field("words", description=UNITS)
    token_count: int | None = Field(None, ge=0, le=MOST, description=TOKEN_COUNT)
    in_range: float = Field(1.0, allow_inf_nan=False, description="reward of a length in the range, its ends included")
    penalty: float = Field(1.0, ge=0, allow_inf_nan=False, description="lost for each unit outside the range")
    floor: float = Field(0.0, allow_inf_nan=False, description="lowest reward, however far outside")
    strip_thinking: bool = Field(False, description="measure only what stands after the last </think>")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.maximum is not None and self.maximum < self.minimum:
            raise ValueError(f"maximum {self.maximum} is below minimum {self.minimum}")
        if self.floor > self.in_range:
            raise ValueError(f"floor {self.floor} is above in_range {self.in_range}")
        return self


def length(submission: Submission, arguments: LengthArguments) -> Score:
    """Full reward in a range of lengths, and less with the distance outside it."""
    text = strip_thinking(submission.completion) if arguments.strip_thinking else submission.completion
    measured = measure(text, unit=arguments.unit, token_count=arguments.token_count)
    longest = measured if arguments.maximum is None else arguments.maximum
    distance = max(arguments.minimum - measured, measured - longest, 0)
    reward = max(arguments.floor, arguments.in_range - arguments.penalty * distance)
    return Score(reward=reward, components={"length": float(measured), "distance": float(distance)})


class OverlongArguments(BaseModel):
    """The longest length, and how far before it the punishment starts, both in `unit`."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    maximum: int = Field(ge=1, le=MOST, description="the longest length; the reward falls to -1 there")
    buffer: int = Field(ge=0, description="how far below maximum the reward starts to fall from 0; 0: just past it")
    unit: Unit = Field("words", description=UNITS)
    token_count: int | None = Field(None, ge=0, le=MOST, description=TOKEN_COUNT)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.buffer > self.maximum:
            raise ValueError(f"buffer {self.buffer} is above maximum {self.maximum}")
        return self


def overlong(submission: Submission, arguments: OverlongArguments) -> Score:
    """0 up to maximum - buffer, from there linear down to -1 at maximum, and -1 beyond.

    Soft overlong punishment of DAPO (Yu et al. 2025, arXiv:2503.14476, equation 13), over the whole completion.
    """
    measured = measure(submission.completion, unit=arguments.unit, token_count=arguments.token_count)
    over = measured - (arguments.maximum - arguments.buffer)
    share = min(1.0, max(0, over) / max(1, arguments.buffer))
    return Score(reward=0.0 - share, components={"length": float(measured)})


class RepetitionArguments(BaseModel):
    """Reward = -scale * the greater of two excesses, each from 0 to 1.

    The one is the share of n-grams that occurred before, above `allowed`; the other is 1 where a run of one phrase that
    repeats without a pause is longer than `longest_run`.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    n: int = Field(4, ge=1, le=32, description="length of the n-grams, and of the longest phrase of a run, in units")
    unit: Literal["words", "characters"] = Field(
        "words", description="words: what stands between white space, in small letters; characters: code points"
    )
    allowed: float = Field(0.0, ge=0, lt=1, description="share of repeated n-grams that is not punished")
    longest_run: int | None = Field(
        None, ge=1, description="longest run that is not punished, in units; if not given, runs are not punished"
    )
    scale: float = Field(1.0, gt=0, allow_inf_nan=False, description="the punishment at its greatest")
    strip_thinking: bool = Field(False, description="judge only what stands after the last </think>")


def repetition(submission: Submission, arguments: RepetitionArguments) -> Score:
    """0 for a completion that does not repeat itself, down to -scale for one that does nothing else."""
    text = strip_thinking(submission.completion) if arguments.strip_thinking else submission.completion
    units = text.lower().split() if arguments.unit == "words" else text
    fraction = repeated_fraction(units, n=arguments.n)
    run = longest_run(units, period=arguments.n)
    excess = max(0.0, fraction - arguments.allowed) / (1.0 - arguments.allowed)
    if arguments.longest_run is not None and run > arguments.longest_run:
        excess = 1.0
    return Score(reward=0.0 - arguments.scale * excess, components={"repeated": fraction, "longest_run": float(run)})


def repeated_fraction(units: Sequence[str], *, n: int) -> float:
    """1 - distinct n-grams / all n-grams; 0 of a text that is shorter than n."""
    if len(units) < n:
        return 0.0
    ids, size = _numbered(units), 1
    while size < n:
        # Two grams of `size` make one of up to twice that. So a long n takes no more memory than a short one.
        step = min(size, n - size)
        ids, size = _numbered(list(zip(ids, ids[step:], strict=False))), size + step
    return 1.0 - len(set(ids)) / len(ids)


def _numbered(values: Sequence[Hashable]) -> list[int]:
    """Equal values as one number, others as others."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(value, len(numbers)) for value in values]


def longest_run(units: Sequence[str], *, period: int) -> int:
    """The most units in a row that are one phrase of at most `period` units, said at least twice; 0 if none is."""
    return max((_run_of(units, period=length) for length in range(1, period + 1)), default=0)


def _run_of(units: Sequence[str], *, period: int) -> int:
    equal = bytes(map(eq, units, units[period:]))
    longest = max(map(len, equal.split(b"\0")))
    return longest + period if longest >= period else 0
