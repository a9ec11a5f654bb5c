"""The gate of releases under planted regressions, planted reward hacks, and candidates of no difference.

    .venv/bin/python -m benchmarks.release_gate [--seeds N] [--output benchmarks/results/release_gate.md]

Scripted evaluations, no model: each held-out task has a difficulty of its own (beta-distributed, so that tasks are
rather solved or rather not), and a version solves it with a probability that its skill moves. The gate itself is the
learner's own (`learner.releases.gate`). A run is 20 candidates one after the other against the same release, as long as
none passes: that is how often noise gets a chance.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.result_files import print_and_write
from learner.releases.gate import judge_canary, judge_evaluation

RELEASED, USERS = 0.40, 0.70
GAINS = (-0.20, -0.10, -0.05, -0.02, 0.0, 0.02, 0.05, 0.10, 0.20)
TASKS = (200, 500)
ERRORS = (1.0, 2.0, 3.0)
FALLS = (0.4, 0.2, 0.1, 0.05, 0.0, -0.05)
REWARDS = (100, 200, 500)
CANDIDATES, MARGIN = 20, 0.1


def difficulties(tasks: int, random: np.random.Generator) -> NDArray[np.float64]:
    """The chance of the released version to solve each task; their mean is `RELEASED`."""
    chances = random.beta(0.8, 1.2, size=tasks)
    return np.asarray(chances + (RELEASED - chances.mean()))


def scores(chances: NDArray[np.float64], random: np.random.Generator) -> Mapping[int, float]:
    """An evaluation with a sample of each task."""
    solved = random.random(len(chances)) < chances
    return {task: float(one) for task, one in enumerate(solved)}


def evaluated(gain: float, *, tasks: int, seeds: int) -> tuple[list[float], list[float]]:
    """By number of standard errors, the share of candidates that pass, and of runs in which one of them does."""
    passed, runs = np.zeros(len(ERRORS)), np.zeros(len(ERRORS))
    for seed in range(seeds):
        random = np.random.default_rng((seed, tasks, round(1000 * (gain + 1))))
        chances = difficulties(tasks, random)
        released = scores(chances, random)
        found = [
            judge_evaluation(scores(chances + gain, random), released, standard_errors=1.0) for _ in range(CANDIDATES)
        ]
        passes = np.array([[one.gain > 0 and one.gain >= errors * one.error for errors in ERRORS] for one in found])
        passed += passes.mean(axis=0)
        runs += passes.any(axis=0)
    return list(passed / seeds), list(runs / seeds)


def tried(fall: float, *, wanted: int, seeds: int) -> float:
    """The share of candidates, better by evaluation, whose users' reward is lower by `fall`, that are released."""
    released = 0
    for seed in range(seeds):
        random = np.random.default_rng((seed, wanted, round(1000 * (fall + 1))))
        ours, theirs = (list((random.random(wanted) < mean).astype(float)) for mean in (USERS - fall, USERS))
        found = judge_canary(ours, theirs, wanted=wanted, margin=MARGIN, standard_errors=2.0)
        released += found.state == "passes"
    return released / seeds


def _evaluations(seeds: int) -> Sequence[str]:
    lines = []
    for tasks in TASKS:
        lines += [
            f"| true gain, {tasks} tasks | " + " | ".join(f"k = {k:g}" for k in ERRORS) + " | " +
            " | ".join(f"a run of {CANDIDATES}, k = {k:g}" for k in ERRORS) + " |",
            "|---" * (1 + 2 * len(ERRORS)) + "|",
        ]  # fmt: skip
        for gain in GAINS:
            passed, runs = evaluated(gain, tasks=tasks, seeds=seeds)
            lines.append(f"| {gain:+.2f} | " + " | ".join(f"{share:.2%}" for share in (*passed, *runs)) + " |")
        lines.append("")
    return lines


def _trials(seeds: int) -> Sequence[str]:
    lines = [
        "| users' reward falls by | " + " | ".join(f"{wanted} rewards each" for wanted in REWARDS) + " |",
        "|---" * (1 + len(REWARDS)) + "|",
    ]
    for fall in FALLS:
        shares = [tried(fall, wanted=wanted, seeds=seeds) for wanted in REWARDS]
        lines.append(f"| {fall:+.2f} | " + " | ".join(f"{share:.2%}" for share in shares) + " |")
    return lines


def main() -> None:
    """Writes the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=2000)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/release_gate.md"))
    given = parser.parse_args()
    times = f"{given.seeds} × {CANDIDATES}"
    lines = [
        "# The gate of releases",
        "",
        f"Made by `python -m benchmarks.release_gate --seeds {given.seeds}`. **Scripted evaluations**, no model:",
        f"tasks of unequal difficulty, one sample each, a released version that solves {RELEASED:.0%}.",
        "The gate is the learner's own.",
        "",
        "## By held-out evaluation",
        "",
        f"The share of candidates that are released at k `standard_errors`, in {times} evaluations of each true gain;",
        f"and of runs of {CANDIDATES} such candidates in a row that release one of them. A released version's own",
        "evaluation is noise, too, and the same for all candidates of a run.",
        "",
        *_evaluations(given.seeds),
        "## With users",
        "",
        "Candidates that have passed the evaluation, as those do that cheat its reward, and whose users' mean reward,",
        f"of 0 and 1, is another than the released version's {USERS}; `canary_margin` {MARGIN}, 2 standard errors,",
        f"{given.seeds} trials each. The share that is released:",
        "",
        *_trials(given.seeds),
    ]
    print_and_write("\n".join(lines) + "\n", given.output)


if __name__ == "__main__":
    main()
