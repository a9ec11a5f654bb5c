"""Cost of watching a run: turns of one run of the demo with the page open and trackers on, and without.

    python -m benchmarks.watch_cost [--pairs 10] [--starts 2] [--steps 120] [--trackers tensorboard]

Watched, a reader follows the page's stream of events as a browser does, trajectories are kept as they are by default,
and the trackers write. Not watched, nobody reads, no trajectory is kept and no tracker is told anything. The browser
itself is left out: it is the watcher's machine that runs it.

It is one run that is watched by turns of some steps (benchmarks/watched_learner.py turns it on and off): a machine's
speed changes by a tenth from one minute to the next, and two starts of the same run differ by some per cent. A pair is
so many steps of each, in the order that takes a steady change of speed out; compared are their seconds, and the CPU
seconds of all processes, trackers' own included. The first steps of a turn are not compared, in which what the one
before has left in queues is worked off. What the trackers' processes take while nothing is told to them is in both, and
told by itself; so is, in CPU seconds, what comes before the 81st step, such as the start of W&B. It needs the demo's
model (`make demo` makes it), and a machine with nothing else on it.
"""

import argparse
import http.client
import importlib.util
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import cpu_time
from benchmarks.machine import described_machine
from benchmarks.warm_system import Options, WarmSystem, warm_system
from tests.chaos.faults import tree

HERE = Path(__file__).parents[1]
RESULT = HERE / "benchmarks/results/watch_cost.md"
RUN_FILE = Path("examples/addition/run.toml")
TRACKERS = {"tensorboard": "true", "wandb": "offline"}
PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb"}
OPTIONS: Options = {
    # A step costs less the more groups have equal rewards: it must not learn, and so change its pace.
    "training.optimizer.learning-rate": 1e-9,
    "evaluation.tasks": 0,
    "evaluation.final-tasks": 0,
    "steps": 100_000,  # it is ended when it has been measured
}
FIRST_STEPS = 80
"""Steps before the measurement: a run's beginning, and its trackers' start, which gets the CPU that is left."""
TURN_STEPS = 5
SETTLING_STEPS = 4
MEASURES = {"of a step": "step_s", "of CPU of a step": "cpu_s"}
_MAX_STEP_S = 30.0
_LOOK_EVERY_S = 0.01
_WATCHING = ("trajectories", "tracker ")
"""Prefixes of the names of threads that do nothing but watch."""


@dataclass
class TurnsCost:
    """Of all turns so far of one kind. `watching` are CPU seconds of the threads and processes that only watch."""

    steps: int = 0
    seconds: float = 0.0
    cpu: float = 0.0
    watching: dict[str, float] = field(default_factory=dict)

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.seconds / self.steps

    @property
    def cpu_s(self) -> float:
        """CPU seconds of a step."""
        return self.cpu / self.steps

    def add(self, before: "RunMark", after: "RunMark") -> None:
        """A turn."""
        self.steps += after.steps - before.steps
        self.seconds += after.at - before.at
        self.cpu += after.cpu - before.cpu
        for name, used in after.watching.items():
            self.watching[name] = self.watching.get(name, 0.0) + used - before.watching.get(name, 0.0)


@dataclass(frozen=True)
class RunMark:
    """Progress of a run: its steps, the clock, and the CPU seconds that it has taken."""

    steps: int
    at: float
    cpu: float
    watching: Mapping[str, float]


class EventReader:
    """Follows the page's events from a thread, as long as the body lasts; a context manager."""

    def __init__(self, port: int, *, at: str) -> None:
        self.at = at
        """The last id of the stream that was read; empty before the reader has asked for all that was before."""
        self.events = 0
        self._port = port
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> "EventReader":
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
            if not self.at:
                connection.request("GET", "/page/data/steps?run=0")
                self.at = json.loads(connection.getresponse().read())["at"]
            connection.request("GET", f"/page/data/events?run=0&at={self.at}")
            answer = connection.getresponse()
            while not self._ended.is_set() and (line := answer.readline()):
                self.events += line.startswith(b"data:")
                if line.startswith(b"id:"):
                    self.at = line.removeprefix(b"id:").strip().decode()
        finally:
            connection.close()


class WatchedRun:
    """The run, which is watched or not as `switch` says."""

    def __init__(self, system: WarmSystem, learner: "subprocess.Popen[bytes]", *, name: str) -> None:
        self.events = 0
        """Events that readers were told of."""
        self._learner, self._system = learner, system
        self._switch = switch_of(system, name)
        self._metrics = system.folder / name / "metrics.jsonl"
        self._log = system.folder / f"{name}.log"
        self._read, self._steps = 0, 0
        self._at = ""

    @property
    def steps(self) -> int:
        """Number of steps made. Raises SystemExit with the learner's last words if it has ended."""
        if self._learner.poll() is not None:
            said = self._log.read_text(encoding="utf-8")[-4000:]
            raise SystemExit(f"the learner ended with {self._learner.returncode}:\n{said}")
        if self._metrics.exists() and self._metrics.stat().st_size > self._read:
            with self._metrics.open("rb") as file:
                file.seek(self._read)
                new = file.read()
            whole = new[: new.rfind(b"\n") + 1]
            self._read += len(whole)
            self._steps += whole.count(b'"kind": "step"')
        return self._steps

    def until(self, step: int) -> RunMark:
        """Waits for that step. Raises SystemExit if it does not come."""
        latest = time.monotonic() + 300 + _MAX_STEP_S * (step - self.steps)
        while self.steps < step:
            time.sleep(_LOOK_EVERY_S)
            if time.monotonic() > latest:
                raise SystemExit(f"step {step} was not made in time, the run is at {self.steps}")
        at = time.monotonic()
        processes = (self._learner, *self._system.services.values())
        pids = [pid for process in processes for pid in tree(process.pid)]
        cpu = {pid: cpu_time.of_process(pid) for pid in pids}
        return RunMark(steps=self.steps, at=at, cpu=sum(cpu.values()), watching=self._watching(cpu))

    def _watching(self, cpu: Mapping[int, float]) -> dict[str, float]:
        names = json.loads(self._switch.with_suffix(".threads").read_text(encoding="utf-8"))
        threads = {names.get(str(one), ""): used for one, used in cpu_time.of_threads(self._learner.pid).items()}
        found = {f"thread {name}": used for name, used in threads.items() if name.startswith(_WATCHING)}
        found["processes of trackers"] = sum(used for pid, used in cpu.items() if _tracks(pid))
        return found

    def turn(self, *, watched: bool) -> tuple[RunMark, RunMark]:
        """A turn from here on: when it begins to count, and its end."""
        if watched:
            self._switch.touch()
        else:
            self._switch.unlink(missing_ok=True)
        reader = EventReader(self._system.ports.learner, at=self._at)
        with reader if watched else nullcontext():
            before = self.until(self.steps + SETTLING_STEPS)
            told = reader.events
            after = self.until(before.steps + TURN_STEPS)
        self.events += reader.events - told
        self._at = reader.at
        return before, after


def switch_of(system: WarmSystem, name: str) -> Path:
    """The file that turns watching on."""
    return system.folder / f"{name}.watched"


def _tracks(pid: int) -> bool:
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return b"learner.reports.trackers" in words or words[0].endswith(b"wandb-core")
    return False


@contextmanager
def started(trackers: Sequence[str]) -> Iterator[WatchedRun]:
    """A run that is under way; it is ended with the body."""
    name = "watched"
    options = {**OPTIONS, **{f"trackers.{tracker}": TRACKERS[tracker] for tracker in trackers}}
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        warm_system(RUN_FILE, folder=Path(folder), options={}) as system,
    ):
        command = [sys.executable, "-m", "benchmarks.watched_learner", str(switch_of(system, name))]
        with system.learning(name, options=options, command=command) as learner:
            yield WatchedRun(system, learner, name=name)


@dataclass(frozen=True)
class Found:
    """Of one start: each pair's watched and unwatched cost; CPU seconds of the trackers' processes before the first
    pair; and events that the page's reader was told of in a second.
    """

    pairs: list[tuple[TurnsCost, TurnsCost]]
    trackers_start_s: float
    events_per_s: float


def measured(*, pairs: int, steps: int, trackers: Sequence[str], watched_first: bool) -> Found:
    """Starts a run and measures pairs of turns, watched and not."""
    found: list[tuple[TurnsCost, TurnsCost]] = []
    with started(trackers) as run:
        begun = run.until(FIRST_STEPS)
        for number in range(pairs):
            watched, other = TurnsCost(), TurnsCost()
            order = [watched_first, not watched_first, not watched_first, watched_first]
            while other.steps < steps:
                for is_watched in order:
                    (watched if is_watched else other).add(*run.turn(watched=is_watched))
            found.append((watched, other))
            ratios = watched.step_s / other.step_s, watched.cpu_s / other.cpu_s
            print(f"{number + 1}: {ratios[0]:.4f} of time, {ratios[1]:.4f} of CPU", flush=True)
        seconds = sum(watched.seconds for watched, _ in found)
        return Found(found, begun.watching["processes of trackers"], run.events / seconds)


def table(found: Sequence[Found], *, command: str) -> str:
    """The results as Markdown."""
    pairs = [pair for each in found for pair in each.pairs]
    lines = [
        "# What it costs to be watched",
        "",
        f"`{command}`: the demo with its page followed, trajectories kept and trackers on,",
        f"against the same run without, in turns of {TURN_STEPS} steps.",
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
            f"**{statistics.median(ratios):.4f}** | {min(ratios):.4f} | {max(ratios):.4f} | "
            f"{statistics.mean(ratios):.4f} ± {error:.4f} |"
        )
    lines += ["", "| CPU of what does nothing but watch, ms a step | watched | not watched |", "|---|---|---|"]
    for name in sorted({name for watched, _ in pairs for name in watched.watching}):
        shown = (_mean_ms([pair[side] for pair in pairs], name) for side in range(2))
        lines.append(f"| {name} | {' | '.join(f'{ms:.2f}' for ms in shown)} |")
    start_s = statistics.mean(each.trackers_start_s for each in found)
    events = statistics.mean(each.events_per_s for each in found)
    words = [
        f"The trackers' processes took {start_s:.1f} s of CPU before the first pair;",
        f"the reader was told of {events:.1f} events a second. {described_machine()}.",
    ]
    return "\n".join([*lines, "", *words, ""])


def _mean_ms(costs: Sequence[TurnsCost], name: str) -> float:
    return 1e3 * sum(cost.watching.get(name, 0.0) for cost in costs) / sum(cost.steps for cost in costs)


def main() -> None:
    """Runs them, and writes the table after each start."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.watch_cost", description=__doc__)
    parser.add_argument("--pairs", type=int, default=10, help="in all; %(default)s")
    parser.add_argument("--starts", type=int, default=2, help="the pairs are divided among them; %(default)s")
    parser.add_argument("--steps", type=int, default=120, help="of each run in a pair; %(default)s")
    parser.add_argument("--trackers", default="tensorboard", help=f"of {', '.join(TRACKERS)}, with commas between")
    parser.add_argument("--output", type=Path, default=RESULT)
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the run ends as well
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
