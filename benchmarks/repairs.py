"""Repairs on computers of their own, learned by RL: the run of `make demo-swe`, from several seeds.

    .venv/bin/python -m benchmarks.repairs [--seeds 1] [--report | --of FOLDER]

Each seed is a whole run of `examples/swe/run.toml`, in which only `run.seed` differs, from the model that `make
demo-swe` warmed up (which is made if it is not there). Results go to benchmarks/results/repairs.{json,md,png}; runs
that were measured before stay in them until they are made again. `--of` takes a run that is there, of seed 0, also one
that was stopped early.
"""

import argparse
import json
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.machine import described_machine
from benchmarks.whole_runs import RunFiles, files_of, run_headway, with_steps
from learner.evaluation.results import wilson_interval

CONFIG = Path("examples/swe/run.toml")
RESULTS = Path(__file__).with_name("results")
TIMES = 2.0
"""Factor by which the policy is meant to repair more than the warm start does."""
WITHIN_S = 1200.0


@dataclass(frozen=True)
class RepairRun:
    """Numbers of a run that has ended. `successes` are held-out shares by step, and `counts` of how many tasks; lists
    are by step: seconds since the start, mean reward, turns, and lag. `note` is for readers.
    """

    seed: int
    machine: str
    note: str
    successes: dict[int, float]
    counts: dict[int, int]
    seconds: list[float]
    rewards: list[float]
    turns: list[float]
    lags: list[float]
    trajectories: int

    @property
    def before(self) -> float:
        """Of the warm start."""
        return self.successes[min(self.successes)]

    @property
    def after(self) -> float:
        """Of the last step."""
        return self.successes[max(self.successes)]

    def second_of(self, step: int) -> float:
        """The seconds since the start at the end of a step."""
        return self.seconds[step - 1] if step else 0.0

    @property
    def doubled_after_s(self) -> float | None:
        """Seconds to the first evaluation of twice the success; None if there was none."""
        reached = [step for step, found in sorted(self.successes.items()) if step and found >= TIMES * self.before]
        return self.second_of(reached[0]) if reached else None


def main() -> int:
    """Makes the runs and rewrites the results after each. 1 if one missed its target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1, help="runs; default: %(default)s")
    parser.add_argument("--report", action="store_true", help="only rewrite the table and the curves")
    parser.add_argument("--of", type=Path, help="folder of a run that was made before")
    parser.add_argument("--note", default="", help="what is to be known of that run")
    given = parser.parse_args()
    store = RESULTS / "repairs.json"
    runs = {run.seed: run for run in read_runs(store)}
    if given.of is not None:
        runs[0] = run_of(0, files_of(given.of), note=given.note)
        _write(store, runs)
    elif not given.report:
        subprocess.run(["make", "models/swe/.complete"], check=True)
        for seed in range(given.seeds):
            with tempfile.TemporaryDirectory() as folder:
                found = run_headway(CONFIG, folder=Path(folder), options={"run.seed": seed})
            runs[seed] = run_of(seed, found)
            _write(store, runs)
    ordered = [runs[seed] for seed in sorted(runs)]
    (RESULTS / "repairs.md").write_text(table(ordered), encoding="utf-8")
    _draw(ordered)
    print(table(ordered))
    return int(any((run.doubled_after_s or WITHIN_S + 1) > WITHIN_S for run in ordered))


def _write(store: Path, runs: Mapping[int, RepairRun]) -> None:
    store.write_text(json.dumps([asdict(run) for run in runs.values()]) + "\n", encoding="utf-8")


def read_runs(store: Path) -> list[RepairRun]:
    """The runs that were measured before."""
    known = json.loads(store.read_text(encoding="utf-8")) if store.exists() else []
    return [RepairRun(**with_steps(each, "successes", "counts")) for each in known]


def run_of(seed: int, found: RunFiles, *, note: str = "") -> RepairRun:
    """The numbers of what a run left."""
    steps, evaluations = found.of_kind("step"), found.of_kind("evaluation")
    return RepairRun(
        seed=seed,
        machine=described_machine(),
        note=note,
        successes={entry["version"]: entry["accuracy"] for entry in evaluations},
        counts={entry["version"]: entry["tasks"] for entry in evaluations},
        seconds=[entry["time_s"] for entry in steps],
        rewards=[entry["reward_mean"] for entry in steps],
        turns=[entry["reward_by_component"]["turns"] for entry in steps],
        lags=[entry["lag_mean"] for entry in steps],
        trajectories=sum(entry["trajectories"] for entry in steps),
    )


def table(runs: Sequence[RepairRun]) -> str:
    """The results as Markdown."""
    rows = [
        f"| {run.seed} | {_share(run, 0)} | **{_share(run, max(run.successes))}** | {max(run.successes)} "
        f"| {run.after / run.before if run.before else float('inf'):.1f} | {len(run.seconds)} | {run.trajectories:,} "
        f"| {run.seconds[-1]:.0f} "
        f"| {'not reached' if run.doubled_after_s is None else f'{run.doubled_after_s:.0f}'} "
        f"| {_ends(run.turns)} | {sum(run.lags) / len(run.lags):.1f} |"
        for run in runs
    ]
    machines = [f"- seed {run.seed}: {run.machine}. {run.note}".strip() for run in runs]
    return "\n".join(
        [
            "# Repairs on computers of their own, learned by RL",
            "",
            "`python -m benchmarks.repairs`: whole runs of `examples/swe/run.toml`, as `make demo-swe` makes them.",
            "A Llama of 0.7M parameters, which an agent that errs warmed up, repairs small Python modules by shell",
            "commands. Each conversation has a runtime of bubblewrap of its own, and is judged in another one by",
            "calls that it never saw. Held-out success is sampled at temperature 1, on tasks that neither the",
            "training nor the warm start has seen, with 95 % intervals; seconds are of training, with its",
            "evaluations; other work ran on the machine meanwhile. `step`: that of the last evaluation. Wanted: twice",
            f"the success within {WITHIN_S:.0f} s.",
            "",
            "| seed | before | after | step | times | steps | conversations | seconds | twice after, s | turns | lag |",
            "|---|---|---|---|---|---|---|---|---|---|---|",
            *rows,
            "",
            *machines,
            "",
            "![Held-out success by time, and reward and turns by step](repairs.png)",
            "",
        ]
    )


def _share(run: RepairRun, step: int) -> str:
    low, high = wilson_interval(share=run.successes[step], count=run.counts[step])
    return f"{run.successes[step]:.3f} ({low:.3f} to {high:.3f}; {run.counts[step]} tasks)"


def _ends(values: Sequence[float]) -> str:
    """The mean of the first steps and of the last ones."""
    few = min(5, len(values))
    return f"{sum(values[:few]) / few:.1f} to {sum(values[-few:]) / few:.1f}"


def _draw(runs: Sequence[RepairRun]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(13, 3.6))
    for run in runs:
        steps, label = sorted(run.successes), f"seed {run.seed}"
        points = [run.second_of(step) / 60 for step in steps], [run.successes[step] for step in steps]
        axes[0].plot(*points, marker="o", label=label)
        axes[1].plot(range(1, len(run.rewards) + 1), run.rewards, label=label)
        axes[2].plot(range(1, len(run.turns) + 1), run.turns, label=label)
    axes[0].axvline(WITHIN_S / 60, color="grey", linestyle=":")
    axes[0].set(title="held-out success", xlabel="minutes of training", ylim=(0, 1))
    axes[1].set(title="reward in training", xlabel="step", ylim=(0, 1))
    axes[2].set(title="turns of a conversation", xlabel="step")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(RESULTS / "repairs.png", dpi=100)
    pyplot.close(figure)


if __name__ == "__main__":
    raise SystemExit(main())
