"""Accuracy of the planner's simulation on runs that were recorded: `python -m benchmarks.planner RUN ...`.

Of each RUN (its folder, with metrics.jsonl and summary.json) the durations of its steps and its publishes, the rate of
its generators and what its guard read of each step (KL, effective sample share) are taken, and the run is simulated
with them. Throughput and lag, which the real ledger, pacing and guard make of these, are then compared. The table goes
to benchmarks/results/planner.md.

The generators' rate is that of the time in which they had work: sampled tokens a second over 1 - generator_idle_share.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.measured_rates import warm
from headway.planner import lags, lengths_of, rehearsed, seconds
from headway.report import ReportedRun, read_run
from services.config.sources import ConfigError

OUTPUT = Path(__file__).parent / "results" / "planner.md"
RATE, LAG = 0.10, 0.3
"""Accuracy that is promised: share of the throughput, and versions of lag."""
READINGS = ("effective_sample_share", "behavior_kl", "mismatch_kl", "importance_ratio_max")
"""Numbers of a step that the guard reads."""


@dataclass(frozen=True)
class Compared:
    """Sampled tokens a second and mean lag, as they were and as they were foretold."""

    name: str
    what: str
    steps: int
    rate: float
    lag: float
    foretold_rate: float
    foretold_lag: float

    @property
    def holds(self) -> bool:
        """True if both are as near as promised."""
        return abs(self.foretold_rate / self.rate - 1) <= RATE and abs(self.foretold_lag - self.lag) <= LAG


def _configured(run: ReportedRun) -> int:
    """The bound on lag of the settings, below which the guard may have held it."""
    given = run.made.get("settings", {}).get("max_lag")
    return int(max(step["lag_bound"] for step in _steps(run)) if given is None else given)


def _steps(run: ReportedRun) -> list[Mapping[str, Any]]:
    return [step for step in run.steps if step.get("kind") == "step"]


def _lowered(steps: Sequence[Mapping[str, Any]], configured: int) -> int:
    """In how many steps the guard held the bound below the configured one."""
    return sum(step["lag_bound"] < configured for step in steps)


def _guard(run: ReportedRun) -> dict[str, Any]:
    """Its settings, as far as the run's folder has them."""
    settings = run.made.get("settings", {})
    return {key.removeprefix("guard."): value for key, value in settings.items() if key.startswith("guard.")}


def _publishes(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [entry for line in lines if (entry := json.loads(line)).get("kind") == "publish"]


def rehearsal_of(run: ReportedRun, folder: Path, *, capacity: int, at_once: int) -> Mapping[str, Any]:
    """Raises ConfigError if the run's folder does not say how fast its generators were."""
    steps = _steps(run)
    idle, publishes = run.summary.get("generator_idle_share"), _publishes(folder)
    if idle is None or not publishes or not steps:
        raise ConfigError([f"{run.name}: summary.json has no generator_idle_share: expected a run that has ended"])
    rate = tokens(warm(steps)) / seconds(warm(steps)) / (1 - idle)
    first = steps[0]
    pause_s = statistics.fmean(one["pause_s"] for one in publishes)
    return {
        "settings": {
            "generators": 1, "steps": len(steps), "groups_per_step": first["groups"],
            "group_size": first["trajectories"] // first["groups"], "max_lag": _configured(run),
            "capacity": capacity, "max_tokens": 48, "checkpoint_every": 10**6, "guard": _guard(run),
        },
        "readings": [{name: step.get(name) for name in READINGS} for step in steps],
        "train_s": [step["train_s"] + step["copy_s"] for step in steps], "lengths": lengths_of(folder),
        "token_s": 0.0, "sequence_s": 1 / rate, "at_once": at_once, "load_s": pause_s,
        "score_s": statistics.fmean(one["total_s"] for one in publishes) - pause_s,
    }  # fmt: skip


def tokens(steps: Sequence[Mapping[str, Any]]) -> int:
    """Tokens that were sampled for these steps."""
    return sum(step["sampled_tokens"] for step in steps)


def compared(run: ReportedRun, foretold: Sequence[Mapping[str, Any]], *, capacity: int) -> Compared:
    """Both without their first quarter."""
    steps = warm(_steps(run))
    kept, first = warm(foretold), steps[0]
    size, bound = first["trajectories"] // first["groups"], _configured(run)
    lowered, told = _lowered(steps, bound), _lowered(kept, bound)
    guarded = f", lowered by its guard in {lowered} steps, foretold in {told}" if lowered or told else ""
    return Compared(
        name=run.name, what=f"{first['groups']} groups of {size}, {capacity} at once, max_lag {bound}{guarded}",
        steps=len(steps), rate=tokens(steps) / seconds(steps), lag=statistics.fmean(lags(steps)),
        foretold_rate=tokens(kept) / seconds(kept), foretold_lag=statistics.fmean(lags(kept)),
    )  # fmt: skip


def table(found: Sequence[Compared], command: str) -> str:
    """In Markdown."""
    rows = "\n".join(
        f"| {one.name} ({one.what}) | {one.steps} | {one.rate:.0f} | {one.foretold_rate:.0f} "
        f"({one.foretold_rate / one.rate - 1:+.1%}) | {one.lag:.2f} | {one.foretold_lag:.2f} "
        f"({one.foretold_lag - one.lag:+.2f}) | {'yes' if one.holds else 'no'} |"
        for one in found
    )
    return f"""# What the planner foretells, and what was

`{command}`:
recorded runs on CPUs, simulated with the durations of their steps and publishes, what their guard read of each step,
and the rate of their generators while these had work. Without the first quarter of the steps. Promised: throughput
within {RATE:.0%}, mean lag within {LAG}.

| run | steps | tokens/s | foretold | mean lag | foretold | holds |
|---|---|---|---|---|---|---|
{rows}
"""


def main() -> None:
    """Exits with 1 if a forecast is further off than promised."""
    parser = argparse.ArgumentParser(prog="benchmarks.planner", description=__doc__)
    parser.add_argument("runs", nargs="+", help="FOLDER[:CAPACITY[:AT_ONCE]] of runs; 16 and 256, as the demo has them")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    arguments = parser.parse_args()
    runs: list[tuple[ReportedRun, int]] = []
    rehearsals: list[Mapping[str, Any]] = []
    for word in arguments.runs:
        folder, *numbers = word.split(":")
        capacity, at_once = (int(number) for number in (*numbers, *("16", "256")[len(numbers) :]))
        runs.append((read_run(Path(folder)), capacity))
        rehearsals.append(rehearsal_of(runs[-1][0], Path(folder), capacity=capacity, at_once=at_once))
    pairs = zip(runs, rehearsed(rehearsals), strict=True)
    told = [compared(run, foretold, capacity=capacity) for (run, capacity), foretold in pairs]
    command = f"python -m benchmarks.planner {' '.join(Path(word).name for word in arguments.runs)}"
    text = table(told, command)
    sys.stdout.write(text)
    arguments.output.write_text(text, encoding="utf-8")
    sys.exit(0 if all(one.holds for one in told) else 1)


if __name__ == "__main__":
    main()
