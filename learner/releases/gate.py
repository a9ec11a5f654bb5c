"""The gate of releases, as pure functions: is a candidate better on held-out tasks, and not worse with users?

The evaluation is compared task by task where both versions have the same tasks, which takes the tasks' own difficulty
out of the noise: with d the differences of n tasks, mean(d) has the standard error std(d)/√n. Otherwise the two means
are independent, and the squares of their errors add up.

Users' rewards are looked at once, when both versions have as many as were asked for: a test that is repeated after each
reward would let a worse candidate through sooner or later.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

_FEWEST_PAIRS = 10


@dataclass(frozen=True)
class GateFinding:
    """The result of a comparison. `gain` is the candidate's mean less the released version's, `error` its standard
    error; `text` says all of it in words.
    """

    passes: bool
    gain: float
    error: float
    text: str


CanaryState = Literal["waits", "passes", "falls"]


@dataclass(frozen=True)
class CanaryFinding:
    """The state of a trial with users, in words, too."""

    state: CanaryState
    text: str


def judge_evaluation(
    candidate: Mapping[int, float], released: Mapping[int, float], *, standard_errors: float
) -> GateFinding:
    """Compares scores by held-out task: passes if the gain is above 0 and at least so many standard errors."""
    faulty = [task for scores in (candidate, released) for task, score in scores.items() if not math.isfinite(score)]
    if faulty:
        return GateFinding(False, math.nan, math.nan, f"task {faulty[0]} has a score that is no number")
    common = sorted(candidate.keys() & released.keys())
    is_paired = len(common) >= max(_FEWEST_PAIRS, min(len(candidate), len(released)) // 2)
    if not is_paired and min(len(candidate), len(released)) < _FEWEST_PAIRS:
        return GateFinding(
            False, math.nan, math.nan,
            f"too few tasks to compare: {len(candidate)} of the candidate and {len(released)} of the released version, "
            f"expected {_FEWEST_PAIRS} at least",
        )  # fmt: skip
    if is_paired:
        gain, error = _paired([candidate[task] - released[task] for task in common])
        over = f"over the same {len(common)} tasks"
    else:
        gain, error = _apart(list(candidate.values()), list(released.values()))
        over = f"over {len(candidate)} tasks of one and {len(released)} others of the other"
    passes = gain > 0 and gain >= standard_errors * error
    word = "better" if gain >= 0 else "worse"
    text = f"{abs(gain):.4f} {word} {over}, standard error {error:.4f}, of which {standard_errors:g} were asked for"
    return GateFinding(passes, gain, error, text)


def judge_canary(
    candidate: Sequence[float], released: Sequence[float], *, wanted: int, margin: float, standard_errors: float
) -> CanaryFinding:
    """Compares users' rewards, of each version the first `wanted`: passes if the candidate's mean is shown to be less
    than `margin` below the other. If none are wanted it passes: so of a trial that was begun when some were.
    """
    if not wanted:
        return CanaryFinding("passes", "its evaluation was better, and no rewards of users are asked for any more")
    ours, theirs = list(candidate[:wanted]), list(released[:wanted])
    if min(len(ours), len(theirs)) < wanted:
        return CanaryFinding(
            "waits",
            f"{len(ours)} of {wanted} rewards of users for the candidate, {len(theirs)} of {wanted} for the released "
            "version",
        )
    gain, error = _apart(ours, theirs)
    lowest = gain - standard_errors * error
    state: CanaryState = "passes" if lowest > -margin else "falls"
    return CanaryFinding(
        state,
        f"users' mean reward {statistics.fmean(ours):.3f} against {statistics.fmean(theirs):.3f} of {wanted} each, at "
        f"worst {lowest:+.3f} by {standard_errors:g} standard errors, {-margin:+.3f} is allowed",
    )


def _paired(differences: Sequence[float]) -> tuple[float, float]:
    return statistics.fmean(differences), _error(differences)


def _apart(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float]:
    return statistics.fmean(ours) - statistics.fmean(theirs), math.hypot(_error(ours), _error(theirs))


def _error(values: Sequence[float]) -> float:
    """Standard error of the mean."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf
