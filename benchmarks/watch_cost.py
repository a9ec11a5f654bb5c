"""What it costs a run to be watched: short runs of the demo in turn, with the page open and trackers on, and without.

    python -m benchmarks.watch_cost [--pairs 10] [--steps 270] [--trackers tensorboard]

Watched, a reader follows the page's stream of events as a browser does, trajectories are kept as they are by default,
and the trackers write. Not watched, nobody reads, no trajectory is kept and there is no tracker. The browser itself is
left out: it is the watcher's machine that runs it. Who begins changes from pair to pair. Compared are, pair by pair,
the seconds from the 101st step on and the CPU seconds of all processes meanwhile, trackers' own included, which
is what each step costs; and the CPU seconds from start to end, in which a tracker's start weighs the more the shorter a
run is. It needs the demo's model (`make demo` makes it), and a machine with nothing else on it.
"""

import argparse
import http.client
import json
import os
import resource
import statistics
import subprocess
import tempfile
import threading
import time
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from benchmarks.machine import described_machine
from benchmarks.whole_runs import steps_in
from services.process import parent_death_signal
from tests.chaos.faults import tree

HERE = Path(__file__).parents[1]
RESULT = HERE / "benchmarks/results/watch_cost.md"
RUN_FILE = "examples/addition/run.toml"
PORT = 7300
TRACKERS = {
    "tensorboard": ["--learner.trackers.tensorboard", "true"],
    "wandb": ["--learner.trackers.wandb", "offline"],
}
UNWATCHED = ["--learner.samples.enabled", "false"]
FIRST_STEPS = 100
"""That are not measured: a run's beginning, and that of its trackers, whose start of seconds gets the CPU that is left."""

MEASURES = {
    f"of steps, from the {FIRST_STEPS + 1}st on": "steps_s",
    "of CPU meanwhile": "steps_cpu_s",
    "of CPU from start to end": "cpu_s",
}
_LOOK_EVERY_S = 0.05


@dataclass(frozen=True)
class Cost:
    """One run, in seconds: `steps_s` and `steps_cpu_s` after its first steps, `cpu_s` of all of it. `events` is how
    many its page's reader was told.
    """

    steps_s: float
    steps_cpu_s: float
    cpu_s: float
    events: int


class Meter:
    """Time and CPU of a process and all that it started, between two steps of its run; a thread looks for them."""

    def __init__(self, pid: int, metrics: Path, *, first: int, last: int) -> None:
        self._pid, self._metrics, self._over = pid, metrics, False
        self._marks = [first, last]
        self._seen: list[tuple[float, float]] = []
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        for mark in self._marks:
            while steps_in(self._metrics) < mark:
                if self._over:
                    return
                time.sleep(_LOOK_EVERY_S)
            self._seen.append((time.monotonic(), sum(map(_used_s, tree(self._pid)))))

    def between(self) -> tuple[float, float]:
        """Seconds, and CPU seconds. Raises SystemExit if it did not see both steps."""
        self._over = True
        self._thread.join()
        if len(self._seen) < len(self._marks):
            raise SystemExit(f"of steps {self._marks} only {len(self._seen)} were seen: its run was too short")
        (began, used), (ended, used_then) = self._seen
        return ended - began, used_then - used


class Reader:
    """Follows the page's events from a thread, as long as the run lasts; a context manager."""

    def __init__(self) -> None:
        self.events = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> "Reader":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(10)

    def _follow(self) -> None:
        while not self._ended.wait(0.5):
            with suppress(OSError, http.client.HTTPException, ValueError, KeyError):
                self._read()

    def _read(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=5)
        try:
            connection.request("GET", "/page/data/steps?run=0")
            mark = json.loads(connection.getresponse().read())["at"]
            connection.request("GET", f"/page/data/events?run=0&at={mark}")
            answer = connection.getresponse()
            while not self._ended.is_set() and (line := answer.readline()):
                self.events += line.startswith(b"data:")
        finally:
            connection.close()


def measured(options: list[str], *, steps: int, read: bool) -> Cost:
    """Raises SystemExit with what the run said if it failed."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            str(HERE / ".venv/bin/headway"), "up", RUN_FILE, "--run.name", "pair", "--run.directory", folder,
            "--learner.steps", str(steps), "--learner.evaluation.tasks", "0", "--learner.evaluation.final-tasks", "0",
            *options,
        ]  # fmt: skip
        before = _cpu_s()
        with Reader() if read else nullcontext() as reader, _log(folder) as log:
            run = subprocess.Popen(
                command, cwd=HERE, stdout=log, stderr=subprocess.STDOUT, preexec_fn=parent_death_signal
            )
            meter = Meter(run.pid, Path(folder) / "pair/metrics.jsonl", first=FIRST_STEPS, last=steps - 2)
            code = run.wait()
        if code != 0:
            raise SystemExit(f"headway up ended with {code}:\n{(Path(folder) / 'log').read_text()[-4000:]}")
        steps_s, steps_cpu_s = meter.between()
    return Cost(
        steps_s=steps_s, steps_cpu_s=steps_cpu_s, cpu_s=_cpu_s() - before, events=0 if reader is None else reader.events
    )


def _log(folder: str) -> TextIO:
    return (Path(folder) / "log").open("w", encoding="utf-8")


def _used_s(pid: int) -> float:
    """CPU seconds of a process and of those of its children that have ended; 0 if it is gone."""
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def _cpu_s() -> float:
    """Of all processes that have ended so far, with theirs: headway waits for every one of a run."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def pair(*, steps: int, trackers: list[str], watched_first: bool) -> tuple[Cost, Cost]:
    """The watched run and the other one."""
    options = [word for name in trackers for word in TRACKERS[name]]
    if watched_first:
        watched = measured(options, steps=steps, read=True)
        return watched, measured(UNWATCHED, steps=steps, read=False)
    unwatched = measured(UNWATCHED, steps=steps, read=False)
    return measured(options, steps=steps, read=True), unwatched


def table(pairs: list[tuple[Cost, Cost]], *, steps: int, trackers: list[str]) -> str:
    """The results as Markdown."""
    lines = [
        "# What it costs to be watched",
        "",
        f"`python -m benchmarks.watch_cost --pairs {len(pairs)} --steps {steps} --trackers {','.join(trackers)}`: the",
        "demo with its page followed, trajectories kept and trackers on, against without, in turn.",
        "",
        "| seconds | watched (median) | not watched (median) | ratio: median | smallest | largest | mean ± error |",
        "|---|---|---|---|---|---|---|",
    ]
    for label, name in MEASURES.items():
        watched = [getattr(one, name) for one, _ in pairs]
        other = [getattr(one, name) for _, one in pairs]
        ratios = [mine / theirs for mine, theirs in zip(watched, other, strict=True)]
        error = statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else float("nan")
        lines.append(
            f"| {label} | {statistics.median(watched):.1f} | {statistics.median(other):.1f} | "
            f"{statistics.median(ratios):.3f} | {min(ratios):.3f} | {max(ratios):.3f} | "
            f"{statistics.mean(ratios):.3f} ± {error:.3f} |"
        )
    events = statistics.median(one.events for one, _ in pairs)
    return "\n".join([*lines, "", f"The reader was told of {events:.0f} events a run. {described_machine()}.", ""])


def main() -> None:
    """Runs the pairs, and writes the table after each."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.watch_cost", description=__doc__)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=270)
    parser.add_argument("--trackers", default="tensorboard", help=f"of {', '.join(TRACKERS)}, with commas between")
    parser.add_argument("--output", type=Path, default=RESULT)
    given = parser.parse_args()
    trackers = [name for name in given.trackers.split(",") if name]
    pairs: list[tuple[Cost, Cost]] = []
    for number in range(given.pairs):
        began = time.monotonic()
        pairs.append(pair(steps=given.steps, trackers=trackers, watched_first=bool(number % 2)))
        print(f"{number + 1}: {pairs[-1][0]} against {pairs[-1][1]}, {time.monotonic() - began:.0f} s", flush=True)
        given.output.write_text(table(pairs, steps=given.steps, trackers=trackers), encoding="utf-8")


if __name__ == "__main__":
    main()
