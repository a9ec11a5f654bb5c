"""Accuracy of `headway plan --calibrate` on own runs whose settings differ.

    python -m benchmarks.planner [--runs FOLDER] [--share S] [--only NAME ...] [--output FILE]

Makes a run of the demo and some with another group size, lengths, number of generators, lag and groups in flight
(`benchmarks/planned_runs.py`); calibrates on the first and foretells each, itself included, with nothing else of it
than its settings and the lengths of its completions, and of one with another model or lengths their texts. Runs that
FOLDER holds already are not made again. --share S makes shorter ones, of that share of the steps. The machine should do
nothing else: cores that others use are not simulated.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.machine import described_machine
from benchmarks.planned_runs import BASE, CHANGED, MAX_SEQUENCES, ROOT, PlannedRun, recorded
from benchmarks.result_files import print_and_write
from headway.measured_rates import MeasuredRates, measured_rates, warm
from headway.model_shape import shape_of
from headway.planner import (
    DEVICES,
    DeviceSplit,
    Forecast,
    Plan,
    forecast,
    lags,
    lengths_of,
    rehearsal_of,
    rehearsed,
    splits,
)
from headway.recorded_texts import group_texts
from headway.report import read_run

OUTPUT = Path(__file__).parent / "results" / "planner.md"
RATE, LAG = 0.10, 0.3
"""Accuracy that is promised: share of the throughput, and versions of lag."""
_LEAST_STEPS = 12


@dataclass(frozen=True)
class Compared:
    """Sampled tokens a second and mean lag, as they were and as they were foretold. `others` are the cores that other
    processes of the machine used meanwhile, and `train_s` the computed seconds of a training step, as both were.
    """

    run: PlannedRun
    steps: int
    others: float
    train_s: float
    foretold_train_s: float
    rate: float
    lag: float
    foretold_rate: float
    foretold_lag: float

    @property
    def ratio(self) -> float:
        """Foretold over recorded throughput."""
        return self.foretold_rate / self.rate

    @property
    def rate_holds(self) -> bool:
        """True if the throughput is as near as promised."""
        return abs(self.ratio - 1) <= RATE

    @property
    def lag_holds(self) -> bool:
        """True if the lag is as near as promised."""
        return abs(self.foretold_lag - self.lag) <= LAG


def plan_for(run: PlannedRun, folder: Path, known: MeasuredRates) -> tuple[Plan, DeviceSplit]:
    """The plan of a run by the rates of another one. Of its own `folder` it has the lengths of completions, and of one
    with another model or length the texts: what completions have in common, and which groups have equal rewards.
    """
    plan = Plan(
        shape=shape_of(ROOT / run.model), device=DEVICES["CPU"], devices=1 + run.generators,
        generator_devices=run.generators, lengths=lengths_of(folder), prompt=round(known.prompt or 0),
        groups=run.groups, group_size=run.group_size, steps=run.steps, max_lag=run.max_lag,
        at_once=MAX_SEQUENCES // run.generators, in_flight=run.capacity, reward_s=known.reward_s or 0.0, measured=known,
        texts=None if (run.model, run.max_tokens) == (BASE.model, BASE.max_tokens) else group_texts(folder),
    )  # fmt: skip
    return plan, next(split for split in splits(plan) if split.engine_devices == 1)


def rate_and_lag(steps: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Sampled tokens a second from the end of the first of these steps to that of the last one, and the mean lag."""
    spent_s = steps[-1]["time_s"] - steps[0]["time_s"]
    return sum(step["sampled_tokens"] for step in steps[1:]) / spent_s, statistics.fmean(lags(steps))


def compared(run: PlannedRun, folder: Path, foretold: Forecast) -> Compared:
    """Without the first quarter of both."""
    recorded_run = read_run(folder)
    steps = warm([step for step in recorded_run.steps if step.get("kind") == "step"])
    rate, lag = rate_and_lag(steps)
    loads = [load for load in recorded_run.loads if load.get("machine_cores") is not None]
    others = [load["machine_cores"] - sum(load["cores"].values()) for load in loads]
    return Compared(
        run=run, steps=len(steps), others=max(0.0, statistics.fmean(others)) if others else float("nan"),
        train_s=statistics.fmean(step["cpu_s"] for step in steps), foretold_train_s=foretold.split.train_s,
        rate=rate, lag=lag, foretold_rate=foretold.tokens_per_s, foretold_lag=foretold.lag_mean,
    )  # fmt: skip


def table(found: Sequence[Compared], known: MeasuredRates, command: str) -> str:
    """In Markdown."""
    rows = "\n".join(map(_row, found))
    rates, all_lags = sum(one.rate_holds for one in found), sum(one.lag_holds for one in found)
    return f"""# What the planner foretells, and what was

`{command}`. {described_machine()}.

`headway plan --calibrate` by the run {BASE.name} (the demo: {BASE.groups} groups of {BASE.group_size},
{BASE.capacity} in flight, max_lag {BASE.max_lag}), for itself and for runs with other settings. Promised: throughput
within {RATE:.0%}, mean lag within {LAG}: of {len(found)} runs {rates} and {all_lags}. The first quarter of the steps
is left out. Others used so many cores of the machine beside each run; a step is what the trainer's thread computed, in
ms.

| run | steps | others | tokens/s | foretold | ratio | holds | mean lag | foretold | holds | step | foretold |
|---|---|---|---|---|---|---|---|---|---|---|---|
{rows}

{measured_text(known)}
"""


def _row(one: Compared) -> str:
    cells = (
        f"{one.run.name} ({one.run.what})", one.steps, f"{one.others:.2f}", f"{one.rate:.0f}",
        f"{one.foretold_rate:.0f}", f"{one.ratio:.2f}", "yes" if one.rate_holds else "no", f"{one.lag:.2f}",
        f"{one.foretold_lag:.2f}", "yes" if one.lag_holds else "no", f"{1e3 * one.train_s:.0f}",
        f"{1e3 * one.foretold_train_s:.0f}",
    )  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def measured_text(known: MeasuredRates) -> str:
    """The rates that all were foretold by."""
    if known.machine is None or known.token_s is None or known.sequence_s is None:
        return "The records do not tell what the processes computed: durations were taken in place of computed seconds."
    machine = known.machine
    us = {"before the engine": machine.before_s, "in the engine": machine.engine_s, **machine.others_s}
    parts = ", ".join(f"{name} {1e6 * seconds:.0f}" for name, seconds in us.items())
    begins = f", and {1e3 * known.begin_s:.3f} ms for each that begins" if known.begin_s else ""
    learned, step = known.learned, f"{1e3 * known.step_s:.0f} ms and {1e6 * (known.train_s or 0):.0f} us a token"
    if learned is not None:
        step = (
            f"{1e3 * known.step_s:.0f} ms, {learned.passes:.3g} passes of {1e3 * learned.pass_s:.2f} ms and "
            f"{1e6 * learned.token_s:.0f} us a token, and {1e6 * learned.trajectory_s:.0f} us a trajectory; groups of "
            f"{learned.texts.size} have {learned.texts.tokens:.1f} tokens to compute, {learned.texts.alike:.0%} of "
            f"them equal rewards, and twice as large ones {learned.texts.tokens_doubled:.2f} and "
            f"{learned.texts.alike_doubled:.2f} times that"
        )
    return (
        f"Measured, computed time of {machine.cores:.3g} cores: us of a completion: {parts}; an engine's step "
        f"{1e3 * known.token_s:.2f} ms and {1e3 * known.sequence_s:.3f} ms for each sequence{begins}; a training step "
        f"{step}; a publish "
        f"{1e3 * (known.publish_s or 0):.0f} ms, of which {1e3 * (known.pause_s or 0):.0f} ms paused."
    )


def main() -> None:
    """Exits with 1 if a forecast is further off than promised."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.planner", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--runs", type=Path, help="folder of the runs, which are kept there; a temporary one if left out"
    )
    parser.add_argument("--share", type=float, default=1.0, help="share of the steps of each run that are made")
    parser.add_argument(
        "--only", nargs="*", choices=[run.name for run in CHANGED], help="changed runs; all if left out"
    )
    parser.add_argument("--output", type=Path, default=OUTPUT)
    given = parser.parse_args()
    wanted = [BASE, *(run for run in CHANGED if given.only is None or run.name in given.only)]
    wanted = [replace(run, steps=max(_LEAST_STEPS, round(given.share * run.steps))) for run in wanted]
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.runs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        folders = [recorded(run, folder.resolve()) for run in wanted]
        known = measured_rates(folders[0], on_cores=True)
        plans = [plan_for(run, path, known) for run, path in zip(wanted, folders, strict=True)]
        steps = rehearsed(rehearsal_of(*pair) for pair in plans)
        found = [
            compared(run, path, forecast(*pair, one))
            for run, path, pair, one in zip(wanted, folders, plans, steps, strict=True)
        ]
    more = "" if given.only is None else f" --only {' '.join(given.only)}"
    more += "" if given.share == 1.0 else f" --share {given.share:g}"
    print_and_write(table(found, known, f"python -m benchmarks.planner{more}"), given.output)
    sys.exit(0 if all(one.rate_holds and one.lag_holds for one in found) else 1)


if __name__ == "__main__":
    main()
