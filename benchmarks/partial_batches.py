"""Steps that begin before their batch is complete against steps that wait for it, on the addition task, in alternation.

    .venv/bin/python -m benchmarks.partial_batches [--steps N] [--rounds N] [--max-lag N] [--write]

A batch is one row of tokens by default, so that nothing of it could begin early: both sides are run with rows of ROW
tokens, and the side that waits with one row, too. All processes share the cores of one machine, so that what is
computed early takes them from sampling; on a device of its own it would not.
"""

import argparse
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from benchmarks.machine import described_machine
from benchmarks.whole_runs import run_headway

CONFIG = Path(__file__).with_name("settings") / "addition.toml"
RESULT = Path(__file__).with_name("results") / "partial_batches.md"
ROW = 256
SKIPPED_STEPS = 5
"""The first steps warm caches up."""
VARIANTS: Mapping[str, Mapping[str, object]] = {
    "whole batch, one row": {},
    "whole batch, rows": {"learner.training.microbatch-tokens": ROW},
    "begun early, rows": {"learner.training.microbatch-tokens": ROW, "learner.training.partial-batches": True},
}


@dataclass(frozen=True)
class SideNumbers:
    """Medians over the steps of a run, in seconds; `early_s` of a run in which steps begin early."""

    step_s: float
    wait_s: float
    train_s: float
    early_s: float
    completions_per_s: float


def main() -> None:
    """Runs all variants `rounds` times in alternation, prints the comparison, and writes it if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-lag", type=int, default=0)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    runs: dict[str, list[SideNumbers]] = {name: [] for name in VARIANTS}
    for number in range(arguments.rounds):
        for name in list(VARIANTS) if number % 2 == 0 else reversed(list(VARIANTS)):
            runs[name].append(_run(VARIANTS[name], steps=arguments.steps, max_lag=arguments.max_lag))
            print(f"round {number + 1}, {name}: {runs[name][-1]}", flush=True)
    what = f"{arguments.steps} steps of 32 groups of 8, max_lag {arguments.max_lag}, {arguments.rounds} rounds"
    report = _report(runs, what=what)
    print(report)
    if arguments.write:
        RESULT.write_text(report, encoding="utf-8")


def _run(options: Mapping[str, object], *, steps: int, max_lag: int) -> SideNumbers:
    usual = {"learner.steps": steps, "learner.max-lag": max_lag, "learner.evaluation.tasks": 0,
             "learner.evaluation.final-tasks": 0}  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        outcome = run_headway(CONFIG, folder=Path(folder), options={**usual, **options})
    counted = outcome.of_kind("step")[SKIPPED_STEPS:]
    return SideNumbers(
        step_s=statistics.median(after["time_s"] - before["time_s"] for before, after in pairwise(counted)),
        wait_s=statistics.median(step["wait_s"] for step in counted),
        train_s=statistics.median(step["train_s"] for step in counted),
        early_s=statistics.median(step["early_s"] or 0.0 for step in counted),
        completions_per_s=outcome.summary["completions_per_s"],
    )


def _report(runs: Mapping[str, Sequence[SideNumbers]], *, what: str) -> str:
    early = runs["begun early, rows"]
    ratios = {
        name: [one.step_s / other.step_s for one, other in zip(early, runs[name], strict=True)]
        for name in ("whole batch, one row", "whole batch, rows")
    }
    lines = [
        "# Steps that begin before their batch is complete",
        "",
        f"`benchmarks/partial_batches.py`: {what}. Medians over the rounds; lowest and highest in brackets.",
        f"{described_machine()}.",
        "",
        "| variant | a step, s | waiting, s | training, s | of it early, s | completions/s |",
        "|---|---|---|---|---|---|",
        *(_row(name, some) for name, some in runs.items()),
        "",
        *(
            f"- A step that begins early takes **{_spread(some)} times** as long as with: {name}."
            for name, some in ratios.items()
        ),
        "",
    ]
    return "\n".join(lines)


def _row(name: str, runs: Sequence[SideNumbers]) -> str:
    names = ("step_s", "wait_s", "train_s", "early_s", "completions_per_s")
    return f"| {' | '.join([name, *(_spread([getattr(run, each) for run in runs]) for each in names)])} |"


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.3g} ({min(values):.3g}–{max(values):.3g})"


if __name__ == "__main__":
    main()
