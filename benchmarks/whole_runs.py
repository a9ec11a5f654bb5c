"""Running `headway up` for a benchmark, and reading what it left."""

import json
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.process import parent_death_signal


@dataclass(frozen=True)
class RunFiles:
    """The run's summary.json, and its metrics.jsonl by kind."""

    summary: dict[str, Any]
    entries: list[dict[str, Any]]

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        """The entries of one kind, in order."""
        return [entry for entry in self.entries if entry["kind"] == kind]

    @property
    def accuracies(self) -> dict[int, float]:
        """Held-out accuracy by step, of the evaluations that there were: a slow one takes the place of those due
        meanwhile.
        """
        return {entry["version"]: entry["accuracy"] for entry in self.of_kind("evaluation")}

    def sampled_until(self, steps: Iterable[int]) -> dict[int, int]:
        """Tokens that were sampled to train on up to the end of each of these steps."""
        sampled = [entry["sampled_tokens"] for entry in self.of_kind("step")]
        return {step: sum(sampled[:step]) for step in steps}


def run_headway(config: Path, *, folder: Path, options: Mapping[str, object]) -> RunFiles:
    """Runs `headway up` to its end, with files in `folder`/run. Its output is shown only if it fails, by SystemExit."""
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    place = ["--run.name", "run", "--run.directory", str(folder)]
    command = [str(Path(sys.executable).with_name("headway")), "up", str(config), *place, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=parent_death_signal)
    if done.returncode != 0:
        raise SystemExit(
            f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
        )
    return files_of(folder / "run")


def tokens_to(target: float, accuracies: Mapping[int, float], sampled: Mapping[int, int]) -> int | None:
    """Tokens sampled up to the first evaluation of at least `target`; None if there was none. Both are by step."""
    found = [step for step, share in sorted(accuracies.items()) if share >= target]
    return sampled[found[0]] if found else None


def tokens_told(count: int | None) -> str:
    """In a table's cell: what `tokens_to` found."""
    return "not reached" if count is None else f"{count:,}"


def median_told(counts: Sequence[int | None]) -> str:
    """The median of several runs' tokens to a target; how many reached it, where not all did."""
    known = [count for count in counts if count is not None]
    return f"{statistics.median(known):,.0f}" if len(known) == len(counts) else f"{len(known)} of {len(counts)} runs"


def with_steps(item: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    """A result as JSON has it, with the mappings under these keys by numbers of steps again."""
    return {**item, **{key: {int(step): value for step, value in item[key].items()} for key in keys}}


def files_of(run: Path) -> RunFiles:
    """The files of a run that has ended."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    return RunFiles(summary=summary, entries=[json.loads(line) for line in lines])


def steps_in(metrics: Path) -> int:
    """Number of steps of a run under way that are in its metrics.jsonl so far."""
    return metrics.read_bytes().count(b'"kind": "step"') if metrics.exists() else 0
