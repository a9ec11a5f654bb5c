"""Runs that are sick in a known way, with the real processes: what the first line says, and after how many seconds.

    python -m benchmarks.sick_runs [--only NAME ...] [--output FILE]

Each case is a run of the demo's model (`make demo` makes it). The verdict is read where people read it: on the page's
stream of events, and as the first line of `headway status` and of `headway doctor`, in turns. The clock starts at the
first effect: when the fault is made, or, where a setting is the fault, when the first weights are published. A case
passes if all three name its cause and its remedy within 30 s; a healthy run, also beside as many busy programs as
there are cores, passes if no line ever says that it is bounded or sick.
"""

import argparse
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.machine import described_machine
from services.process import parent_death_signal
from tests.chaos.faults import send, tree
from tests.e2e.processes import Launched, Launcher, kill_marked, script
from tests.e2e.run_files import free_ports

HERE = Path(__file__).parents[1]
RESULT = HERE / "benchmarks/results/sick_runs.md"
MODEL = HERE / "models/addition"
LIMIT_S = 30.0
HEALTHY_S = 60.0
_START_S = 240.0
_STEPS_FIRST = 30
_LOOK_S = 0.5
_SLOW_REWARD = """
import time

from pydantic import BaseModel

from reward_service.verifier import Submission


class Arguments(BaseModel):
    answer: str


def slow(submission: Submission, arguments: Arguments) -> float:
    time.sleep(3)
    return float(submission.completion == arguments.answer)
"""


@dataclass(frozen=True)
class SickCase:
    """`says` is what the line has to hold, of cause and of remedy; none for a healthy run. `words` are options for
    processes; `fault` is made once the run goes, and undone by its context manager.
    """

    name: str
    says: tuple[str, ...]
    words: Mapping[str, Sequence[str]] = field(default_factory=dict)
    generators: int = 1
    fault: "Callable[[SickSystem], Iterator[None]] | None" = None
    source: str = "addition"


@dataclass
class SickSystem:
    """The processes of a case."""

    folder: Path
    learner: int
    processes: dict[str, list[Launched]]

    @property
    def metrics(self) -> Path:
        """Its metrics.jsonl."""
        return self.folder / "runs/sick/metrics.jsonl"

    def count(self, kind: str) -> int:
        """Lines of a kind so far."""
        found = self.metrics.read_text(encoding="utf-8") if self.metrics.exists() else ""
        return found.count(f'"kind": "{kind}"')


@dataclass
class SeenLines:
    """The first lines that a place has shown, with the seconds after the first effect."""

    place: str
    lines: list[tuple[float, str]] = field(default_factory=list)

    def first(self, says: Sequence[str]) -> tuple[float, str] | None:
        """When it first said all of these words, and its line then."""
        return next((one for one in self.lines if all(re.search(word, one[1]) for word in says)), None)


def _stopped_generator(system: SickSystem) -> Iterator[None]:
    pid = system.processes["generator"][0].pid
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def _no_reward_service(system: SickSystem) -> Iterator[None]:
    system.processes["reward-service"][0].end()
    yield


def _slow_generator(system: SickSystem) -> Iterator[None]:
    """The processes of one of them run for a twentieth of the time."""
    ended = threading.Event()
    pids = tree(system.processes["generator"][-1].pid)

    def throttle() -> None:
        while not ended.is_set():
            send(signal.SIGSTOP, pids)
            time.sleep(0.19)
            send(signal.SIGCONT, pids)
            time.sleep(0.01)

    thread = threading.Thread(target=throttle)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _busy_machine(system: SickSystem) -> Iterator[None]:
    command = [sys.executable, "-c", "while True: pass"]
    busy = [subprocess.Popen(command, preexec_fn=parent_death_signal) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


CASES = (
    SickCase("healthy", ()),
    SickCase("healthy, busy machine", (), fault=_busy_machine),
    SickCase("no reward service", ("reward-service .*dead", "start it"), fault=_no_reward_service),
    SickCase("slow verifier", ("[Rr]ewards bound", "workers"), source="jsonl"),
    SickCase("stopped generator", ("generator .*a signal has stopped it", "kill -CONT"), fault=_stopped_generator),
    SickCase(
        "capacity 2",
        ("capacity 2 is full", "raise env-service.capacity"),
        {
            "env-service": ["--capacity", "2"],
            "learner": [
                "--rollouts.group-size",
                "2",
                "--training.epochs-per-step",
                "1",
                "--training.updates-per-step",
                "1",
            ],
        },
    ),
    SickCase(
        "trainer bound",
        ("Training bounds", "learner.ranks"),
        {"learner": ["--training.epochs-per-step", "16", "--training.updates-per-step", "4"]},
    ),
    SickCase("slow generator", ("is slow", "what else runs"), generators=3, fault=_slow_generator),
)


@contextmanager
def running(case: SickCase, folder: Path) -> Iterator[SickSystem]:
    """The processes of a case, until the body ends."""
    learner, leases, reward, env, *generators = free_ports(4 + case.generators)
    shutil.copy(HERE / "examples/own_task/sums.jsonl", folder / "sums.jsonl")
    (folder / "slow_reward.py").write_text(_SLOW_REWARD, encoding="utf-8")
    rows = (folder / "sums.jsonl").read_text(encoding="utf-8")
    (folder / "sums.jsonl").write_text(rows.replace('"verifier": "digits"', '"verifier": "slow"'), encoding="utf-8")
    (folder / "run.toml").write_text(_run_file(case, folder, learner, leases, reward, env), encoding="utf-8")
    launch = Launcher(folder)
    processes: dict[str, list[Launched]] = {}
    with ExitStack() as stack:
        stack.callback(kill_marked, launch.mark)

        def start(name: str, *more: str) -> None:
            words = ["--config", str(folder / "run.toml"), *case.words.get(name, ()), *more]
            processes.setdefault(name, []).append(launch(name, *words))

        start("reward-service")
        start("env-service")
        for port in generators:
            start("generator", "--http.port", str(port))
        start("learner")
        yield SickSystem(folder, learner, processes)


def _run_file(case: SickCase, folder: Path, learner: int, leases: int, reward: int, env: int) -> str:
    more = "\nchat = false\ntrain_file = 'sums.jsonl'" if case.source == "jsonl" else ""
    return f"""
[run]
name = "sick"
directory = "{folder / "runs"}"
[learner]
model = "{MODEL}"
steps = 100000
groups_per_step = 64
max_lag = 1
http = {{ port = {learner} }}
leases = {{ address = "tcp://127.0.0.1:{leases}" }}
rollouts = {{ group_size = 4, max_tokens = 5 }}
evaluation = {{ tasks = 0, final_tasks = 0 }}
training = {{ updates_per_step = 2, epochs_per_step = 2, optimizer = {{ learning_rate = 1e-9 }} }}
[generator]
model = "{MODEL}"
http = {{ port = 0 }}
engine = {{ dtype = "float32", max_model_len = 64, max_num_seqs = {256 // case.generators}, kv_cache_gb = 0.25 }}
join = {{ learner = "http://127.0.0.1:{learner}" }}
[reward-service]
sandbox = "off"
http = {{ port = {reward} }}
[[reward-service.verifiers]]
name = "slow"
function = "slow_reward:slow"
[env-service]
model = "{MODEL}"
capacity = 32
http = {{ port = {env} }}
learner = "tcp://127.0.0.1:{leases}"
reward_urls = ["http://127.0.0.1:{reward}"]
[[env-service.environments]]
name = "addition"
source = "{case.source}"{more}
"""


def examined(case: SickCase, system: SickSystem) -> list[SeenLines]:
    """Lines of the three places from the first effect on, until all have said it or the time is over."""
    _until(lambda: system.count("publish") > 0, "the first publish", system)
    with ExitStack() as stack:
        if case.fault is not None:
            _until(lambda: system.count("step") >= _STEPS_FIRST, "the first steps", system)
            stack.enter_context(contextmanager(case.fault)(system))
        elif not case.says:
            _until(lambda: system.count("step") >= _STEPS_FIRST, "the first steps", system)
        began = time.monotonic()
        page, status, doctor = places = [SeenLines("page"), SeenLines("status"), SeenLines("doctor")]
        ended = threading.Event()
        reader = threading.Thread(target=_read_page, args=(system, page, began, ended))
        reader.start()
        try:
            limit_s = LIMIT_S if case.says else HEALTHY_S
            while time.monotonic() - began < limit_s and not _all_said(case, places):
                for place in (status, doctor):
                    line = _first_line(place.place, system)
                    place.lines.append((time.monotonic() - began, line))
        finally:
            ended.set()
            reader.join()
    return places


def _all_said(case: SickCase, places: Sequence[SeenLines]) -> bool:
    return bool(case.says) and all(place.first(case.says) for place in places)


def _first_line(command: str, system: SickSystem) -> str:
    words = [script("headway"), command, str(system.folder / "run.toml")]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    return (done.stdout or done.stderr).partition("\n")[0].removeprefix("verdict: ")


def _read_page(system: SickSystem, page: SeenLines, began: float, ended: threading.Event) -> None:
    """Follows the page's stream of events, as a browser does."""
    while not ended.wait(_LOOK_S):
        with suppress(OSError, http.client.HTTPException, ValueError):
            connection = http.client.HTTPConnection("127.0.0.1", system.learner, timeout=5)
            try:
                connection.request("GET", "/page/data/events?run=0")
                answer = connection.getresponse()
                event = ""
                while not ended.is_set() and (line := answer.readline().decode()):
                    if line.startswith("event:"):
                        event = line.split()[1]
                    elif line.startswith("data:") and event == "status":
                        event = ""
                        verdict = json.loads(line[5:]).get("verdict")
                        page.lines.append((time.monotonic() - began, verdict["text"] if verdict else ""))
            finally:
                connection.close()


def _until(holds: Callable[[], bool], what: str, system: SickSystem) -> None:
    deadline = time.monotonic() + _START_S
    while not holds():
        gone = [name for name, ones in system.processes.items() if not all(one.alive for one in ones)]
        if gone or time.monotonic() > deadline:
            raise SystemExit(f"waited for {what} in vain, {gone or 'all processes'} in {system.folder}")
        time.sleep(_LOOK_S)


def row_of(case: SickCase, places: Sequence[SeenLines]) -> tuple[bool, str]:
    """True if it passed, and its row of the table."""
    if not case.says:
        wrong = [
            f"{place.place} after {at:.0f} s: {line}"
            for place in places
            for at, line in place.lines
            if line and not line.startswith(("Healthy", "On the way"))
        ]
        seen = sum(len(place.lines) for place in places)
        line = wrong[0] if wrong else places[0].lines[-1][1]
        return not wrong, f"| {case.name} | {len(wrong)} of {seen} lines wrong | | | {line} |"
    firsts = [place.first(case.says) for place in places]
    cells = " | ".join("never" if first is None else f"{first[0]:.0f}" for first in firsts)
    newest = next((place.lines[-1][1] for place in places if place.lines), "")
    line = next((first[1] for first in firsts if first is not None), newest)
    in_time = all(first is not None and first[0] <= LIMIT_S for first in firsts)
    return in_time, f"| {case.name} | {cells} | {line} |"


def main() -> int:
    """Runs the cases, and writes their table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=[case.name for case in CASES], default=None)
    parser.add_argument("--output", type=Path, default=None, help="the table's file; shown only, if left out")
    given = parser.parse_args()
    rows, passed = [], True
    for case in CASES:
        if given.only is not None and case.name not in given.only:
            continue
        with tempfile.TemporaryDirectory(prefix="sick-") as name, running(case, Path(name)) as system:
            places = examined(case, system)
            good, row = row_of(case, places)
        passed = passed and good
        rows.append(row)
        sys.stdout.write(f"{'passed' if good else 'FAILED'} {row}\n")
        for place in () if good else places:
            sys.stdout.writelines(f"  {place.place} {at:5.1f} {line}\n" for at, line in place.lines)
        sys.stdout.flush()
    if given.output is not None:
        given.output.write_text(_page(rows), encoding="utf-8")
    return 0 if passed else 1


def _page(rows: Sequence[str]) -> str:
    return (
        "# Sick runs: what the first line says, and when\n\n"
        f"`python -m benchmarks.sick_runs --output benchmarks/results/sick_runs.md` on {described_machine()}. Seconds "
        "from the first effect until the page, the first line of `headway status` and that of `headway doctor` name "
        f"cause and remedy; at most {LIMIT_S:.0f} are allowed. A healthy run is watched for {HEALTHY_S:.0f} s.\n\n"
        "| run | page | status | doctor | the line |\n|---|---|---|---|---|\n" + "\n".join(rows) + "\n"
    )


if __name__ == "__main__":
    sys.exit(main())
