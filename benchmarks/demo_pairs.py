"""The demo's speed against that of another checkout: short runs in turn, so that both meet the same machine.

    python -m benchmarks.demo_pairs OTHER [--pairs 10] [--steps 110]

OTHER is a folder with another commit, set up by `make setup`. Each pair runs both once, and who begins changes from
pair to pair. Compared are the seconds in which the steps were trained, and those of the whole command; the results are
the ratios pair by pair. Both train the model in this checkout's `models/addition` (`make demo` makes it).
"""

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from services.process import parent_death_signal

HERE = Path(__file__).parents[1]
RESULT = HERE / "benchmarks/results/demo_pairs.md"
RUN_FILE = "examples/addition/run.toml"


@dataclass(frozen=True)
class RunSeconds:
    """Seconds of a run: of its training, and of the whole."""

    training_s: float
    whole_s: float


def timed(checkout: Path, *, steps: int) -> RunSeconds:
    """Raises SystemExit with what the run said if it failed."""
    with tempfile.TemporaryDirectory() as folder:
        model = str(HERE / "models/addition")
        command = [
            str(checkout / ".venv/bin/headway"), "up", RUN_FILE, "--run.name", "pair", "--run.directory", folder,
            "--learner.steps", str(steps), "--learner.evaluation.tasks", "0", "--learner.evaluation.final-tasks", "0",
            "--learner.model", model, "--generator.model", model, "--env-service.model", model,
        ]  # fmt: skip
        began = time.monotonic()
        done = subprocess.run(
            command, cwd=checkout, capture_output=True, text=True, check=False, preexec_fn=parent_death_signal
        )
        whole_s = time.monotonic() - began
        if done.returncode != 0:
            raise SystemExit(
                f"{checkout}: headway up ended with {done.returncode}:\n{(done.stdout + done.stderr)[-4000:]}"
            )
        summary = json.loads((Path(folder) / "pair/summary.json").read_text(encoding="utf-8"))
    return RunSeconds(training_s=summary["train_wall_s"], whole_s=whole_s)


def commit(checkout: Path) -> str:
    """The short name of its commit."""
    asked = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
    return subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()


def pair(other: Path, *, steps: int, other_first: bool) -> tuple[RunSeconds, RunSeconds]:
    """This checkout's run and the other's."""
    if other_first:
        theirs = timed(other, steps=steps)
        return timed(HERE, steps=steps), theirs
    ours = timed(HERE, steps=steps)
    return ours, timed(other, steps=steps)


def table(pairs: list[tuple[RunSeconds, RunSeconds]], *, other: str, steps: int) -> str:
    """The results as Markdown."""
    lines = [
        "# The demo against a former commit",
        "",
        f"`python -m benchmarks.demo_pairs OTHER --pairs {len(pairs)} --steps {steps}`: commit `{commit(HERE)}`",
        f"against `{other}`, in turn. A ratio below 1 means that the present code takes less time.",
        "",
        "| seconds | present (median) | former (median) | ratio: median | smallest | largest |",
        "|---|---|---|---|---|---|",
    ]
    for what in ("training", "whole"):
        ours = [getattr(one, f"{what}_s") for one, _ in pairs]
        theirs = [getattr(one, f"{what}_s") for _, one in pairs]
        ratios = [mine / former for mine, former in zip(ours, theirs, strict=True)]
        lines.append(
            f"| {what} | {statistics.median(ours):.1f} | {statistics.median(theirs):.1f} | "
            f"{statistics.median(ratios):.3f} | {min(ratios):.3f} | {max(ratios):.3f} |"
        )
    return "\n".join([*lines, ""])


def main() -> None:
    """Runs the pairs, and writes the table after each."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demo_pairs", description=__doc__)
    parser.add_argument("other", type=Path)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=110)
    arguments = parser.parse_args()
    pairs: list[tuple[RunSeconds, RunSeconds]] = []
    for number in range(arguments.pairs):
        ours, theirs = pair(arguments.other.resolve(), steps=arguments.steps, other_first=bool(number % 2))
        pairs.append((ours, theirs))
        print(f"{number + 1}: {ours} against {theirs}", flush=True)
        RESULT.write_text(table(pairs, other=commit(arguments.other), steps=arguments.steps), encoding="utf-8")


if __name__ == "__main__":
    main()
