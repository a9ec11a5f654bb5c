"""The soak's processes on this machine: started, struck, and started again, as their supervisor would."""

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP, SIGTERM
from typing import Literal

from benchmarks.soak.run_files import SoakPorts
from learner.reports.growing import Mark, lines_after
from tests.chaos.faults import send, tree
from tests.chaos.journal_reader import Place, journal_end
from tests.e2e.processes import Launched, kill_marked, script
from tests.e2e.run_files import free_ports

LEARNER, GENERATOR, REWARDS, ENV = "learner", "generator", "reward-service", "env-service"
NAMES = (GENERATOR, ENV, REWARDS, LEARNER)
Kind = Literal["killed", "stopped and started", "hung"]
END_S = 120.0


LIVES, ARCHIVE = "lives.jsonl", "archive"


def run_folder(folder: Path) -> Path:
    """The run's, within the soak's."""
    return folder / "runs" / "soak"


def lives_of(folder: Path) -> dict[int, Place]:
    """The journal's end before each start of the learner, by incarnation."""
    lines = (folder / LIVES).read_text(encoding="utf-8").splitlines()
    return {incarnation: Place(file=file, offset=offset) for incarnation, file, offset in map(json.loads, lines)}


@dataclass
class StepReader:
    """Reader of the steps in metrics.jsonl; only new lines are read."""

    path: Path
    steps: int = 0
    mark: Mark = field(default_factory=Mark)

    def read(self) -> int:
        """The newest step that was trained."""
        while (found := lines_after(self.path, self.mark))[0]:
            lines, self.mark = found
            steps = (int(json.loads(line)["step"]) for line in lines if line.startswith(b'{"kind": "step"'))
            self.steps = max(self.steps, *steps, 0)
        return self.steps


@dataclass
class SoakProcess:
    """A process of the four, through all of its starts."""

    name: str
    words: tuple[str, ...]
    launched: Launched | None = None
    starts: int = 0
    started_at: float = 0.0
    started_step: int = 0

    @property
    def alive(self) -> bool:
        return self.launched is not None and self.launched.alive

    @property
    def now(self) -> Launched:
        assert self.launched is not None, f"{self.name} was never started"
        return self.launched


@dataclass
class SoakSystem:
    """All four. `lives.jsonl` in the folder gets the journal's end before each start of the learner."""

    folder: Path
    mark: str
    processes: Mapping[str, SoakProcess]
    progress: StepReader

    @property
    def run(self) -> Path:
        """The run's folder."""
        return run_folder(self.folder)

    def start(self, name: str) -> None:
        """Starts a process, or starts it again; the learner resumes its run."""
        process = self.processes[name]
        again: tuple[str, ...] = ()
        if name == LEARNER:
            again = ("--resume", "true") if process.starts else ()
            self._note_life(process.starts + 1)
        process.started_step = self.progress.read()
        process.started_at = time.monotonic()
        process.launched = Launched(name, [*process.words, *again], folder=self.folder / "logs", mark=self.mark)
        process.starts += 1

    def _note_life(self, incarnation: int) -> None:
        end = journal_end(self.run)
        with (self.folder / LIVES).open("a", encoding="utf-8") as file:
            file.write(json.dumps([incarnation, end.file, end.offset]) + "\n")

    def strike(self, name: str, kind: Kind, *, for_s: float) -> None:
        """Strikes a process with a fault and starts it again. Raises TimeoutExpired for one that does not end."""
        process = self.processes[name]
        pids = tree(process.now.pid)
        if kind == "hung":
            send(SIGSTOP, pids)
            time.sleep(for_s)
            send(SIGCONT, pids)
            return
        send(SIGKILL, pids) if kind == "killed" else process.now.send(SIGTERM)
        process.now.wait(timeout_s=END_S)
        time.sleep(for_s)
        self.start(name)

    def ended_by_itself(self) -> list[str]:
        """Whoever is gone though nobody struck it, with its last line; it is started again."""
        found = []
        for process in self.processes.values():
            if not process.alive and not (process.name == LEARNER and process.now.wait(timeout_s=1) == 0):
                lines = process.now.text().strip().splitlines()
                found.append(f"{process.name}: {lines[-1] if lines else 'it said nothing'}")
                self.start(process.name)
        return found

    def end(self) -> None:
        """Ends whatever runs, in good order if it takes the chance."""
        for process in self.processes.values():
            if process.alive:
                send(SIGCONT, tree(process.now.pid))
                process.now.send(SIGTERM)
        deadline = time.monotonic() + END_S
        while any(process.alive for process in self.processes.values()) and time.monotonic() < deadline:
            time.sleep(0.1)
        kill_marked(self.mark)


def ports() -> SoakPorts:
    """Free ones."""
    return SoakPorts(*free_ports(5))


def system_of(folder: Path, run_file: Path, *, mark: str) -> SoakSystem:
    """The system of a run file; nothing is started yet."""
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    where = ("--config", str(run_file))
    commands = {
        GENERATOR: (sys.executable, "-m", "benchmarks.soak.generator"),
        ENV: (script(ENV),), REWARDS: (script(REWARDS),), LEARNER: (script(LEARNER),),
    }  # fmt: skip
    processes = {name: SoakProcess(name, (*commands[name], *where)) for name in NAMES}
    return SoakSystem(folder, mark, processes, StepReader(run_folder(folder) / "metrics.jsonl"))
