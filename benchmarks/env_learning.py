"""Whether environments of several turns are learned: held-out success by steps and seconds, from a warm start.

    .venv/bin/python -m benchmarks.env_learning [--only NAME ...] [--report]

Every run is `headway up` on an example's file: a tiny Llama that an erring scripted player warmed up, the real vLLM,
two cores. The maze is a game with a state, played by grpo and by gigpo with three seeds each; arithmetic is a tool that
answers. Results go to benchmarks/results/env_learning.{json,md,png}; runs that were measured before stay in them until
they are made again.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.whole_runs import Outcome, run_headway

RESULTS = Path(__file__).with_name("results")
TIMES = 2.0
"""How much better than the warm start a run is meant to become."""
WITHIN_S = 600.0


@dataclass(frozen=True)
class Run:
    """One run of an example. `extra` are options besides."""

    example: str
    algo: str
    seed: int = 0
    steps: int = 60
    extra: Mapping[str, object] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Of its row."""
        return f"{self.example}-{self.algo}-seed{self.seed}"

    @property
    def options(self) -> dict[str, object]:
        """The command line of `headway up`."""
        return {
            "learner.algo": self.algo,
            "learner.seed": self.seed,
            "learner.rollouts.seed": self.seed,
            "learner.steps": self.steps,
            "learner.evaluation.every-steps": max(1, self.steps // 6),
            "learner.evaluation.tasks": 200,
            "learner.evaluation.final-tasks": 400,
            **self.extra,
        }


RUNS = (
    *(Run("maze", algo, seed) for seed in range(3) for algo in ("grpo", "gigpo")),
    *(Run("arithmetic", "grpo", seed) for seed in range(3)),
)


@dataclass(frozen=True)
class Result:
    """What a run came to. `successes` are held-out shares by step, `seconds` when those steps had been trained."""

    name: str
    example: str
    algo: str
    seed: int
    successes: dict[int, float]
    seconds: dict[int, float]
    lag_mean: float

    @property
    def before(self) -> float:
        """Of the warm start."""
        return self.successes[min(self.successes)]

    @property
    def after(self) -> float:
        """Of the last step."""
        return self.successes[max(self.successes)]

    @property
    def twice_after_s(self) -> float | None:
        """Seconds of training to the first evaluation of twice the success; None if there was none."""
        reached = [step for step in sorted(self.successes) if step and self.successes[step] >= TIMES * self.before]
        return self.seconds[reached[0]] if reached else None


def main() -> int:
    """Makes the runs, one after the other, and rewrites the table after each. 1 if one missed its target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[run.name for run in RUNS], help="names, or how they begin")
    parser.add_argument("--report", action="store_true", help="only rewrite the table and the curves")
    arguments = parser.parse_args()
    store = RESULTS / "env_learning.json"
    results = _read(store)
    for run in RUNS:
        if not arguments.report and any(run.name.startswith(name) for name in arguments.only):
            _warm_up(run.example)
            with tempfile.TemporaryDirectory() as folder:
                config = Path("examples") / run.example / "run.toml"
                results[run.name] = result_of(run, run_headway(config, folder=Path(folder), options=run.options))
            print(_row(results[run.name]), flush=True)
            store.write_text(json.dumps([asdict(each) for each in results.values()], indent=1) + "\n", encoding="utf-8")
        _report(_ordered(results))
    return int(any((each.twice_after_s or WITHIN_S + 1) > WITHIN_S for each in results.values()))


def _ordered(results: Mapping[str, Result]) -> list[Result]:
    return [results[run.name] for run in RUNS if run.name in results]


def _read(store: Path) -> dict[str, Result]:
    known = json.loads(store.read_text(encoding="utf-8")) if store.exists() else []
    return {item["name"]: Result(**{**item, **_numbered(item)}) for item in known}


def _numbered(item: Mapping[str, Any]) -> dict[str, dict[int, float]]:
    return {key: {int(step): value for step, value in item[key].items()} for key in ("successes", "seconds")}


def _warm_up(example: str) -> None:
    """Makes the model that the runs start from, if it is not there."""
    model = Path("models") / example
    if (model / ".complete").exists():
        return
    quiet = {**os.environ, "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "DS_ACCELERATOR": "cpu"}
    make = [sys.executable, "-m", "examples.maze.make_model", f"examples/{example}/run.toml", f"{model}-init"]
    subprocess.run(make, check=True, env=quiet)
    learner = str(Path(sys.executable).with_name("learner"))
    subprocess.run([learner, "--config", f"examples/{example}/sft.toml"], check=True, env=quiet)
    (model / ".complete").touch()


def result_of(run: Run, outcome: Outcome) -> Result:
    """From what the run left."""
    steps = {entry["step"]: entry for entry in outcome.of_kind("step")}
    successes = {entry["version"]: entry["accuracy"] for entry in outcome.of_kind("evaluation")}
    lags = {int(lag): count for lag, count in outcome.summary["lag_histogram"].items()}
    return Result(
        name=run.name,
        example=run.example,
        algo=run.algo,
        seed=run.seed,
        successes=successes,
        seconds={version: steps[version]["time_s"] if version else 0.0 for version in successes},
        lag_mean=sum(lag * count for lag, count in lags.items()) / sum(lags.values()),
    )


def _row(each: Result) -> str:
    twice = "not reached" if each.twice_after_s is None else f"{each.twice_after_s:.0f}"
    return (
        f"| {each.example} | {each.algo} | {each.seed} | {each.before:.3f} | **{each.after:.3f}** "
        f"| {max(each.successes)} | {each.seconds[max(each.seconds)]:.0f} | {twice} | {each.lag_mean:.1f} |"
    )


def _report(results: Sequence[Result]) -> None:
    lines = [
        "# Environments of several turns, learned from a warm start",
        "",
        "`python -m benchmarks.env_learning`: held-out success of tiny Llamas of 0.6M parameters that an erring player",
        "warmed up, on two CPU cores with the real vLLM; 200 unseen tasks during a run and 400 at its ends, sampled at",
        "temperature 1. Seconds are of training, with its evaluations; other work ran on the machine meanwhile.",
        "",
        "| environment | algorithm | seed | before | after | steps | seconds | twice as good after, s | mean lag |",
        "|---|---|---|---|---|---|---|---|---|",
        *(_row(each) for each in results),
        "",
        *_means(results),
        "",
        "![held-out success by training step](env_learning.png)",
        "",
    ]
    (RESULTS / "env_learning.md").write_text("\n".join(lines), encoding="utf-8")
    _draw(results)


def _means(results: Sequence[Result]) -> list[str]:
    lines = []
    for example, algo in dict.fromkeys((each.example, each.algo) for each in results):
        ours = [each.after for each in results if (each.example, each.algo) == (example, algo)]
        spread = f", {min(ours):.3f} to {max(ours):.3f}" if len(ours) > 1 else ""
        lines.append(f"- {example} by {algo}: {statistics.fmean(ours):.3f} in the mean of {len(ours)} seeds{spread}")
    return lines


def _draw(results: Sequence[Result]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    examples = list(dict.fromkeys(each.example for each in results))
    colours = {algo: f"C{index}" for index, algo in enumerate(dict.fromkeys(each.algo for each in results))}
    figure, axes = pyplot.subplots(1, max(1, len(examples)), figsize=(5 * max(1, len(examples)), 4), squeeze=False)
    for axis, example in zip(axes[0], examples, strict=False):
        named: set[str] = set()
        for each in (each for each in results if each.example == example):
            steps = sorted(each.successes)
            label = None if each.algo in named else each.algo
            named.add(each.algo)
            successes = [each.successes[step] for step in steps]
            axis.plot(steps, successes, color=colours[each.algo], marker=".", label=label)
        axis.set(title=example, xlabel="training step", ylabel="held-out success", ylim=(0, 1))
        axis.legend()
    figure.tight_layout()
    figure.savefig(RESULTS / "env_learning.png", dpi=100)
    pyplot.close(figure)


if __name__ == "__main__":
    raise SystemExit(main())
