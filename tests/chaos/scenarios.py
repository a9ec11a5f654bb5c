"""The scenarios of `make chaos`, by name. Each does something to a system under way; `trial` judges what it left."""

import time
from collections.abc import Callable
from dataclasses import replace
from signal import SIGKILL

from tests.chaos.control_watch import CONTROL, TRAFFIC
from tests.chaos.faults import limit_file_size, send
from tests.chaos.journal_reader import journal_end
from tests.chaos.kill_points import kill_in_sync, kill_learner_in_checkpoint, kill_learner_in_publish
from tests.chaos.lease_tap import Disturbance
from tests.chaos.network import Trouble
from tests.chaos.run_config import LONGEST_DEADLINE_S
from tests.chaos.system import LEARNER
from tests.chaos.trial import Stage, Trial

HANG_S = LONGEST_DEADLINE_S + 4.0
SERVES_WITHIN_S = 30.0
LEARNER_KILLS = 20


def generator_killed_one_of_two(trial: Trial) -> None:
    """At each moment of its life, while another one serves."""
    for moment in MOMENTS:
        _kill_generator(trial, "g1", moment)
        trial.restart("g1")
        trial.serves("g1")


def generator_killed_the_only_one(trial: Trial) -> None:
    """At each moment of its life: the run waits, and goes on when it returns."""
    for moment in MOMENTS:
        struck = MOMENTS[moment](trial, "g1")
        trial.restart("g1")
        trial.recover(f"the only generator killed {moment}, started again", since=struck)
        trial.serves("g1")


def _kill_generator(trial: Trial, name: str, moment: str) -> None:
    struck = MOMENTS[moment](trial, name)
    trial.recover(f"{name} of two killed {moment}", since=struck)


def _kill_when(trial: Trial, name: str, condition: Callable[[int], bool]) -> float:
    system = trial.system
    deadline = time.monotonic() + 20
    while not condition(int(system.state(name).get("running", 0))) and time.monotonic() < deadline:
        continue
    return trial.kill(name)


def _kill_in(path: str, moment: str) -> Callable[[Trial, str], float]:
    def kill(trial: Trial, name: str) -> float:
        trial.expected.add(name)
        return kill_in_sync(trial.system, name, path, "on" if moment == "on" else "middle")

    return kill


MOMENTS: dict[str, Callable[[Trial, str], float]] = {
    "while idle": lambda trial, name: _kill_when(trial, name, lambda running: running == 0),
    "while generating": lambda trial, name: _kill_when(trial, name, lambda running: running > 0),
    "in prepare": _kill_in("prepare", "on"),
    "in a broadcast": _kill_in("prepare", "middle"),
    "in commit": _kill_in("commit", "on"),
    "in the middle of commit": _kill_in("commit", "middle"),
}


def generator_joins(trial: Trial) -> None:
    """A second generator during the run, three times; the first drains on SIGTERM at the end."""
    system = trial.system
    for number in range(3):
        began = time.monotonic()
        system.start("g2")
        waited = trial.serves("g2")
        passed = time.monotonic() - began
        trial.note(f"join {number + 1}: serving {waited:.1f} s after it was ready, {passed:.1f} s after its start")
        if waited > SERVES_WITHIN_S:
            trial.complain(f"g2 served {waited:.0f} s after it was ready; {SERVES_WITHIN_S:g} s are allowed")
        struck = time.monotonic()
        if number < 2:
            trial.expected.add("g2")
            _leave(trial, "g2")
            trial.recover("g2 leaves on SIGTERM", since=struck)
    struck = time.monotonic()
    trial.expected.add("g1")
    _leave(trial, "g1")
    trial.recover("g1 leaves on SIGTERM, g2 serves on", since=struck)


def _leave(trial: Trial, name: str) -> None:
    code = trial.system.stop(name)
    if code != 0:
        trial.complain(f"{name} ended with {code} on SIGTERM")


def learner_killed(trial: Trial) -> None:
    """At random moments; every fourth in a checkpoint, every fourth in a publish."""
    for number in range(LEARNER_KILLS):
        trial.expected.add(LEARNER)
        if number % 4 == 1:
            what, struck = "in a checkpoint", kill_learner_in_checkpoint(trial.system)
        elif number % 4 == 3:
            what, struck = "in a publish", kill_learner_in_publish(trial.system, "g1")
        else:
            time.sleep(trial.random.uniform(0.0, 4.0))
            what, struck = "at a random moment", trial.kill(LEARNER)
        trial.restart(LEARNER)
        if not trial.recover(f"learner killed {what}", since=struck):
            return


def hangs(trial: Trial) -> None:
    """SIGSTOP of each process for longer than every deadline, then SIGCONT."""
    for name, engine_only in (("g1", False), ("g1", True), ("e1", False), ("r1", False), (LEARNER, False)):
        what = f"{name}'s engine hangs" if engine_only else f"{name} hangs"
        struck = time.monotonic()
        go_on = trial.system.hang(name, engine_only=engine_only)
        if name != LEARNER:
            trial.recover(f"{what}, another one works", since=struck)
        time.sleep(max(0.0, struck + HANG_S - time.monotonic()))
        go_on()
        resumed = time.monotonic()
        trial.recover(f"{what} for {HANG_S:g} s and goes on", since=resumed)
        trial.revive()
        for generator in ("g1", "g2"):
            trial.serves(generator)


def hangs_alone(trial: Trial) -> None:
    """The same where nobody else can do the work."""
    for name, engine_only in (("g1", False), ("g1", True), ("e1", False), ("r1", False)):
        what = f"{name}'s engine" if engine_only else name
        go_on = trial.system.hang(name, engine_only=engine_only)
        time.sleep(HANG_S)
        go_on()
        resumed = time.monotonic()
        trial.recover(f"{what}, the only one, hangs for {HANG_S:g} s and goes on", since=resumed)
        trial.revive()
        trial.serves("g1")


TROUBLES: dict[str, tuple[Trouble, float]] = {
    "is late by 0.3 s": (Trouble(delay_s=0.3), 4.0),
    "is slow (100 kB/s)": (Trouble(bytes_per_s=1e5), 4.0),
    "is half-open": (Trouble(stalled=True), HANG_S),
    "loses three chunks": (Trouble(drop_chunks=3), 3.0),
    "changes three bytes": (Trouble(flip_bytes=3), 3.0),
}
LINKS = (
    ("leases", ""), ("env:e1", ""), ("reward:r1", ""), ("generator:g1", CONTROL), ("generator:g1", TRAFFIC),
    ("learner:g1", CONTROL), ("learner:g1", TRAFFIC),
)  # fmt: skip


def network(trial: Trial) -> None:
    """Each link with each trouble, and cut."""
    for name, kind in LINKS:
        link, label = trial.system.links[name], f"link {name} {kind}".strip()
        for what, (trouble, for_s) in TROUBLES.items():
            struck, mine = time.monotonic(), link.trouble(kind)
            before = replace(mine)
            mine.__dict__.update(trouble.__dict__)
            if trouble.flip_bytes:
                trial.system.tap.doubt(for_s=for_s)
            time.sleep(for_s)
            mine.__dict__.update(before.__dict__)
            trial.recover(f"{label} {what}", since=struck)
            trial.revive()
        struck = time.monotonic()
        link.cut(refuse=True)
        time.sleep(3.0)
        link.refusing = False
        trial.recover(f"{label} is cut for 3 s", since=struck)
        trial.revive()


def messages(trial: Trial) -> None:
    """Messages between learner and env_service are lost, doubled, late and damaged, kind by kind."""
    kinds = {
        "up": ("finished", "heartbeat", "hello", "failed"),
        "down": ("granted", "acknowledged", "cancelled", "fleet", "welcome"),
    }
    for action in ("drop", "duplicate", "delay", "corrupt"):
        for direction, names in kinds.items():
            struck = time.monotonic()
            trial.system.tap.disturb(
                Disturbance(
                    direction="up" if direction == "up" else "down",
                    action=action,
                    kinds=set(names),
                    times=12,
                    delay_s=5.0,
                )
            )
            time.sleep(3.0)
            trial.system.tap.calm()
            trial.recover(f"messages {direction}: {action}", since=struck)
            trial.revive()


def full_disk(trial: Trial) -> None:
    """No file of the learner's can grow for a while; then there is room again."""
    for for_s in (3.0, HANG_S):
        system = trial.system
        pid, struck = system.nodes[LEARNER].process.pid, time.monotonic()
        limit_file_size(pid, max(1, journal_end(system.run.path).offset))
        time.sleep(for_s)
        if system.nodes[LEARNER].alive:
            limit_file_size(pid, None)
        trial.recover(f"the learner's disk is full for {for_s:g} s", since=struck)


def clock(trial: Trial) -> None:
    """The wall clock of all processes jumps ahead, and back."""
    for offset_s, what in (
        (3600.0, "an hour ahead"),
        (-86400.0, "a day back"),
        (30 * 86400.0, "a month ahead"),
        (0.0, "to now"),
    ):
        trial.system.jump(offset_s)
        struck = time.monotonic()
        trial.recover(f"the clock jumps {what}", since=struck)
        trial.revive()


def env_and_reward_killed(trial: Trial) -> None:
    """One of two of each, then both of each."""
    for names in (("e1",), ("r1",), ("e2",), ("r2",), ("e1", "e2"), ("r1", "r2")):
        struck = time.monotonic()
        for name in names:
            trial.expected.add(name)
            send(SIGKILL, trial.system.pids(name))
        if len(names) == 1:
            trial.recover(f"{names[0]} killed, another one works", since=struck)
        time.sleep(1.0)
        trial.revive()
        trial.recover(f"{' and '.join(names)} killed and started again", since=struck)


TWO_OF_EACH = ("e1", "e2"), ("r1", "r2")
SCENARIOS: dict[str, Stage] = {
    "generator-one-of-two": Stage(generator_killed_one_of_two, steps=400),
    "generator-the-only-one": Stage(generator_killed_the_only_one, steps=200, generators=("g1",)),
    "generator-joins": Stage(generator_joins, steps=800, first=("g1",)),
    "learner-killed": Stage(learner_killed, steps=300),
    "env-and-reward-killed": Stage(
        env_and_reward_killed, steps=300, generators=("g1",), envs=TWO_OF_EACH[0], rewards=TWO_OF_EACH[1]
    ),
    "hangs": Stage(hangs, steps=400, envs=TWO_OF_EACH[0], rewards=TWO_OF_EACH[1]),
    "hangs-alone": Stage(hangs_alone, steps=120, generators=("g1",)),
    "network": Stage(network, steps=600, generators=("g1",)),
    "messages": Stage(messages, steps=200, generators=("g1",)),
    "full-disk": Stage(full_disk, steps=120, generators=("g1",)),
    "clock": Stage(clock, steps=100, generators=("g1",)),
}
