"""Runs a soak: steps go on, faults strike, and the system is measured. All that is seen goes to a file at once."""

import dataclasses
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Literal

from benchmarks.soak.measurements import ProcessEnd, Strike, SystemSample, sample_of
from benchmarks.soak.system import LEARNER, NAMES, Kind, SoakSystem

SAMPLE_EVERY_S = 15.0
POLL_S = 0.2
PATIENCE_S = 600.0
FIRST_FAULT_STEP = 50
LAST_STEPS = 20
HUNG_S = (0.5, 6.0)
AWAY_S = (0.0, 1.0)
KINDS: tuple[Kind, ...] = ("killed", "stopped and started", "hung")


@dataclass(frozen=True)
class SoakPlan:
    """The soak's settings: the first line of the file."""

    kind: Literal["plan"]
    steps: int
    faults_every_steps: float
    seed: int


@dataclass(frozen=True)
class SoakEnd:
    """End of a soak. `well`: the learner ended by itself, with code 0."""

    kind: Literal["end"]
    at_s: float
    steps: int
    learner_starts: int
    well: bool


@dataclass(frozen=True)
class Verdict:
    """Judgement of the history after its end: all complaints."""

    kind: Literal["verdict"]
    broken: list[str]


@dataclass(frozen=True)
class Note:
    """Somebody's remark on the soak."""

    kind: Literal["note"]
    text: str


def append(lines: Path, record: SoakPlan | SystemSample | Strike | ProcessEnd | SoakEnd | Verdict | Note) -> None:
    """Writes one line."""
    with lines.open("a", encoding="utf-8") as file:
        file.write(json.dumps(dataclasses.asdict(record)) + "\n")


@dataclass
class Soaking:
    """Runs a soak to its last step, or until `most_s` seconds have passed."""

    system: SoakSystem
    lines: Path
    steps: int
    every_steps: float
    most_s: float
    seed: int
    random: Random
    say: Callable[[str], None]
    began: float = field(default_factory=time.monotonic)
    sampled_at: float = 0.0
    next_fault: float = 0.0
    faults: int = 0

    def run(self) -> None:
        """Starts all, strikes, and lets the learner come to its end. Raises TimeoutError if steps stop for good."""
        append(self.lines, SoakPlan(kind="plan", steps=self.steps, faults_every_steps=self.every_steps, seed=self.seed))
        for name in NAMES:
            self.system.start(name)
        self._until_step(1)
        self.next_fault = FIRST_FAULT_STEP + self.random.expovariate(1 / self.every_steps)
        while not self._ended and self._elapsed_s < self.most_s:
            self._poll()
            if self.system.progress.read() >= self.next_fault and not self._ended:
                self._strike()
                self.next_fault = self.system.progress.read() + self.random.expovariate(1 / self.every_steps)
        self._finish()

    @property
    def _elapsed_s(self) -> float:
        return round(time.monotonic() - self.began, 1)

    @property
    def _ended(self) -> bool:
        process = self.system.processes[LEARNER]
        return not process.alive and process.now.wait(timeout_s=1) == 0

    def _poll(self) -> None:
        time.sleep(POLL_S)
        for text in self.system.ended_by_itself():
            step = self.system.progress.read()
            self.say(f"step {step}: ended by itself: {text}")
            append(self.lines, ProcessEnd(kind="ended", at_s=self._elapsed_s, step=step, text=text))
        now = time.monotonic()
        if now - self.sampled_at >= SAMPLE_EVERY_S:
            self.sampled_at = now
            found = sample_of(self.system, at_s=self._elapsed_s, now=now)
            append(self.lines, found)
            self.say(f"step {found.step}: {found.rss_mib} MiB, {sum(found.disk_bytes.values()) >> 20} MiB on disk")

    def _until_step(self, step: int) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not self._ended and self.system.progress.read() < step:
            self._poll()
            if time.monotonic() > deadline:
                raise TimeoutError(f"step {step} did not come within {PATIENCE_S:g} s")

    def _strike(self) -> None:
        name, kind, step = self._drawn(), self.random.choice(KINDS), self.system.progress.read()
        if name == self._spared:
            kind = "hung"
        lasts_s = self.random.uniform(*(HUNG_S if kind == "hung" else AWAY_S))
        self.faults += 1
        self.say(f"step {step}: fault {self.faults}: {name} {kind}")
        struck = time.monotonic()
        self.system.strike(name, kind, for_s=lasts_s)
        back, step = time.monotonic(), self.system.progress.read()
        self._until_step(step + 1)
        lasted_s, next_step_s = round(back - struck, 2), round(time.monotonic() - back, 2)
        told = Strike(
            kind="fault", at_s=self._elapsed_s, step=step, process=name, how=kind, lasted_s=lasted_s,
            next_step_s=next_step_s,
        )  # fmt: skip
        append(self.lines, told)

    def _drawn(self) -> str:
        return self.random.choice(NAMES)

    @property
    def _spared(self) -> str:
        """The process that is spared in this quarter of the run, by steps or by time, whichever is further."""
        done = max(self.system.progress.read() / self.steps, self._elapsed_s / self.most_s)
        return NAMES[min(int(done * len(NAMES)), len(NAMES) - 1)]

    def _finish(self) -> None:
        """If time is over, the learner resumes to a last step that is a few steps on, and ends there."""
        if not self._ended:
            self.steps = min(self.steps, self.system.progress.read() + LAST_STEPS)
            self.say(f"time is over: the run ends at step {self.steps}")
            self.system.processes[LEARNER].words += ("--steps", str(self.steps))
            self.system.strike(LEARNER, "stopped and started", for_s=0.0)
        self._until_step(self.steps + 1)
        learner = self.system.processes[LEARNER]
        well, steps = learner.now.wait(timeout_s=1) == 0, self.system.progress.read()
        append(
            self.lines, SoakEnd(kind="end", at_s=self._elapsed_s, steps=steps, learner_starts=learner.starts, well=well)
        )
