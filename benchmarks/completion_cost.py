"""Cost of a short completion in a whole run, in CPU by process and thread: the addition task, all of it real.

    python -m benchmarks.completion_cost [--steps 170] [--output FILE]

CPU of every thread of every process is read between two steps of a run, from the operating system, and divided by the
completions of the steps between them; user and kernel time. What the model itself takes is that of vLLM's engine core
and of the trainer's thread; the rest is what the work around them costs. A good part of that is for each group, so it
is measured with the demo's groups of 4, each trained on twice, and with groups of 8 that are trained on once. Needs the
demo's model (`make demo` makes it); the machine should do nothing else.
"""

import argparse
import os
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cpu_time import of_threads
from benchmarks.machine import described_machine
from benchmarks.whole_runs import run_headway, steps_in
from tests.chaos.faults import tree

RUNS = {
    "the demo, groups of 4": Path("examples/addition/run.toml"),
    "groups of 8, one pass": Path("benchmarks/settings/addition.toml"),
}
RESULT = Path(__file__).with_name("results") / "completion_cost.md"
FIRST_STEP = 50
_LOOK_EVERY_S = 0.05

ENGINE, TRAINER = "generator: engine core", "learner: trainer's thread"
PARTS = (
    ENGINE,
    TRAINER,
    "generator: frontend",
    "env-service",
    "learner: event loop",
    "reward-service",
    "learner: other threads",
    "headway",
)
GOAL_US = 450
"""Outside of engine core and trainer."""


def spent(pid: int) -> dict[str, float]:
    """CPU seconds so far of each part, of a process and its descendants."""
    seconds: dict[str, float] = defaultdict(float)
    for process in tree(pid):
        threads = of_threads(process)
        name = _name(process)
        if name == "learner":
            busiest = max((one for one in threads if one != process), key=lambda one: threads[one], default=process)
            for thread, used in threads.items():
                part = {process: "event loop", busiest: "trainer's thread"}.get(thread, "other threads")
                seconds[f"learner: {part}"] += used
        else:
            part = {"generator": "generator: frontend", "VLLM::EngineCor": ENGINE}.get(name, name)
            seconds[part] += sum(threads.values())
    return seconds


def _name(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip()
    return ""


class CpuWatch:
    """Looks at this process's descendants when the run has reached each of two steps; from a thread of its own."""

    def __init__(self, metrics: Path, *, steps: tuple[int, int]) -> None:
        self._metrics, self._steps = metrics, steps
        self.seen: list[tuple[float, dict[str, float]]] = []
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        for step in self._steps:
            while steps_in(self._metrics) < step:
                time.sleep(_LOOK_EVERY_S)
            self.seen.append((time.monotonic(), spent(os.getpid())))


@dataclass(frozen=True)
class CompletionCost:
    """us of CPU a completion by part, and completions/s."""

    us: Mapping[str, float]
    rate: float

    @property
    def around(self) -> float:
        """Outside of engine core and trainer."""
        return sum(us for part, us in self.us.items() if part not in (ENGINE, TRAINER))


def measured(run_file: Path, *, steps: int) -> CompletionCost:
    """Makes a run and measures its cost. Raises SystemExit if it fails."""
    last = steps - 5
    with tempfile.TemporaryDirectory() as folder:
        watch = CpuWatch(Path(folder) / "run/metrics.jsonl", steps=(FIRST_STEP, last))
        options = {"learner.steps": steps, "learner.evaluation.tasks": 0, "learner.evaluation.final-tasks": 0}
        found = run_headway(run_file, folder=Path(folder), options=options).of_kind("step")
    completions = sum(int(step["trajectories"]) for step in found[FIRST_STEP:last])
    (began, before), (ended, after) = watch.seen
    us = {part: 1e6 * (after[part] - before.get(part, 0.0)) / completions for part in after}
    return CompletionCost(us=us, rate=completions / (ended - began))


def table(costs: Mapping[str, CompletionCost], *, steps: int) -> str:
    """As Markdown; parts that cost nothing are left out."""
    seen = {part for cost in costs.values() for part, us in cost.us.items() if us >= 1}
    parts = [*(part for part in PARTS if part in seen), *sorted(seen.difference(PARTS))]
    lines = [
        ("CPU of a completion, us", *costs),
        ("---",) * (1 + len(costs)),
        *((part, *(f"{cost.us.get(part, 0.0):.0f}" for cost in costs.values())) for part in parts),
        ("all", *(f"{sum(cost.us.values()):.0f}" for cost in costs.values())),
        (
            f"**all but engine core and trainer** ({GOAL_US} wanted)",
            *(f"**{cost.around:.0f}**" for cost in costs.values()),
        ),
        ("completions/s", *(f"{cost.rate:.0f}" for cost in costs.values())),
    ]
    return "\n".join(
        [
            "# What a short completion costs in a whole run",
            "",
            f"`python -m benchmarks.completion_cost`: addition, completions of 4 tokens, steps {FIRST_STEP} to "
            f"{steps - 5}. {described_machine()}.",
            "",
            *(f"| {' | '.join(line)} |" for line in lines),
            "",
        ]
    )


def main() -> None:
    """Runs it, prints the table, and writes it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=170)
    parser.add_argument("--output", type=Path, default=RESULT)
    given = parser.parse_args()
    costs = {name: measured(run_file, steps=given.steps) for name, run_file in RUNS.items()}
    text = table(costs, steps=given.steps)
    print(text)
    given.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
