"""Learning in environments of several turns: held-out success by steps and seconds, from a warm start.

    .venv/bin/python -m benchmarks.env_learning [--only NAME ...] [--report]

Every run is `headway up` on an example's file: a tiny Llama that an erring scripted player warmed up, the real vLLM,
two cores. The maze is a game with a state, played by grpo and by gigpo with three seeds each; arithmetic is a tool that
answers; Nim is a game of two that the policy plays with itself, and its success is that against its frozen beginning,
which a generator of its own serves. Results go to benchmarks/results/env_learning.{json,md,png}; runs that were
measured before stay in them until they are made again.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.whole_runs import RunFiles, run_headway, with_steps
from learner.evaluation.results import wilson_interval
from services.process import parent_death_signal

RESULTS = Path(__file__).with_name("results")
TIMES = 2.0
"""Factor by which a run is meant to succeed more often than the warm start, or to fail less often if that asks less."""
WITHIN_S = 600.0
SCRIPTED = {"arithmetic": ("--noise", "0.3", "--count", "8000")}
"""Options of the scripted player, for examples that do not take the maze's."""
OPPONENT_URL = "http://127.0.0.1:7410"
OPPONENT_STARTS_S = 1200.0


@dataclass(frozen=True)
class ExampleRun:
    """A run of an example. `extra` are options besides."""

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
    *(ExampleRun("maze", algo, seed) for seed in range(3) for algo in ("grpo", "gigpo")),
    *(ExampleRun("arithmetic", "grpo", seed) for seed in range(3)),
    *(ExampleRun("nim", "grpo", seed, steps=40) for seed in range(3)),
)


@dataclass(frozen=True)
class EnvResult:
    """Numbers of a finished run. `successes` are held-out shares by step, `seconds` the times of those steps."""

    name: str
    example: str
    algo: str
    seed: int
    successes: dict[int, float]
    seconds: dict[int, float]
    lag_mean: float
    tasks: int = 400
    """Before the first step and after the last one."""

    @property
    def before(self) -> float:
        """Of the warm start."""
        return self.successes[min(self.successes)]

    @property
    def after(self) -> float:
        """Of the last step."""
        return self.successes[max(self.successes)]

    @property
    def better_after_s(self) -> float | None:
        """Seconds of training to the first evaluation of twice the success or half the failures; None if there was
        none.
        """
        target = min(TIMES * self.before, 1 - (1 - self.before) / TIMES)
        reached = [step for step in sorted(self.successes) if step and self.successes[step] >= target]
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
            warm_up(run.example)
            with tempfile.TemporaryDirectory() as folder, opponent(run.example):
                config = Path("examples") / run.example / "run.toml"
                results[run.name] = result_of(run, run_headway(config, folder=Path(folder), options=run.options))
            print(_row(results[run.name]), flush=True)
            store.write_text(json.dumps([asdict(each) for each in results.values()], indent=1) + "\n", encoding="utf-8")
        _report(_ordered(results))
    return int(any((each.better_after_s or WITHIN_S + 1) > WITHIN_S for each in results.values()))


def _ordered(results: Mapping[str, EnvResult]) -> list[EnvResult]:
    return [results[run.name] for run in RUNS if run.name in results]


def _read(store: Path) -> dict[str, EnvResult]:
    known = json.loads(store.read_text(encoding="utf-8")) if store.exists() else []
    return {item["name"]: EnvResult(**with_steps(item, "successes", "seconds")) for item in known}


def warm_up(example: str) -> None:
    """Makes the model that runs of an example start from, if it is not there."""
    model = Path("models") / example
    if (model / ".complete").exists():
        return
    quiet = {**os.environ, "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "DS_ACCELERATOR": "cpu"}
    make = [sys.executable, "-m", *_maker(example), f"{model}-init"]
    subprocess.run(make, check=True, env=quiet)
    learner = str(Path(sys.executable).with_name("learner"))
    subprocess.run([learner, "--config", f"examples/{example}/sft.toml"], check=True, env=quiet)
    (model / ".complete").touch()


def _maker(example: str) -> list[str]:
    """The example's own, or that of all environments that can play themselves."""
    own = Path("examples") / example / "make_model.py"
    if own.exists() and example != "maze":
        return [f"examples.{example}.make_model"]
    return ["examples.maze.make_model", *SCRIPTED.get(example, ()), f"examples/{example}/run.toml"]


@contextlib.contextmanager
def opponent(example: str) -> Iterator[None]:
    """Serves the frozen opponent of an example that has one, if it does not serve already. Raises SystemExit if it
    does not come up.
    """
    config = Path("examples") / example / "opponent.toml"
    if not config.exists() or _answers(f"{OPPONENT_URL}/readyz"):
        yield
        return
    generator = str(Path(sys.executable).with_name("generator"))
    with subprocess.Popen(
        [generator, "--config", str(config)], stdout=subprocess.DEVNULL, preexec_fn=parent_death_signal
    ) as process:
        try:
            end = time.monotonic() + OPPONENT_STARTS_S
            while not _answers(f"{OPPONENT_URL}/readyz"):
                if process.poll() is not None or time.monotonic() > end:
                    raise SystemExit(f"the opponent of {config} does not serve at {OPPONENT_URL}")
                time.sleep(1.0)
            yield
        finally:
            process.terminate()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def result_of(run: ExampleRun, outcome: RunFiles) -> EnvResult:
    """From what the run left."""
    steps = {entry["step"]: entry for entry in outcome.of_kind("step")}
    successes = {entry["version"]: entry["accuracy"] for entry in outcome.of_kind("evaluation")}
    lags = {int(lag): count for lag, count in outcome.summary["lag_histogram"].items()}
    return EnvResult(
        name=run.name,
        example=run.example,
        algo=run.algo,
        seed=run.seed,
        successes=successes,
        seconds={version: steps[version]["time_s"] if version else 0.0 for version in successes},
        lag_mean=sum(lag * count for lag, count in lags.items()) / sum(lags.values()),
        tasks=max(entry["tasks"] for entry in outcome.of_kind("evaluation")),
    )


def _row(each: EnvResult) -> str:
    better = "not reached" if each.better_after_s is None else f"{each.better_after_s:.0f}"
    before, after = (_with_interval(share, each.tasks) for share in (each.before, each.after))
    return (
        f"| {each.example} | {each.algo} | {each.seed} | {before} | **{after}** "
        f"| {max(each.successes)} | {each.seconds[max(each.seconds)]:.0f} | {better} | {each.lag_mean:.1f} |"
    )


def _with_interval(share: float, count: int) -> str:
    low, high = wilson_interval(share=share, count=count)
    return f"{share:.3f} ({low:.3f} to {high:.3f})"


def _report(results: Sequence[EnvResult]) -> None:
    lines = [
        "# Environments of several turns, learned from a warm start",
        "",
        "`python -m benchmarks.env_learning`: held-out success of tiny Llamas of 0.6M parameters that an erring player",
        "warmed up, on two CPU cores with the real vLLM; 200 unseen tasks during a run and 400 at its ends, sampled at",
        "temperature 1, with 95 % intervals. Seconds are of training, with its evaluations; other work ran on the",
        "machine meanwhile. Better: twice the success, or half the failures if that is less. Nim is trained by",
        "self-play; its success is the share of games won against the model as it was before training, who plays first",
        "in every second game.",
        "",
        "| environment | algorithm | seed | before | after | steps | seconds | better after, s | mean lag |",
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


def _means(results: Sequence[EnvResult]) -> list[str]:
    lines = []
    for example, algo in dict.fromkeys((each.example, each.algo) for each in results):
        ours = [each.after for each in results if (each.example, each.algo) == (example, algo)]
        spread = f", {min(ours):.3f} to {max(ours):.3f}" if len(ours) > 1 else ""
        lines.append(f"- {example} by {algo}: {statistics.fmean(ours):.3f} in the mean of {len(ours)} seeds{spread}")
    return lines


def _draw(results: Sequence[EnvResult]) -> None:
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
