"""The upper bound of the ratio to the behavior policy, where tokens are old: arithmetic and mazes of several turns.

    .venv/bin/python -m benchmarks.ratio_caps [--seeds 3] [--only TASK ...] [--resume] [--report]

Whole systems from the examples' warm starts, at max_lag 4 with as much in flight as it permits (`lag.pacing = "full"`)
and no guard. The sides differ in the bound alone, and take turns; the services of a task stay up. The third task is
addition in `benchmarks.exact_lag`, where tokens are exactly as old as is said. Results go to
benchmarks/results/ratio_caps.{json,md}, each run as it ends.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.env_learning import warm_up
from benchmarks.machine import described_machine, machines_of
from benchmarks.warm_system import Options, room_for, warm_system
from benchmarks.whole_runs import RunFiles, files_of, with_steps

RESULTS = Path(__file__).with_name("results")
EVALUATION = 300
MAX_LAG = 4
STEPS = {"arithmetic": 42, "maze": 42}
IN_FLIGHT = 6 * 16
"""Six steps' groups: without that many, tokens do not become four versions old."""


@dataclass(frozen=True)
class Bounds:
    """An algorithm with its upper bound of the ratio, and that of tokens of negative advantage where it is another."""

    algo: str
    cap: float
    bad_cap: float | None = None

    @property
    def options(self) -> Options:
        """Of the learner. cispo's setting is the bound less 1."""
        if self.algo == "cispo":
            return {"algo": self.algo, "algo.ratio-high": self.cap - 1}
        bad = {} if self.bad_cap is None else {"algo.ratio-cap-bad": self.bad_cap}
        return {"algo": self.algo, "algo.ratio-cap": self.cap, **bad}

    @property
    def told(self) -> str:
        """In a table's cells."""
        return f"| {self.algo} | {self.cap:g} | {self.cap if self.bad_cap is None else self.bad_cap:g} |"


SIDES = (
    Bounds("rloo", 1.0),
    Bounds("rloo", 2.0),
    Bounds("rloo", 5.0),
    Bounds("rloo", 1.0, bad_cap=5.0),
    Bounds("cispo", 1.28),
    Bounds("cispo", 5.0),
)
_LIMIT_S = 1_800.0


@dataclass(frozen=True)
class CappedRun:
    """Numbers of a run that has ended; `accuracies` are held out, by step, `lag` the mean of trained trajectories."""

    task: str
    bounds: Bounds
    seed: int
    machine: str
    accuracies: dict[int, float]
    lag: float
    seconds: float

    @property
    def key(self) -> tuple[str, Bounds, int]:
        """Equal for a run and its repetition."""
        return self.task, self.bounds, self.seed

    @property
    def after(self) -> float:
        """Accuracy at the end."""
        return self.accuracies[max(self.accuracies)]

    @property
    def over_the_run(self) -> float:
        """Mean accuracy of all evaluations but that of the start."""
        return statistics.fmean(share for step, share in self.accuracies.items() if step)


def main() -> None:
    """Makes the runs, and rewrites the results after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each side; default: %(default)s")
    parser.add_argument("--only", nargs="+", choices=list(STEPS), default=list(STEPS), help="these tasks alone")
    parser.add_argument("--resume", action="store_true", help="without the runs that the results have")
    parser.add_argument("--report", action="store_true", help="only rewrite the tables")
    given = parser.parse_args()
    store = RESULTS / "ratio_caps.json"
    known = json.loads(store.read_text(encoding="utf-8")) if store.exists() else []
    runs = {run.key: run for run in map(_read, known)}
    for task in () if given.report else given.only:
        warm_up(task)
        config = Path("examples", task, "run.toml")
        left = [
            (bounds, seed)
            for seed in range(given.seeds)
            for bounds in SIDES
            if not (given.resume and (task, bounds, seed) in runs)
        ]
        with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
            system = stack.enter_context(warm_system(config, folder=Path(place), options=room_for(IN_FLIGHT)))
            for number, (bounds, seed) in enumerate(left):
                ended = system.learn(f"run-{number}", options=options_of(task, bounds, seed=seed), limit_s=_LIMIT_S)
                run = _run_of(task, bounds, seed, files_of(ended.folder))
                runs[run.key] = run
                store.write_text(json.dumps([asdict(each) for each in runs.values()], indent=1) + "\n")
                print(f"{task} {bounds.told} seed {seed}: {run.accuracies[0]:.3f} to {run.after:.3f}", flush=True)
    (RESULTS / "ratio_caps.md").write_text(table(list(runs.values())), encoding="utf-8")


def _read(known: Mapping[str, Any]) -> CappedRun:
    return CappedRun(**{**with_steps(known, "accuracies"), "bounds": Bounds(**known["bounds"])})


def options_of(task: str, bounds: Bounds, *, seed: int) -> Options:
    """The learner's options of a side."""
    steps = STEPS[task]
    return {
        **bounds.options,
        "steps": steps,
        "seed": seed,
        "rollouts.seed": seed,
        "max-lag": MAX_LAG,
        "lag.pacing": "full",
        "guard.enabled": "false",
        "evaluation.tasks": EVALUATION,
        "evaluation.every-steps": steps // 3,
        "evaluation.final-tasks": EVALUATION,
    }


def _run_of(task: str, bounds: Bounds, seed: int, found: RunFiles) -> CappedRun:
    lags = {int(lag): count for lag, count in found.summary["lag_histogram"].items()}
    return CappedRun(
        task=task,
        bounds=bounds,
        seed=seed,
        machine=described_machine(),
        accuracies=found.accuracies,
        lag=sum(lag * count for lag, count in lags.items()) / sum(lags.values()),
        seconds=found.of_kind("step")[-1]["time_s"],
    )


def table(runs: Sequence[CappedRun]) -> str:
    """The results as Markdown."""
    lines = [
        "# How far a ratio to the behavior policy may weigh",
        "",
        "`python -m benchmarks.ratio_caps`, which says what is compared. Accuracy of "
        f"{EVALUATION} held-out tasks, sampled at",
        "temperature 1: the mean over the run's three evaluations, and the last of them; each the mean of the seeds, "
        "lowest and highest.",
        "",
        "| task | algorithm | bound of good tokens | of bad ones | over the run | at the end | mean lag | seeds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for task in STEPS:
        for bounds in SIDES:
            some = [run for run in runs if run.task == task and run.bounds == bounds]
            if some:
                lines.append(_row(some))
    return "\n".join([*lines, "", *machines_of(run.machine for run in runs), ""])


def _row(runs: Sequence[CappedRun]) -> str:
    first = runs[0]
    over, after = ([getattr(run, name) for run in runs] for name in ("over_the_run", "after"))
    lag = statistics.fmean(run.lag for run in runs)
    return f"| {first.task} {first.bounds.told} {_spread(over)} | {_spread(after)} | {lag:.1f} | {len(runs)} |"


def _spread(values: Sequence[float]) -> str:
    return f"**{statistics.fmean(values):.3f}** ({min(values):.3f} to {max(values):.3f})"


if __name__ == "__main__":
    main()
