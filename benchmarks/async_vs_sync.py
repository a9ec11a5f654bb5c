"""Asynchronous against synchronous training: the same code, model and task, with `max_lag` 4 and 0, in alternation.

    .venv/bin/python -m benchmarks.async_vs_sync [--config RUN.toml | --subject NAME] [--steps N] [--rounds N]

Synchronous training waits for sampling and sampling for training, so each phase may have both cores: it is run with one
and with two threads a phase, and the faster of the two is the baseline. From its phase times follows what overlapping
the phases can give at best, (Tgen + Ttrain) / max(Tgen, Ttrain). A subject is one of `benchmarks.against_trl`. Results
go to benchmarks/results/.
"""

import argparse
import json
import statistics
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.against_trl import SUBJECTS
from benchmarks.machine import described_machine
from benchmarks.whole_runs import run_headway

RESULTS = Path(__file__).with_name("results")
SKIPPED_STEPS = 5
"""The first steps warm caches up, and, when asynchronous, fill the pipeline: they are left out of phase times."""


@dataclass(frozen=True)
class Variant:
    """A way of training: a bound on the lag, and threads for the learner."""

    name: str
    max_lag: int
    threads: int


VARIANTS = (
    Variant(name="async, 1 thread a phase", max_lag=4, threads=1),
    Variant(name="sync, 1 thread a phase", max_lag=0, threads=1),
    Variant(name="sync, 2 threads a phase", max_lag=0, threads=2),
)


@dataclass(frozen=True)
class RunNumbers:
    """Measurements of a run. Phase times are medians in seconds; `wait_s` is Tgen when the run is synchronous."""

    variant: str
    completions_per_s: float
    train_s: float
    wait_s: float
    accuracy_before: float | None
    accuracy_after: float | None
    max_lag_seen: int
    generator_idle_share: float


def main() -> None:
    """Runs all variants `rounds` times in alternation, prints and writes the comparison."""
    arguments = _arguments()
    runs: list[RunNumbers] = []
    with tempfile.TemporaryDirectory() as folder:
        config = SUBJECTS[arguments.subject].config(Path(folder)) if arguments.subject else arguments.config
        for number in range(arguments.rounds):
            for variant in VARIANTS if number % 2 == 0 else reversed(VARIANTS):
                runs.append(_run(variant, config=config, steps=arguments.steps))
                print(f"round {number + 1}: {runs[-1]}", flush=True)
    what = arguments.subject or arguments.config
    report = _report(runs, title=f"{what}, {arguments.steps} steps, {arguments.rounds} rounds")
    print(report)
    RESULTS.mkdir(exist_ok=True)
    name = f"async_vs_sync.{arguments.subject or arguments.config.parent.name}"
    (RESULTS / f"{name}.md").write_text(report, encoding="utf-8")
    (RESULTS / f"{name}.json").write_text(json.dumps([asdict(run) for run in runs], indent=1) + "\n", encoding="utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--config", type=Path, default=Path("examples/addition/run.toml"))
    what.add_argument("--subject", choices=sorted(SUBJECTS))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


def _run(variant: Variant, *, config: Path, steps: int) -> RunNumbers:
    options = {
        "learner.steps": steps,
        "learner.max-lag": variant.max_lag,
        "learner.threads": variant.threads,
        "learner.evaluation.tasks": 0,
        "generator.engine.threads": variant.threads,
    }
    with tempfile.TemporaryDirectory() as folder:
        outcome = run_headway(config, folder=Path(folder), options=options)
    summary = outcome.summary
    counted = outcome.of_kind("step")[SKIPPED_STEPS:]
    return RunNumbers(
        variant=variant.name,
        completions_per_s=summary["completions_per_s"],
        train_s=statistics.median(step["train_s"] + step["copy_s"] for step in counted),
        wait_s=statistics.median(step["wait_s"] for step in counted),
        accuracy_before=summary["accuracy_before"],
        accuracy_after=summary["accuracy_after"],
        max_lag_seen=summary["max_lag_seen"],
        generator_idle_share=summary["generator_idle_share"],
    )


def _report(runs: list[RunNumbers], *, title: str) -> str:
    by_name = {variant.name: [run for run in runs if run.variant == variant.name] for variant in VARIANTS}
    speeds = {name: statistics.median(run.completions_per_s for run in some) for name, some in by_name.items()}
    asynchronous, *synchronous = speeds
    baseline = max(synchronous, key=lambda name: speeds[name])
    one_thread = by_name[synchronous[0]]
    generate_s = statistics.median(run.wait_s for run in one_thread)
    train_s = statistics.median(run.train_s for run in one_thread)
    ideal = (generate_s + train_s) / max(generate_s, train_s)
    ratio = speeds[asynchronous] / speeds[synchronous[0]]
    lines = [
        "# Asynchronous against synchronous",
        "",
        f"`benchmarks/async_vs_sync.py`: {title}. Medians over the rounds; lowest and highest in brackets.",
        f"{described_machine()}.",
        "",
        "| variant | completions/s | train, s | wait, s | accuracy before → after | max lag | generator idle |",
        "|---|---|---|---|---|---|---|",
        *(_row(name, some) for name, some in by_name.items()),
        "",
        f"- Asynchronous over the faster synchronous one ({baseline}): "
        f"**{speeds[asynchronous] / speeds[baseline]:.2f} times** the completions/s.",
        f"- Asynchronous over synchronous at one thread a phase: {ratio:.2f}; from that synchronous run's phase times "
        f"(Tgen {generate_s:.3f} s, Ttrain {train_s:.3f} s) the ideal is {ideal:.2f}: "
        f"**{ratio / ideal:.0%}** of it is reached.",
        "",
    ]
    return "\n".join(lines)


def _row(name: str, runs: list[RunNumbers]) -> str:
    cells = [
        name,
        _spread([run.completions_per_s for run in runs], "{:.3g}"),
        _spread([run.train_s for run in runs], "{:.3f}"),
        _spread([run.wait_s for run in runs], "{:.3f}"),
        f"{_accuracy([run.accuracy_before for run in runs])} → {_accuracy([run.accuracy_after for run in runs])}",
        str(max(run.max_lag_seen for run in runs)),
        _spread([run.generator_idle_share for run in runs], "{:.0%}"),
    ]
    return f"| {' | '.join(cells)} |"


def _accuracy(values: list[float | None]) -> str:
    found = [value for value in values if value is not None]
    return _spread(found, "{:.3f}") if found else "not measured"


def _spread(values: list[float], form: str) -> str:
    middle, low, high = statistics.median(values), min(values), max(values)
    return f"{form.format(middle)} ({form.format(low)}–{form.format(high)})"


if __name__ == "__main__":
    main()
