"""What surviving costs when nothing dies: throughput with the journal and checkpoints, and without, in alternation.

    .venv/bin/python -m benchmarks.survival_cost [--config RUN.toml] [--pairs N] [--steps N]

One generator, reward-service and env-service stay up; learners come and go: with everything on, as the run's file
says (of 110 steps, the hundredth writes a checkpoint), or with what can be turned off turned off. Each pair runs both,
in changing order; the ratio of their completions per second is one observation. What cannot be turned off (leases,
heartbeats, attempts, hashes of weights, the probe) is in both.
Results go to benchmarks/results/.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from math import comb
from pathlib import Path

from services.process import parent_death_signal

RESULTS = Path(__file__).with_name("results")
SERVICES = {"reward-service": 7320, "generator": 7310, "env-service": 7330}
ON: Mapping[str, object] = {}
OFF: Mapping[str, object] = {"checkpoint.journal": "false", "checkpoint.every-steps": 1_000_000}


def main() -> None:
    """Runs all pairs, prints and writes the ratios with the interval of their median."""
    arguments = _arguments()
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        for service in SERVICES:
            stack.enter_context(_service(service, config=arguments.config, folder=folder))
        _speed(ON, arguments=arguments, folder=folder / "warm-up")
        pairs = [_pair(number, arguments=arguments, folder=folder) for number in range(arguments.pairs)]
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


def _pair(number: int, *, arguments: argparse.Namespace, folder: Path) -> tuple[float, float]:
    """Completions per second with everything on, and with it off."""
    speeds = {}
    for name, options in (("on", ON), ("off", OFF)) if number % 2 == 0 else (("off", OFF), ("on", ON)):
        speeds[name] = _speed(options, arguments=arguments, folder=folder / f"{number}-{name}")
    ratio = speeds["on"] / speeds["off"]
    print(f"pair {number + 1}: {speeds['on']:.0f} and {speeds['off']:.0f} completions/s, ratio {ratio:.3f}", flush=True)
    return speeds["on"], speeds["off"]


def _speed(options: Mapping[str, object], *, arguments: argparse.Namespace, folder: Path) -> float:
    """Completions per second of one learner's whole run."""
    chosen = {
        "run.name": folder.name,
        "run.directory": folder.parent,
        "steps": arguments.steps,
        "evaluation.tasks": 0,
        "evaluation.final-tasks": 0,
        **options,
    }
    words = [word for key, value in chosen.items() for word in (f"--{key}", str(value))]
    command = [_script("learner"), "--config", str(arguments.config), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=parent_death_signal)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return float(summary["completions_per_s"])


@contextmanager
def _service(name: str, *, config: Path, folder: Path) -> Iterator[None]:
    """Runs a service until the body ends; enters when it answers."""
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            [_script(name), "--config", str(config)], stdout=log, stderr=log, preexec_fn=parent_death_signal
        )
        try:
            _await_health(name, process)
            yield
        finally:
            process.terminate()
            process.wait(timeout=30)


def _await_health(name: str, process: "subprocess.Popen[bytes]") -> None:
    url = f"http://127.0.0.1:{SERVICES[name]}/healthz"
    for _ in range(120):
        if process.poll() is not None:
            raise SystemExit(f"{name} ended with {process.returncode} before it answered")
        try:
            with urllib.request.urlopen(url, timeout=1):
                return
        except (urllib.error.URLError, TimeoutError):
            time.sleep(0.5)
    raise SystemExit(f"{name} does not answer at {url}")


def _script(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


def _report(pairs: list[tuple[float, float]], *, arguments: argparse.Namespace) -> str:
    ratios = sorted(on / off for on, off in pairs)
    low, high, coverage = _interval(ratios)
    lines = [
        "# What surviving costs when nothing dies",
        "",
        f"`benchmarks/survival_cost.py`: {arguments.config}, {arguments.steps} steps, {len(pairs)} alternated pairs.",
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
    for rank in range(count // 2, 0, -1):
        outside = 2 * sum(comb(count, below) for below in range(rank)) / 2**count
        if outside <= 0.05 or rank == 1:
            return ordered[rank - 1], ordered[count - rank], 1 - outside
    raise AssertionError("unreachable")


if __name__ == "__main__":
    main()
