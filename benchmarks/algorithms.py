"""Every streamed algorithm on the addition demo, and what stale tokens cost with and without their correction.

    .venv/bin/python -m benchmarks.algorithms [--staleness] [--only NAME ...] [--steps N] [--resume]

One generator, reward-service and env-service stay up for all runs; each run is a learner of its own that starts from
the same model. Without --staleness: every preset at max_lag 4; grpo, dapo, rloo and ppo at max_lag 0 and with two more
seeds as well. With it: four updates a step at max_lag 8, with the default correction and without one, and synchronous
training, five seeds each; then every other correction and the losses that bring their own. NAME is that of a run, or of
all runs of an algorithm or variant; --list shows them. Each of these at an exact lag, with more seeds:
`benchmarks.exact_lag`.

Each run appends one line to benchmarks/results/algorithms.jsonl, a failed one too, and algorithms.md beside it is made
of the newest line of each run. --resume leaves out runs that have a line with the same steps and settings. opd learns
from the model that the first run of grpo left in --folder; if there is none, that run is made.
"""

import argparse
import json
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.algorithm_runs import PRESETS, STALENESS, AlgorithmRun, teacher_run
from benchmarks.algorithm_table import Row, another_start, read_rows, report
from benchmarks.warm_system import FinishedRun, LearnerFailed, Options, Service, WarmSystem, warm_system

RESULTS = Path(__file__).with_name("results") / "algorithms.jsonl"
STALE_SERVICES: dict[Service, Options] = {
    "generator": {"engine.max-num-seqs": 2048},
    "env-service": {"capacity": 288, "concurrency.adaptive": "false"},
}
"""Nine steps' groups in flight, nearly all decoded at once: without that, tokens do not become eight versions old.
What is outstanding does not follow the generator's queue, which would keep tokens fresh.
"""


def main() -> None:
    """Runs what was chosen, one after the other, and rewrites the report after each."""
    arguments = _arguments()
    runs = _chosen(STALENESS if arguments.staleness else PRESETS, arguments.only, steps=arguments.steps)
    if arguments.resume:
        done = {(row.name, row.steps, row.settings) for row in read_rows(arguments.results)}
        runs = [run for run in runs if (run.name, run.steps, run.settings) not in done]
    if arguments.list:
        print("\n".join(f"{run.name}: {run.steps} steps, {run.settings}" for run in runs))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the services end as well
    services = STALE_SERVICES if arguments.staleness else {}
    with warm_system(arguments.config, folder=arguments.folder, options=services) as system:
        for number, run in enumerate(runs, start=1):
            if run.has_teacher:
                _see_to_teacher(run, system=system, arguments=arguments)
            row = _measured(run, system=system, limit_s=arguments.limit_s)
            _keep(row, results=arguments.results)
            print(f"{number}/{len(runs)} {row.told}", flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path(__file__).with_name("settings") / "addition.toml")
    parser.add_argument("--folder", type=Path, default=Path("runs/algorithms"), help="logs and runs; %(default)s")
    parser.add_argument("--results", type=Path, default=RESULTS, help="lines; the report is beside them; %(default)s")
    parser.add_argument("--staleness", action="store_true", help="the second table's runs instead of the first's")
    parser.add_argument("--only", nargs="+", metavar="NAME", default=[], help="these alone")
    parser.add_argument("--steps", type=int, help="steps of each run; as many as fit into three minutes, if left out")
    parser.add_argument("--resume", action="store_true", help="leave out runs that have a result")
    parser.add_argument("--list", action="store_true", help="show the runs with their settings, and end")
    parser.add_argument("--limit-s", type=float, default=1200.0, help="a run that takes longer has failed; %(default)s")
    return parser.parse_args()


def _chosen(runs: Sequence[AlgorithmRun], only: Sequence[str], *, steps: int | None) -> list[AlgorithmRun]:
    known = {name for run in runs for name in (run.name, run.variant)}
    if unknown := sorted(set(only) - known):
        raise SystemExit(f"no run is named {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    chosen = [run for run in runs if not only or run.name in only or run.variant in only]
    return [run if steps is None else run.of_steps(steps) for run in chosen]


def _measured(run: AlgorithmRun, *, system: WarmSystem, limit_s: float) -> Row:
    """Runs it; a failure becomes a row that says so."""
    began = time.time()
    try:
        finished = _learned(run, system=system, limit_s=limit_s)
    except LearnerFailed as error:
        return Row.of(run, began=began, failure=str(error))
    return Row.of(run, began=began, finished=finished)


def _see_to_teacher(run: AlgorithmRun, *, system: WarmSystem, arguments: argparse.Namespace) -> None:
    """Trains the model that teaches in `run`, if no earlier run has left it."""
    teacher = teacher_run(run.steps)
    if not _model_of(teacher, system).exists():
        _keep(_measured(teacher, system=system, limit_s=arguments.limit_s), results=arguments.results)


def _learned(run: AlgorithmRun, *, system: WarmSystem, limit_s: float) -> FinishedRun:
    options = run.options
    if run.has_teacher:
        teacher = teacher_run(run.steps)
        options["teachers"] = json.dumps([{"name": teacher.name, "path": str(_model_of(teacher, system))}])
    return system.learn(run.name, options=options, limit_s=limit_s)


def _model_of(run: AlgorithmRun, system: WarmSystem) -> Path:
    return system.folder / run.name / "model"


def _keep(row: Row, *, results: Path) -> None:
    """Raises SystemExit for a run that began with another model than those which are there."""
    results.parent.mkdir(parents=True, exist_ok=True)
    if fault := another_start(row, read_rows(results)):
        raise SystemExit(fault)
    with results.open("a", encoding="utf-8") as file:
        file.write(row.model_dump_json() + "\n")
    results.with_suffix(".md").write_text(report(read_rows(results)), encoding="utf-8")


if __name__ == "__main__":
    main()
