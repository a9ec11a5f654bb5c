"""Cost of survival when nothing dies: throughput with the journal and checkpoints, and without, in alternation.

    .venv/bin/python -m benchmarks.survival_cost [--config RUN.toml] [--pairs N] [--steps N]

One generator, reward-service and env-service stay up; learners come and go: with everything on, as the run's file
says (of 110 steps, the hundredth writes a checkpoint), or with what can be turned off turned off. Each pair runs both,
in changing order; the ratio of their completions per second is one observation. What cannot be turned off (leases,
heartbeats, attempts, hashes of weights, the probe) is in both.
Results go to benchmarks/results/.
"""

import argparse
import json
import signal
import statistics
import sys
import tempfile
from math import comb
from pathlib import Path

from benchmarks.machine import described_machine
from benchmarks.warm_system import Options, WarmSystem, warm_system

RESULTS = Path(__file__).with_name("results")
ON: Options = {}
OFF: Options = {"checkpoint.journal": "false", "checkpoint.every-steps": 1_000_000}
_MAX_RUN_S = 1800.0


def main() -> None:
    """Runs all pairs, prints and writes the ratios with the interval of their median."""
    arguments = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the services end as well
    with (
        tempfile.TemporaryDirectory() as folder,
        warm_system(arguments.config, folder=Path(folder), options={}) as system,
    ):
        _speed("warm-up", ON, system=system, steps=arguments.steps)
        pairs = [_pair(number, system=system, steps=arguments.steps) for number in range(arguments.pairs)]
    report = _report(pairs, arguments=arguments)
    print(report)
    (RESULTS / "survival_cost.md").write_text(report, encoding="utf-8")
    (RESULTS / "survival_cost.json").write_text(json.dumps(pairs, indent=1) + "\n", encoding="utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("examples/addition/run.toml"))
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=110)
    return parser.parse_args()


def _pair(number: int, *, system: WarmSystem, steps: int) -> tuple[float, float]:
    """Completions per second with everything on, and with it off."""
    speeds = {}
    for name, options in (("on", ON), ("off", OFF)) if number % 2 == 0 else (("off", OFF), ("on", ON)):
        speeds[name] = _speed(f"{number}-{name}", options, system=system, steps=steps)
    ratio = speeds["on"] / speeds["off"]
    print(f"pair {number + 1}: {speeds['on']:.0f} and {speeds['off']:.0f} completions/s, ratio {ratio:.3f}", flush=True)
    return speeds["on"], speeds["off"]


def _speed(name: str, options: Options, *, system: WarmSystem, steps: int) -> float:
    """Completions per second of one learner's whole run. Raises RunFailed."""
    chosen = {"steps": steps, "evaluation.tasks": 0, "evaluation.final-tasks": 0, **options}
    return system.learn(name, options=chosen, limit_s=_MAX_RUN_S).completions_per_s


def _report(pairs: list[tuple[float, float]], *, arguments: argparse.Namespace) -> str:
    ratios = sorted(on / off for on, off in pairs)
    low, high, coverage = _interval(ratios)
    lines = [
        "# What surviving costs when nothing dies",
        "",
        f"`benchmarks/survival_cost.py`: {arguments.config}, {arguments.steps} steps, {len(pairs)} alternated pairs.",
        f"{described_machine()}.",
        "",
        "| | completions/s, median (lowest to highest) |",
        "|---|---|",
        *(_row(name, [pair[index] for pair in pairs]) for index, name in enumerate(("everything on", "turned off"))),
        "",
        f"Ratio on/off: median **{statistics.median(ratios):.3f}**, {coverage:.0%} interval of the median {low:.3f} to "
        f"{high:.3f}; all ratios: {', '.join(f'{ratio:.3f}' for ratio in ratios)}.",
        "",
        f"Turned off: {', '.join(f'`{key} = {value}`' for key, value in OFF.items())}.",
        "",
    ]
    return "\n".join(lines)


def _row(name: str, speeds: list[float]) -> str:
    return f"| {name} | {statistics.median(speeds):.0f} ({min(speeds):.0f} to {max(speeds):.0f}) |"


def _interval(ordered: list[float]) -> tuple[float, float, float]:
    """The narrowest pair of order statistics that holds the median with at least 95 %, and how surely it does.

    Their ranks follow from the binomial distribution alone, whatever the ratios' own.
    """
    count = len(ordered)
    for rank in range(max(1, count // 2), 0, -1):
        outside = 2 * sum(comb(count, below) for below in range(rank)) / 2**count
        if outside <= 0.05 or rank == 1:
            return ordered[rank - 1], ordered[count - rank], 1 - outside
    raise AssertionError("unreachable")


if __name__ == "__main__":
    main()
