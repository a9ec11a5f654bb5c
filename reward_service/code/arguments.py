"""The arguments of `code` (language, tests, how passed ones become a reward), and the result of its cases."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from reward_service.verifier.submission import DataError, Score

_MODEL = ConfigDict(frozen=True, strict=True, extra="forbid")

Weight = Annotated[float, Field(gt=0, allow_inf_nan=False, description="share of the reward, relative to the others'")]
OutputComparison = Literal["exact", "lines", "tokens", "numbers"]
NOTHING_EXTRACTED = Score(reward=0.0, components={"extracted": 0.0}, explanation="no program was found")
_SHOWN_CASES = 20


class Tolerance(BaseModel):
    """Numbers a and b are equal if |a - b| <= max(relative * max(|a|, |b|), absolute)."""

    model_config = _MODEL

    relative: float = Field(1e-6, ge=0, lt=1, description="relative difference")
    absolute: float = Field(1e-9, ge=0, allow_inf_nan=False, description="absolute difference")


class StdioCase(BaseModel):
    """Input of a program, and the output that it must print."""

    model_config = _MODEL

    stdin: str = Field("", description="the program's standard input")
    stdout: str = Field(description="the standard output that is right")
    weight: Weight = 1.0


class StdioTests(BaseModel):
    """Runs the whole program once for each case. A program that does not exit with 0 fails the case."""

    model_config = _MODEL

    kind: Literal["stdio"]
    cases: tuple[StdioCase, ...] = Field(strict=False, max_length=1000, description="inputs with their outputs")
    compare: OutputComparison = Field(
        "lines",
        description="exact: character by character; lines: without spaces at the ends of lines and empty lines at the "
        "end; tokens: what stands between spaces and ends of lines; numbers: tokens, numeric ones within the tolerance",
    )
    tolerance: Tolerance = Tolerance()


class CallCase(BaseModel):
    """A call, and what it must return."""

    model_config = _MODEL

    arguments: tuple[JsonValue, ...] = Field((), strict=False, description="positional arguments")
    keywords: dict[str, JsonValue] = Field(default_factory=dict, description="keyword arguments")
    expected: JsonValue = Field(description="the value that is right")
    weight: Weight = 1.0


class CallTests(BaseModel):
    """Calls one function for each case and compares what it returns, with numbers as Python compares them."""

    model_config = _MODEL

    kind: Literal["call"]
    entry_point: str = Field(
        min_length=1,
        pattern=r"^[^\W\d]\w*(\.[^\W\d]\w*)*$",
        description="the function's name, or Class.method, which is called on a new instance; a name that only a class "
        "`Solution` has is taken from it",
    )
    cases: tuple[CallCase, ...] = Field(strict=False, max_length=1000, description="calls with their results")
    literals: Literal["json", "python"] = Field(
        "json", description="python: each argument and expected value is a string that holds a Python literal"
    )
    tuples_are_lists: bool = Field(True, description="whether a tuple equals a list of the same elements")
    tolerance: Tolerance | None = Field(None, description="for numbers that are not both integers; null: exactly equal")


class AssertCase(BaseModel):
    """Python statements that raise if the solution is wrong."""

    model_config = _MODEL

    code: str = Field(min_length=1, description="an assert statement, or several statements")
    weight: Weight = 1.0


class AssertTests(BaseModel):
    """Runs assert statements (MBPP) in another process than the solution, whose names they use."""

    model_config = _MODEL

    kind: Literal["assert"]
    cases: tuple[AssertCase, ...] = Field(strict=False, max_length=1000, description="statements, each a case")
    setup: str = Field("", description="Python that runs once before the cases, on the side of the tests")
    entry_points: tuple[str, ...] = Field(
        (),
        strict=False,
        description="the names that the cases find; none: those of the solution that no builtin has",
    )


class CheckTests(BaseModel):
    """Runs functions `check(candidate)` (HumanEval) in another process than the solution."""

    model_config = _MODEL

    kind: Literal["check"]
    entry_point: str = Field(
        min_length=1, description="the solution's function, Class.method, or a method of its class Solution"
    )
    cases: tuple[AssertCase, ...] = Field(strict=False, max_length=1000, description="code that defines check, each")
    setup: str = Field(
        "", description="Python that runs once before the cases, on the side of the tests: helpers of the prompt, say"
    )


class PytestTests(BaseModel):
    """Runs pytest on test files that import the solution as a module, in another process than the solution."""

    model_config = _MODEL

    kind: Literal["pytest"]
    files: dict[str, str] = Field(min_length=1, max_length=100, description="test files and what they need, by name")
    module: str = Field("solution", pattern=r"^[^\W\d]\w*$", description="the name by which they import the solution")
    weights: dict[str, Weight] = Field(
        default_factory=dict, description="by test id, or by a test's name for all of its parameters; the rest have 1"
    )


Tests = Annotated[StdioTests | CallTests | AssertTests | CheckTests | PytestTests, Field(discriminator="kind")]


class CodeArguments(BaseModel):
    """Place of the code in the completion, its tests, and the worth of passed ones."""

    model_config = _MODEL

    tests: Tests = Field(description="the tests, of one kind")
    language: str = Field(
        "python",
        pattern=r"^[a-z0-9+#._-]{1,32}$",
        description="of the solution; other than python only for stdio, with an interpreter that the operator lists",
    )
    extract: Literal["last", "first", "whole"] = Field(
        "last",
        description="the last or first fenced block of the language (or the whole text if there is no fence and it "
        "looks like code), or the whole text as it is; reasoning in think tags is left out",
    )
    prelude: str = Field("", description="code that is put before the solution's: imports, or a prompt's function head")
    reward: Literal["fraction", "all"] = Field(
        "fraction", description="fraction: the weight of the passed cases over that of all; all: 1 if every case passes"
    )
    timeout_s: float = Field(6.0, gt=0, le=600, description="wall-clock seconds for one case")
    total_timeout_s: float = Field(
        20.0, gt=0, le=3600, description="wall-clock seconds for all cases; those that it leaves no time for time out"
    )
    memory_mib: int = Field(512, ge=64, le=1 << 20, description="memory of the solution's process, in MiB")
    reference: str | None = Field(
        None, description="a right solution: if it does not pass every case, the tests are broken, and the item fails"
    )


class CaseVerdict(Enum):
    """End of a case. `ERROR`: the solution raised, crashed or took too much; `KILLED`: somebody killed its process;
    `SKIPPED`: not to be counted.
    """

    PASSED = "passed"
    WRONG = "wrong"
    ERROR = "error"
    KILLED = "killed"
    TIMEOUT = "timeout"
    SKIPPED = "skipped"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A verdict and its share of the reward."""

    verdict: CaseVerdict
    weight: float = 1.0


def score_of(cases: Sequence[Case], *, reward: Literal["fraction", "all"]) -> Score:
    """The reward and its components. Raises DataError if there is no case to count."""
    counted = [case for case in cases if case.verdict is not CaseVerdict.SKIPPED]
    if not counted:
        raise DataError("the tests hold no case that counts; give at least one that is not skipped")
    passed = [case for case in counted if case.verdict is CaseVerdict.PASSED]
    fraction = sum(case.weight for case in passed) / sum(case.weight for case in counted)
    if len(passed) == len(counted):
        fraction = 1.0  # whatever the sum of weights has rounded to
    value = fraction if reward == "fraction" else float(len(passed) == len(counted))
    components = {
        "extracted": 1.0,
        "cases": float(len(counted)),
        "passed": float(len(passed)),
        "fraction": fraction,
        "wrong": _count(counted, CaseVerdict.WRONG),
        "errors": _count(counted, CaseVerdict.ERROR) + _count(counted, CaseVerdict.KILLED),
        "timeouts": _count(counted, CaseVerdict.TIMEOUT),
    }
    return Score(reward=value, components=components, explanation=_what_failed(cases))


def _what_failed(cases: Sequence[Case]) -> str:
    """The cases that were not passed, numbered from 1 as the tests have them."""
    failed = [(number, case.verdict) for number, case in enumerate(cases, 1) if case.verdict is not CaseVerdict.PASSED]
    shown = ", ".join(f"case {number}: {verdict.value}" for number, verdict in failed[:_SHOWN_CASES])
    more = f", and {len(failed) - _SHOWN_CASES} more" if len(failed) > _SHOWN_CASES else ""
    return shown + more or "all cases passed"


def _count(cases: Sequence[Case], verdict: CaseVerdict) -> float:
    return float(sum(case.verdict is verdict for case in cases))
