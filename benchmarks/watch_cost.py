"""What it costs a run to be watched: two runs of the demo, one with the page open and trackers on, one without.

    python -m benchmarks.watch_cost [--pairs 10] [--starts 2] [--steps 120] [--trackers tensorboard]

Watched, a reader follows the page's stream of events as a browser does, trajectories are kept as they are by default,
and the trackers write. Not watched, nobody reads, no trajectory is kept and there is no tracker. The browser itself is
left out: it is the watcher's machine that runs it.

Both runs live at once and have the machine to themselves by turns of some steps, in which all processes of the other
one are stopped: a machine's speed changes by a tenth from one minute to the next, and so both meet the same. A pair is
so many steps of each; compared are the seconds of its turns, and the CPU seconds of all its processes, trackers' own
included, that each of its steps took. Who begins changes with each start. What comes before the 81st step, such as the
start of W&B, is not compared: it is told by itself, in CPU seconds. It needs the demo's model (`make demo` makes it),
and a machine with nothing else on it.
"""

import argparse
import http.client
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from benchmarks.machine import described_machine
from benchmarks.whole_runs import steps_in
from services.process import parent_death_signal
from tests.chaos.faults import send, tree

HERE = Path(__file__).parents[1]
RESULT = HERE / "benchmarks/results/watch_cost.md"
RUN_FILE = "examples/addition/run.toml"
TRACKERS = {
    "tensorboard": ["--learner.trackers.tensorboard", "true"],
    "wandb": ["--learner.trackers.wandb", "offline"],
}
PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb"}
NOT_LEARNING = ["--learner.training.optimizer.learning-rate", "1e-9"]
"""Of both runs: a step costs less the more groups have equal rewards, and each would learn at a pace of its own."""
UNWATCHED = ["--learner.samples.enabled", "false"]
FIRST_STEPS = 80
"""That are not measured: a run's beginning, and that of its trackers, whose start gets the CPU that is left."""
MOST_STEPS = 100_000
"""No run comes that far: it is ended when it has been measured."""
TURN_STEPS = 10
_LONGEST_TURN_S = 300.0
WATCHED_PORT, UNWATCHED_PORT = 7300, 7400
MEASURES = {"of a step": "step_s", "of CPU of a step": "cpu_s"}
_LOOK_EVERY_S = 0.01


@dataclass(frozen=True)
class Cost:
    """Of one step, in seconds: of the turns in which its run had the machine, and of CPU."""

    step_s: float
    cpu_s: float


@dataclass(frozen=True)
class Mark:
    """How far a run is: its steps, and the seconds and CPU seconds that it has had."""

    steps: int
    had_s: float
    cpu_s: float

    def until(self, later: "Mark") -> Cost:
        """What a step took since."""
        steps = later.steps - self.steps
        return Cost(step_s=(later.had_s - self.had_s) / steps, cpu_s=(later.cpu_s - self.cpu_s) / steps)


class Run:
    """A run of the demo, and the turns that it has had."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        self._process, self._folder = process, folder
        self._had_s = 0.0
        self._looked_at, self._steps = 0, 0

    @property
    def steps(self) -> int:
        """How many it has made. Raises SystemExit with what it said if it has ended."""
        if self._process.poll() is not None:
            said = (self._folder / "log").read_text(encoding="utf-8")[-4000:]
            raise SystemExit(f"headway up ended with {self._process.returncode}:\n{said}")
        metrics = self._folder / "pair/metrics.jsonl"
        if metrics.exists() and (size := metrics.stat().st_size) != self._looked_at:
            self._looked_at, self._steps = size, steps_in(metrics)
        return self._steps

    def mark(self) -> Mark:
        """How far it is now."""
        used = sum(map(_used_s, tree(self._process.pid)))
        return Mark(steps=self.steps, had_s=self._had_s, cpu_s=used)

    def stop(self) -> None:
        """Until its next turn."""
        send(signal.SIGSTOP, tree(self._process.pid))

    def turn(self) -> None:
        """Goes on for TURN_STEPS. Raises SystemExit if it does not come so far."""
        began, last = time.monotonic(), self.steps + TURN_STEPS
        send(signal.SIGCONT, tree(self._process.pid))
        while self.steps < last:
            time.sleep(_LOOK_EVERY_S)
            if time.monotonic() - began > _LONGEST_TURN_S:
                raise SystemExit(f"{TURN_STEPS} steps were not made in {_LONGEST_TURN_S:g} s, see {self._folder}")
        self.stop()
        self._had_s += time.monotonic() - began

    def end(self) -> None:
        """Kills all of its processes: what a run does at its end is not measured here."""
        send(signal.SIGKILL, tree(self._process.pid))
        self._process.wait()

    def trackers_s(self) -> float:
        """CPU seconds of the processes of its trackers so far."""
        return sum(_used_s(pid) for pid in tree(self._process.pid) if _tracks(pid))


class Reader:
    """Follows the page's events from a thread, as long as the run lasts; a context manager."""

    def __init__(self, port: int) -> None:
        self.events = 0
        self._port = port
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> "Reader":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def _follow(self) -> None:
        while not self._ended.wait(0.5):
            with suppress(OSError, http.client.HTTPException, ValueError, KeyError):
                self._read()

    def _read(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        try:
            connection.request("GET", "/page/data/steps?run=0")
            mark = json.loads(connection.getresponse().read())["at"]
            connection.request("GET", f"/page/data/events?run=0&at={mark}")
            answer = connection.getresponse()
            while not self._ended.is_set() and (line := answer.readline()):
                self.events += line.startswith(b"data:")
        finally:
            connection.close()


@contextmanager
def running(options: Sequence[str], *, port: int) -> Iterator[Run]:
    """A run of the demo whose services listen from this port on; it is killed at the end."""
    learner, leases = f"http://127.0.0.1:{port}", f"tcp://127.0.0.1:{port + 1}"
    addresses = {
        "learner.http.port": port,
        "learner.leases.address": leases,
        "generator.http.port": port + 10,
        "generator.join.learner": learner,
        "reward-service.http.port": port + 20,
        "env-service.http.port": port + 30,
        "env-service.learner": leases,
        "env-service.reward-urls": json.dumps([f"http://127.0.0.1:{port + 20}"]),
    }
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, (Path(folder) / "log").open("wb") as log:
        words = [word for name, value in addresses.items() for word in (f"--{name}", str(value))]
        command = [
            str(HERE / ".venv/bin/headway"), "up", RUN_FILE, "--run.name", "pair", "--run.directory", folder,
            "--learner.steps", str(MOST_STEPS), "--learner.evaluation.tasks", "0",
            "--learner.evaluation.final-tasks", "0", *words, *NOT_LEARNING, *options,
        ]  # fmt: skip
        process = subprocess.Popen(
            command, cwd=HERE, stdout=log, stderr=subprocess.STDOUT, preexec_fn=parent_death_signal
        )
        run = Run(process, Path(folder))
        try:
            yield run
        finally:
            run.end()


def _used_s(pid: int) -> float:
    """CPU seconds of a process and of those of its children that have ended; 0 if it is gone."""
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def _tracks(pid: int) -> bool:
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return b"learner.reports.trackers" in words or words[0].endswith(b"wandb-core")
    return False


@dataclass(frozen=True)
class Found:
    """Of one start: each pair's watched and unwatched cost; CPU seconds of the trackers' processes before the first
    pair, and in each step from there on; and events that the page's reader was told of in a second of its run.
    """

    pairs: list[tuple[Cost, Cost]]
    trackers_start_s: float
    trackers_step_s: float
    events_per_s: float


def measured(*, pairs: int, steps: int, trackers: list[str], watched_first: bool) -> Found:
    """Both runs from one start."""
    options = [word for name in trackers for word in TRACKERS[name]]
    with ExitStack() as stack:
        watched = stack.enter_context(running(options, port=WATCHED_PORT))
        reader = stack.enter_context(Reader(WATCHED_PORT))
        other = stack.enter_context(running(UNWATCHED, port=UNWATCHED_PORT))
        while min(watched.steps, other.steps) < 1:
            time.sleep(_LOOK_EVERY_S)
        turns = (watched, other) if watched_first else (other, watched)
        for run in turns:
            run.stop()
        while min(watched.steps, other.steps) < FIRST_STEPS:
            for run in turns:
                run.turn()
        start_s, told, marks = watched.trackers_s(), reader.events, [(watched.mark(), other.mark())]
        for number in range(pairs):
            for _ in range(max(1, steps // TURN_STEPS)):
                for run in turns:
                    run.turn()
            marks.append((watched.mark(), other.mark()))
            print(f"{number + 1}: {_costs(*marks[-2:])}", flush=True)
        first, last = marks[0][0], marks[-1][0]
        return Found(
            pairs=[_costs(before, after) for before, after in pairwise(marks)],
            trackers_start_s=start_s,
            trackers_step_s=(watched.trackers_s() - start_s) / (last.steps - first.steps),
            events_per_s=(reader.events - told) / (last.had_s - first.had_s),
        )


def _costs(before: tuple[Mark, Mark], after: tuple[Mark, Mark]) -> tuple[Cost, Cost]:
    return before[0].until(after[0]), before[1].until(after[1])


def table(found: Sequence[Found], *, command: str) -> str:
    """The results as Markdown."""
    pairs = [pair for each in found for pair in each.pairs]
    lines = [
        "# What it costs to be watched",
        "",
        f"`{command}`: the demo with its page followed,",
        f"trajectories kept and trackers on, against without, in turns of {TURN_STEPS} steps.",
        "",
        "| ms | watched (median) | not watched (median) | ratio: median | smallest | largest | mean ± error |",
        "|---|---|---|---|---|---|---|",
    ]
    for label, name in MEASURES.items():
        watched = [1e3 * getattr(one, name) for one, _ in pairs]
        other = [1e3 * getattr(one, name) for _, one in pairs]
        ratios = [mine / theirs for mine, theirs in zip(watched, other, strict=True)]
        error = statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else float("nan")
        lines.append(
            f"| {label} | {statistics.median(watched):.1f} | {statistics.median(other):.1f} | "
            f"**{statistics.median(ratios):.3f}** | {min(ratios):.3f} | {max(ratios):.3f} | "
            f"{statistics.mean(ratios):.3f} ± {error:.3f} |"
        )
    start_s = statistics.mean(each.trackers_start_s for each in found)
    step_ms = 1e3 * statistics.mean(each.trackers_step_s for each in found)
    events = statistics.mean(each.events_per_s for each in found)
    words = [
        f"Of CPU the trackers' processes took {start_s:.1f} s before the first pair, then {step_ms:.1f} ms a step;",
        f"the reader was told of {events:.1f} events a second. {described_machine()}.",
    ]
    return "\n".join([*lines, "", *words, ""])


def main() -> None:
    """Runs them, and writes the table after each start."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.watch_cost", description=__doc__)
    parser.add_argument("--pairs", type=int, default=10, help="in all; %(default)s")
    parser.add_argument("--starts", type=int, default=2, help="the pairs are divided among them; %(default)s")
    parser.add_argument("--steps", type=int, default=120, help="of each run in a pair; %(default)s")
    parser.add_argument("--trackers", default="tensorboard", help=f"of {', '.join(TRACKERS)}, with commas between")
    parser.add_argument("--output", type=Path, default=RESULT)
    given = parser.parse_args()
    # Killed by it, this would leave a run that is stopped for ever.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    trackers = [name for name in given.trackers.split(",") if name]
    for name in trackers:
        if importlib.util.find_spec(PACKAGES[name]) is None:  # the run would go on without it
            raise SystemExit(
                f"no package {PACKAGES[name]}, expected for --trackers {name}: install requirements/tests.lock"
            )
    command = (
        f"python -m benchmarks.watch_cost --pairs {given.pairs} --starts {given.starts} --steps {given.steps} "
        f"--trackers {given.trackers}"
    )
    found: list[Found] = []
    for start in range(given.starts):
        share = given.pairs // given.starts + (start < given.pairs % given.starts)
        found.append(measured(pairs=share, steps=given.steps, trackers=trackers, watched_first=bool(start % 2)))
        given.output.write_text(table(found, command=command), encoding="utf-8")


if __name__ == "__main__":
    main()
