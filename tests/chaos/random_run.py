"""The demo under random faults: it reaches the accuracy of the quiet demo, and its books balance."""

import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from signal import SIGCONT, SIGKILL, SIGSTOP

from tests.chaos.control_watch import CONTROL, TRAFFIC
from tests.chaos.faults import limit_file_size, send
from tests.chaos.journal_reader import journal_end
from tests.chaos.lease_tap import Action, Disturbance
from tests.chaos.network import Trouble
from tests.chaos.outcomes import ScenarioOutcome
from tests.chaos.run_config import RunSize
from tests.chaos.system import LEARNER, ChaosSystem, chaos_system
from tests.chaos.trial import Trial, finish
from tests.e2e.processes import ROOT, Launched

RANDOM, RANDOM_RANKS = "random-over-the-demo", "random-over-the-demo-two-ranks"
DEMO = ROOT / "examples/addition/run.toml"
SIZE = RunSize(
    **{
        name: number
        for name, number in tomllib.loads(DEMO.read_text(encoding="utf-8"))["learner"].items()
        if name in ("steps", "groups_per_step", "max_lag")
    }
)
"""Size of the run by the demo's file, which the run is judged by."""
ACCURACY_WITHIN = 0.03
BRAKE_S = 0.3
PATIENCE_S = 240.0


@dataclass(frozen=True)
class FaultUnderWay:
    """A fault under way: its description, and the call that undoes it when it has lasted `for_s`."""

    words: str
    for_s: float
    undo: Callable[[], None]


def random_run(*, folder: Path, faults: int, seed: int, say: Callable[[str], None], ranks: int = 1) -> ScenarioOutcome:
    """The demo without faults and then with many: kills, hangs, troubled links and messages, a full disk, the clock."""
    began = time.monotonic()
    outcome = ScenarioOutcome(scenario=RANDOM if ranks == 1 else RANDOM_RANKS, seed=seed)
    quiet = _demo(folder / "quiet", outcome, faults=0, seed=seed, say=say, ranks=ranks)
    chaotic = _demo(folder / "chaotic", outcome, faults=faults, seed=seed, say=say, ranks=ranks)
    outcome.notes.append(f"accuracy on 2,000 held-out problems: {quiet} without faults, {chaotic} with {faults}")
    if quiet is None or chaotic is None or chaotic < quiet - ACCURACY_WITHIN:
        outcome.complaints.append(f"accuracy {chaotic} with faults, {quiet} without; within {ACCURACY_WITHIN} expected")
    outcome.seconds = time.monotonic() - began
    return outcome


def _demo(
    folder: Path, outcome: ScenarioOutcome, *, faults: int, seed: int, say: Callable[[str], None], ranks: int
) -> float | None:
    """Runs the demo under faults; returns its final accuracy."""
    with chaos_system(folder, model=ROOT / "models/addition", size=SIZE, run_file=DEMO, ranks=ranks) as system:
        trial = Trial(system=system, random=Random(seed), outcome=outcome, say=say)
        system.start_all()
        try:
            system.wait(lambda: system.steps() >= 2, "two steps", timeout_s=240)
            for number in range(faults):
                _brake(system, done=number / faults)
                if not _strike(trial, number):
                    return None
            system.pace(0.0)
            finish(trial)
            return _accuracy(system)
        finally:
            system.end_all()


def _strike(trial: Trial, number: int) -> bool:
    """Strikes with a fault for its time, and undoes it. True if the run went on."""
    fault = trial.random.choice(FAULTS)(trial)
    trial.say(f"fault {number + 1}: {fault.words}")
    struck = time.monotonic()
    time.sleep(fault.for_s)
    fault.undo()
    trial.revive()
    went_on = trial.recover(fault.words, since=struck, patience_s=PATIENCE_S)
    time.sleep(trial.random.uniform(0.0, 3.0))
    return went_on


def _brake(system: ChaosSystem, *, done: float) -> None:
    """Slows rewards down while training is further along than the faults, or it would be over before them."""
    system.pace(BRAKE_S if system.steps() / system.size.steps > done else 0.0)


def _accuracy(system: ChaosSystem) -> float | None:
    found = [line["accuracy"] for line in system.run.metrics("evaluation") if line["version"] == system.size.steps]
    return float(found[-1]) if found else None


def _kill(name: str) -> Callable[[Trial], FaultUnderWay]:
    def strike(trial: Trial) -> FaultUnderWay:
        trial.expected.add(name)
        trial.system.kill(name)
        return FaultUnderWay(f"{name} killed", trial.random.uniform(0.0, 5.0), lambda: None)

    return strike


def _kill_learner(trial: Trial) -> FaultUnderWay:
    trial.kill_learner()
    return FaultUnderWay("the learner killed", trial.random.uniform(0.0, 5.0), lambda: None)


def _hang_learner(trial: Trial) -> FaultUnderWay:
    for_s = trial.random.uniform(0.5, 40.0)
    return FaultUnderWay(f"the learner hangs for {for_s:.0f} s", for_s, trial.hang_learner())


def _kill_engine(trial: Trial) -> FaultUnderWay:
    pids = _pids(trial, "g1", engine_only=True)
    trial.expected.add("g1")
    send(SIGKILL, pids)
    ended = trial.system.nodes["g1"].process
    return FaultUnderWay("g1's engine killed", 3.0, lambda: _await_end(ended))


def _pids(trial: Trial, name: str, *, engine_only: bool) -> list[int]:
    """Of one that was started again a moment ago the engine has to be waited for."""
    if engine_only:
        trial.system.wait(lambda: bool(trial.system.pids(name, engine_only=True)), f"an engine of {name}", timeout_s=60)
    return trial.system.pids(name, engine_only=engine_only)


def _await_end(process: Launched) -> None:
    """A generator ends by itself without its engine."""
    process.wait(timeout_s=60)


def _hang(name: str, *, engine_only: bool = False) -> Callable[[Trial], FaultUnderWay]:
    def strike(trial: Trial) -> FaultUnderWay:
        pids, for_s = _pids(trial, name, engine_only=engine_only), trial.random.uniform(0.5, 40.0)
        send(SIGSTOP, pids)
        who = f"{name}'s engine" if engine_only else name
        return FaultUnderWay(f"{who} hangs for {for_s:.0f} s", for_s, lambda: send(SIGCONT, pids))

    return strike


def _trouble(trial: Trial) -> FaultUnderWay:
    name, kind = trial.random.choice(
        [("leases", ""), ("env:e1", ""), ("generator:g1", CONTROL), ("generator:g2", TRAFFIC), ("learner:g1", CONTROL)]
    )
    link, for_s = trial.system.links[name], trial.random.uniform(1.0, 20.0)
    what, trouble = trial.random.choice(
        [
            ("late", Trouble(delay_s=0.2)), ("slow", Trouble(bytes_per_s=2e5)), ("half-open", Trouble(stalled=True)),
            ("losing chunks", Trouble(drop_chunks=3)), ("changing bytes", Trouble(flip_bytes=3)),
        ]
    )  # fmt: skip
    link.trouble(kind).__dict__.update(trouble.__dict__)
    if trouble.flip_bytes:
        trial.system.tap.doubt(for_s=for_s)
    return FaultUnderWay(f"link {name} {kind} is {what} for {for_s:.0f} s", for_s, link.heal)


def _cut(trial: Trial) -> FaultUnderWay:
    name = trial.random.choice(sorted(trial.system.links))
    link = trial.system.links[name]
    link.cut(refuse=True)

    def mend() -> None:
        link.refusing = False

    return FaultUnderWay(f"link {name} is cut", trial.random.uniform(0.5, 10.0), mend)


def _messages(trial: Trial) -> FaultUnderWay:
    actions: tuple[Action, ...] = ("drop", "duplicate", "delay", "corrupt")
    action = trial.random.choice(actions)
    kinds = {"finished", "heartbeat", "granted", "acknowledged", "cancelled", "fleet", "welcome"}
    for direction in ("up", "down"):
        trial.system.tap.disturb(
            Disturbance(
                direction="up" if direction == "up" else "down", action=action, kinds=kinds, times=20, delay_s=8.0
            )
        )
    return FaultUnderWay(f"40 messages: {action}", 3.0, trial.system.tap.calm)


def _full_disk(trial: Trial) -> FaultUnderWay:
    process = trial.system.nodes[LEARNER].process
    limit_file_size(process.pid, max(1, journal_end(trial.system.run.path).offset))

    def make_room() -> None:
        if process.alive:
            limit_file_size(process.pid, None)

    return FaultUnderWay("the learner's disk is full", trial.random.uniform(1.0, 8.0), make_room)


def _clock(trial: Trial) -> FaultUnderWay:
    offset_s = trial.random.choice([-86400.0, -60.0, 60.0, 3600.0, 0.0])
    trial.system.jump(offset_s)
    return FaultUnderWay(f"the clock is {offset_s:g} s off", 1.0, lambda: None)


FAULTS: tuple[Callable[[Trial], FaultUnderWay], ...] = (
    _kill("g1"), _kill("g2"), _kill("e1"), _kill("r1"), _kill_learner, _kill_learner, _kill_engine,
    _hang("g1"), _hang("g2", engine_only=True), _hang("e1"), _hang("r1"), _hang_learner,
    _trouble, _trouble, _cut, _messages, _full_disk, _clock,
)  # fmt: skip
