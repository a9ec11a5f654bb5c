"""What became of each case, and the reward of all of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from reward_service.verifier import DataError, Score


class Verdict(Enum):
    """How a case ended. `ERROR`: the solution raised, crashed or took too much; `SKIPPED`: not to be counted."""

    PASSED = "passed"
    WRONG = "wrong"
    ERROR = "error"
    TIMEOUT = "timeout"
    SKIPPED = "skipped"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A verdict and its share of the reward."""

    verdict: Verdict
    weight: float = 1.0


NOTHING_EXTRACTED = Score(reward=0.0, components={"extracted": 0.0})


def score_of(cases: Sequence[Case], *, reward: Literal["fraction", "all"]) -> Score:
    """The reward and its components. Raises DataError if there is no case to count."""
    counted = [case for case in cases if case.verdict is not Verdict.SKIPPED]
    if not counted:
        raise DataError("the tests hold no case that counts; give at least one that is not skipped")
    passed = [case for case in counted if case.verdict is Verdict.PASSED]
    fraction = sum(case.weight for case in passed) / sum(case.weight for case in counted)
    if len(passed) == len(counted):
        fraction = 1.0  # whatever the sum of weights has rounded to
    value = fraction if reward == "fraction" else float(len(passed) == len(counted))
    components = {
        "extracted": 1.0,
        "cases": float(len(counted)),
        "passed": float(len(passed)),
        "fraction": fraction,
        "wrong": _count(counted, Verdict.WRONG),
        "errors": _count(counted, Verdict.ERROR),
        "timeouts": _count(counted, Verdict.TIMEOUT),
    }
    return Score(reward=value, components=components)


def _count(cases: Sequence[Case], verdict: Verdict) -> float:
    return float(sum(case.verdict is verdict for case in cases))
