"""The lag that a run should have been given, and the one that it finds by its gradients: time to a fixed accuracy.

    .venv/bin/python -m benchmarks.lag_choice [--seeds 3] [--only TASK ...] [--resume] [--report]

Each task is learned by grpo with a fixed `max_lag` of 0, 1, 2, 4 and 8, and with a bound of 8 under which
`lag.adapt = "gradient"` looks for one; sampling runs as far ahead as each permits (`lag.pacing = "full"`), with room in
the services for nine steps' groups at once, so that tokens do become that old. Generator, reward-service and
env-service stay up for all runs of a task, and the sides take turns. Time is that of training, up to
the first evaluation of the task's target, on two cores that sampler and learner share: there a lag above 1 saves no
time, and what is looked for is whether the choice costs any. Results go to benchmarks/results/lag_choice.{json,md}.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.env_learning import warm_up
from benchmarks.machine import described_machine, machines_of
from benchmarks.warm_system import Options, Service, room_for, warm_system
from benchmarks.whole_runs import RunFiles, files_of, with_steps

RESULTS = Path(__file__).with_name("results")
BOUND = 8
CHOSEN = "by gradients"
_LIMIT_S = 1_800.0
_WITHIN = 1.05


@dataclass(frozen=True)
class LearnedTask:
    """A task, and how far a run goes. `every` is in steps, between two evaluations; `groups` of 8 are those of a step,
    as its run file has them.
    """

    config: Path
    target: float
    steps: int
    every: int
    groups: int

    @property
    def services(self) -> Mapping[Service, Options]:
        """Room for the groups of a step that trains and of as many as BOUND ahead, all decoded at once."""
        return room_for(self.groups * (BOUND + 1))

    def options(self, side: str, seed: int) -> Options:
        """The learner's options of a side."""
        fixed = side != CHOSEN
        return {
            "steps": self.steps,
            "seed": seed,
            "rollouts.seed": seed,
            "max-lag": side if fixed else BOUND,
            "lag.pacing": "full",
            **({} if fixed else {"lag.adapt": "gradient", "lag.measure-every": max(2, self.steps // 12)}),
            "evaluation.tasks": 400,
            "evaluation.every-steps": self.every,
            "evaluation.final-tasks": 400,
        }


TASKS: Mapping[str, LearnedTask] = {
    "addition": LearnedTask(Path("benchmarks/settings/addition.toml"), target=0.55, steps=160, every=10, groups=32),
    "arithmetic": LearnedTask(Path("examples/arithmetic/run.toml"), target=0.7, steps=60, every=5, groups=16),
    "maze": LearnedTask(Path("examples/maze/run.toml"), target=0.3, steps=60, every=5, groups=16),
}
SIDES = ("0", "1", "2", "4", str(BOUND), CHOSEN)


@dataclass(frozen=True)
class TimedRun:
    """Numbers of a run that has ended. `accuracies` are held out, by step; `seconds` of training up to each of these;
    `lags` of the trained trajectories by their oldest token, and how many; `moves` of the bound, by step.
    """

    task: str
    side: str
    seed: int
    machine: str
    accuracies: dict[int, float]
    seconds: dict[int, float]
    lags: dict[int, int]
    moves: dict[int, int]

    @property
    def reached(self) -> float | None:
        """Seconds to the first evaluation of the task's target; None if there was none."""
        target = TASKS[self.task].target
        found = [step for step in sorted(self.accuracies) if self.accuracies[step] >= target]
        return self.seconds[found[0]] if found else None

    @property
    def mean_lag(self) -> float:
        """In versions."""
        return sum(lag * count for lag, count in self.lags.items()) / sum(self.lags.values())


def main() -> None:
    """Makes the runs, and rewrites the results after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each side; default: %(default)s")
    parser.add_argument("--only", nargs="+", choices=list(TASKS), default=list(TASKS), help="these tasks alone")
    parser.add_argument("--resume", action="store_true", help="without the runs that the results have")
    parser.add_argument("--report", action="store_true", help="only rewrite the table")
    given = parser.parse_args()
    store = RESULTS / "lag_choice.json"
    runs = {(run.task, run.side, run.seed): run for run in _read(store)}
    for name in () if given.report else given.only:
        task = TASKS[name]
        if task.config.parts[0] == "examples":
            warm_up(name)
        with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
            system = stack.enter_context(warm_system(task.config, folder=Path(place), options=task.services))
            for seed in range(given.seeds):
                for side in SIDES:
                    if given.resume and (name, side, seed) in runs:
                        continue
                    place = f"{side.replace(' ', '_')}-{seed}"
                    ended = system.learn(place, options=task.options(side, seed), limit_s=_LIMIT_S)
                    runs[name, side, seed] = run = _run_of(name, side, seed, files_of(ended.folder))
                    store.write_text(json.dumps([asdict(each) for each in runs.values()], indent=1) + "\n")
                    print(f"{name}, {side}, seed {seed}: {_seconds(run.reached)}", flush=True)
    (RESULTS / "lag_choice.md").write_text(table(list(runs.values())), encoding="utf-8")


def _read(store: Path) -> list[TimedRun]:
    known = json.loads(store.read_text(encoding="utf-8")) if store.exists() else []
    return [TimedRun(**with_steps(each, "accuracies", "seconds", "lags", "moves")) for each in known]


def _run_of(task: str, side: str, seed: int, found: RunFiles) -> TimedRun:
    times = {0: 0.0, **{entry["step"]: entry["time_s"] for entry in found.of_kind("step")}}
    return TimedRun(
        task=task,
        side=side,
        seed=seed,
        machine=described_machine(),
        accuracies=found.accuracies,
        seconds={step: times[step] for step in found.accuracies},
        lags={int(lag): count for lag, count in found.summary["lag_histogram"].items()},
        moves=moves_of(found),
    )


def moves_of(found: RunFiles) -> dict[int, int]:
    """The bound on the lag after each step at which it was moved."""
    return {entry["step"]: entry["after"] for entry in found.of_kind("guard") if entry["after"] != entry["before"]}


def table(runs: Sequence[TimedRun]) -> str:
    """The results as Markdown."""
    tasks = [name for name in TASKS if any(run.task == name for run in runs)]
    return "\n".join(
        [
            "# The lag that a run finds by its gradients, beside fixed ones",
            "",
            "`python -m benchmarks.lag_choice`, which says what is compared. Seconds of training to the target, in the",
            "median of the seeds that reached it.",
            *(line for name in tasks for line in _section(name, [run for run in runs if run.task == name])),
            "",
            *machines_of(run.machine for run in runs),
            "",
        ]
    )


def _section(name: str, runs: Sequence[TimedRun]) -> list[str]:
    medians = {side: median_of([run for run in runs if run.side == side]) for side in SIDES}
    return [
        "", f"## {name}: to {TASKS[name].target:.0%} within {TASKS[name].steps} steps", "",
        "| max_lag | seconds of each seed | median | accuracy at the end | mean lag | bound, from step |",
        "|---|---|---|---|---|---|",
        *(_row(side, [run for run in runs if run.side == side], medians[side]) for side in SIDES),
        "",
        verdict(medians),
    ]  # fmt: skip


def median_of(runs: Sequence[TimedRun]) -> float | None:
    """Of the seconds to the target; None unless most runs reached it."""
    reached = [run.reached for run in runs if run.reached is not None]
    return statistics.median(reached) if reached and 2 * len(reached) > len(runs) else None


def verdict(medians: Mapping[str, float | None]) -> str:
    """Says how the choice by gradients compares with the best fixed lag."""
    fixed = {side: value for side, value in medians.items() if side != CHOSEN and value is not None}
    chosen = medians.get(CHOSEN)
    if not fixed or chosen is None:
        return "Not compared: too few runs reached the target."
    best = min(fixed, key=lambda side: fixed[side])
    ratio = chosen / fixed[best]
    held = "within" if ratio <= _WITHIN else "**not** within"
    return f"By gradients: {ratio:.2f} of the time of the best fixed lag, {best}; {held} 5 % of it."


def _row(side: str, runs: Sequence[TimedRun], median: float | None) -> str:
    if not runs:
        return f"| {side} | | | | | |"
    times = ", ".join(_seconds(run.reached) for run in runs)
    ends = ", ".join(f"{run.accuracies[max(run.accuracies)]:.3f}" for run in runs)
    lags = ", ".join(f"{run.mean_lag:.1f}" for run in runs)
    moves = "; ".join(", ".join(f"{lag} from {step}" for step, lag in run.moves.items()) for run in runs if run.moves)
    return f"| {side} | {times} | {_seconds(median)} | {ends} | {lags} | {moves} |"


def _seconds(value: float | None) -> str:
    return "not reached" if value is None else f"{value:.0f}"


if __name__ == "__main__":
    main()
