"""`repetition`: a punishment of completions that say the same again."""

from collections.abc import Hashable, Sequence
from operator import eq
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from reward_service.extraction import strip_thinking
from reward_service.verifier import Score, Submission


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
