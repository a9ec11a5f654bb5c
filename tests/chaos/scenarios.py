"""The scenarios of `make chaos`, by name. Each does something to a system under way; `trial` judges what it left."""

import time
from collections.abc import Callable
from dataclasses import replace
from signal import SIGCONT, SIGKILL, SIGSTOP

from protocol.messages import FinishedLease, Message
from services.process import START_AGAIN
from tests.chaos.control_watch import CONTROL, TRAFFIC
from tests.chaos.faults import limit_file_size, send
from tests.chaos.journal_reader import journal_end
from tests.chaos.kill_points import kill_in_sync, kill_learner_in_checkpoint, kill_learner_in_publish
from tests.chaos.lease_tap import Disturbance
from tests.chaos.network import Trouble
from tests.chaos.run_config import MAX_DEADLINE_S
from tests.chaos.system import LEARNER, RANKS_END_S
from tests.chaos.trial import ScenarioSetting, Trial

HANG_S = MAX_DEADLINE_S + 4.0
ALERT_S = 5.0
"""So much longer, and an alert that waits for five minutes fires in hurried time on a busy machine, too."""
SERVES_WITHIN_S = 30.0
LEARNER_KILLS = 20
SENDER_KILLS = 5
QUIET_S = 75.0


def generator_killed_one_of_two(trial: Trial) -> None:
    """At each moment of its life, while another one serves."""
    for moment in MOMENTS:
        _kill_generator(trial, "g1", moment)
        trial.restart("g1")
        trial.serves("g1")


def generator_killed_the_only_one(trial: Trial) -> None:
    """At each moment of its life: the run waits, and goes on when it returns, with the learner's weights."""
    for moment in MOMENTS:
        struck = MOMENTS[moment](trial, "g1")
        trial.restart("g1")
        trial.recover(f"the only generator killed {moment}, started again", since=struck)
        trial.serves("g1")
        trial.sample("g1")


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
    """At random moments, every fourth in a checkpoint, every fourth in a publish; of several ranks one by chance."""
    for number in range(LEARNER_KILLS):
        trial.expected.add(LEARNER)
        if number % 4 == 1:
            what, struck = "in a checkpoint", kill_learner_in_checkpoint(trial.system, rank=trial.any_rank())
        elif number % 4 == 3:
            what, struck = "in a publish", kill_learner_in_publish(trial.system, "g1", rank=trial.any_rank())
        else:
            time.sleep(trial.random.uniform(0.0, 4.0))
            what, struck = "at a random moment", trial.kill_learner()
        trial.restart(LEARNER)
        if not trial.recover(f"learner killed {what}", since=struck):
            return


def hangs(trial: Trial) -> None:
    """SIGSTOP of each process for longer than every deadline, then SIGCONT."""
    for name, engine_only in (("g1", False), ("g1", True), ("e1", False), ("r1", False), (LEARNER, False)):
        what = f"{name}'s engine hangs" if engine_only else f"{name} hangs"
        struck = time.monotonic()
        go_on = trial.hang_learner() if name == LEARNER else trial.system.hang(name, engine_only=engine_only)
        if name != LEARNER:
            trial.recover(f"{what}, another one works", since=struck)
        time.sleep(max(0.0, struck + HANG_S - time.monotonic()))
        go_on()
        resumed = time.monotonic()
        if LEARNER in trial.expected:  # it has given up a rank
            trial.revive()
        trial.recover(f"{what} for {HANG_S:g} s and goes on", since=resumed)
        trial.revive()
        for generator in ("g1", "g2"):
            trial.serves(generator)


def ranks_hang(trial: Trial) -> None:
    """SIGSTOP of each rank in turn for longer than every deadline: one that is silent is given up, rank 0 is not."""
    for rank in (1, 0, 1):
        struck = time.monotonic()
        process, victims = trial.system.nodes[LEARNER].process, trial.system.victims(rank)
        send(SIGSTOP, victims)
        time.sleep(HANG_S)
        send(SIGCONT, victims)
        if rank:
            trial.expected.add(LEARNER)
            if process.wait(timeout_s=RANKS_END_S) != START_AGAIN:
                trial.complain(f"the learner did not ask for a new start: {process.text()[-600:]}")
            trial.revive()
        trial.recover(f"rank {rank} of two hangs for {HANG_S:g} s", since=struck)
        for generator in ("g1", "g2"):
            trial.serves(generator)


def sender_killed(trial: Trial) -> None:
    """SIGKILL of rank 1 while it sends its share, time and again; the last time a generator joins meanwhile."""
    for number in range(SENDER_KILLS):
        trial.expected.add(LEARNER)
        struck = kill_learner_in_publish(trial.system, "g1", rank=1)
        if number == SENDER_KILLS - 1:
            trial.expected.add("g2")
            trial.kill("g2")
            trial.restart("g2")
        trial.restart(LEARNER)
        trial.recover("rank 1 is killed while it sends its share", since=struck)
        for generator in ("g1", "g2"):
            trial.serves(generator)


def full_disk_of_a_rank(trial: Trial) -> None:
    """No file of rank 1 can grow for a while: checkpoints fail, and the run goes on."""
    system = trial.system
    (rank,) = system.victims(1)
    learner = system.nodes[LEARNER].process
    struck = time.monotonic()
    limit_file_size(rank, 1)
    system.wait(lambda: "no checkpoint of version" in learner.text(), "a checkpoint that fails", timeout_s=60)
    trial.recover("the disk of rank 1 is full at a checkpoint", since=struck)
    limit_file_size(rank, None)
    trial.recover("rank 1 has room again", since=time.monotonic())


def hangs_alone(trial: Trial) -> None:
    """The same where nobody else can do the work."""
    for name, engine_only in (("g1", False), ("g1", True), ("e1", False), ("r1", False)):
        what = f"{name}'s engine" if engine_only else name
        hang_s = HANG_S + ALERT_S if name == "g1" else HANG_S
        go_on = trial.system.hang(name, engine_only=engine_only)
        time.sleep(hang_s)
        go_on()
        resumed = time.monotonic()
        trial.recover(f"{what}, the only one, hangs for {hang_s:g} s and goes on", since=resumed)
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
    """Kills one of two of each, then both of each."""
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


def started_twice(trial: Trial) -> None:
    """A second learner of the same run, on other ports: while the first works, hangs, and is resumed after a kill."""
    system = trial.system
    _second_start(trial, "while the first one works")
    go_on = system.hang(LEARNER)
    _second_start(trial, "with --resume, while the first one hangs", "--resume", "true")
    go_on()
    trial.recover("a second start while the learner hangs", since=time.monotonic())
    trial.kill(LEARNER)
    steps = system.steps()
    trial.restart(LEARNER)
    trial.recover("learner killed after a second start", since=time.monotonic())
    _second_start(trial, "with --resume, while the first one is resumed", "--resume", "true")
    if system.steps() < steps:
        trial.complain(f"the run is at step {system.steps()} after {steps}")


def _second_start(trial: Trial, when: str, *words: str) -> None:
    system, folder = trial.system, trial.system.run.path.parent
    others = ("--http.port", "0", "--leases.address", "tcp://127.0.0.1:*")
    second = system.launch("learner", "--config", str(system.run_file), *others, *words)
    code, said = second.wait(timeout_s=120), second.text()
    if code != 1 or "is that of process" not in said:
        trial.complain(f"a second start {when} ended with {code}: {said[-300:]}")
    if (left := sorted(path.name for path in folder.iterdir())) != [system.run.path.name]:
        trial.complain(f"a second start {when} left {left} in {folder}")
    trial.note(f"a second start {when} is refused")


def never_ending(trial: Trial) -> None:
    """The first attempts at three leases never end, though their env_service says that it is at work."""
    system = trial.system
    for number in range(3):
        lease_id = (system.steps() + 2 * system.size.max_lag) * system.size.groups_per_step + number

        def is_first_attempt(message: Message, lease_id: int = lease_id) -> bool:
            return isinstance(message, FinishedLease) and (message.group.lease_id, message.group.attempt) == (
                lease_id,
                0,
            )

        system.tap.disturb(
            Disturbance(direction="up", action="drop", kinds={"finished"}, times=1 << 30, only=is_first_attempt)
        )
        waited = _reaches(trial, lease_id // system.size.groups_per_step + system.size.max_lag + 2)
        trial.note(f"lease {lease_id} never ends at its first attempt: training is past it after {waited:.1f} s")
        system.tap.calm()
        trial.recover(f"the group of lease {lease_id} comes at last", since=time.monotonic())


def _reaches(trial: Trial, step: int) -> float:
    system = trial.system
    return system.wait(lambda: system.steps() >= step, f"step {step}", timeout_s=120)


def namesakes(trial: Trial) -> None:
    """A second env_service is started under the name of the first, by mistake; then the first one dies."""
    first, second = "e1", "e2"
    for name in (first, second):
        _restart_as(trial, name, "same")
    for name in (first, second):
        other = second if name == first else first
        trial.system.wait(lambda: _is_refused(trial), "one of them to be told that the name is taken", timeout_s=60)
        struck = trial.kill(name)
        trial.recover(f"{name} is killed, {other} goes by the name", since=struck)
        trial.expected.discard(name)
        trial.system.start(name, "--env-id", "same")
        trial.recover(f"{name} is started under the name of {other}", since=time.monotonic())


def _restart_as(trial: Trial, name: str, env_id: str) -> None:
    trial.kill(name)
    trial.system.start(name, "--env-id", env_id)
    trial.expected.discard(name)


def _is_refused(trial: Trial) -> bool:
    return any("the name same is taken" in trial.system.nodes[name].process.text() for name in ("e1", "e2"))


def quiet(trial: Trial) -> None:
    """Nothing is done to it for a while, and no alert fires."""
    began = trial.system.steps()
    time.sleep(QUIET_S)
    trial.note(f"{trial.system.steps() - began} steps in {QUIET_S:g} s without a fault")


TWO_OF_EACH = ("e1", "e2"), ("r1", "r2")
SCENARIOS: dict[str, ScenarioSetting] = {
    "quiet": ScenarioSetting(quiet, steps=120, alerts=None),
    "generator-one-of-two": ScenarioSetting(generator_killed_one_of_two, steps=700),
    "generator-the-only-one": ScenarioSetting(
        generator_killed_the_only_one, steps=200, generators=("g1",), alerts={"ProcessDown", "NoGenerator"}
    ),
    "mixture-the-only-one": ScenarioSetting(
        generator_killed_the_only_one,
        steps=200,
        generators=("g1",),
        alerts={"ProcessDown", "NoGenerator"},
        mixture=True,
    ),
    "generator-joins": ScenarioSetting(generator_joins, steps=800, first=("g1",)),
    "learner-killed": ScenarioSetting(learner_killed, steps=300, alerts={"ProcessDown", "StepsReplayed"}),
    "learner-killed-two-ranks": ScenarioSetting(learner_killed, steps=300, ranks=2),
    "sender-killed": ScenarioSetting(sender_killed, steps=150, ranks=2, learner_words=("--training.zero-stage", "3")),
    "ranks-hang": ScenarioSetting(ranks_hang, steps=150, ranks=2),
    "full-disk-of-a-rank": ScenarioSetting(full_disk_of_a_rank, steps=60, generators=("g1",), ranks=2),
    "started-twice": ScenarioSetting(started_twice, steps=100, generators=("g1",)),
    "env-and-reward-killed": ScenarioSetting(
        env_and_reward_killed,
        steps=300,
        generators=("g1",),
        envs=TWO_OF_EACH[0],
        rewards=TWO_OF_EACH[1],
        alerts={"ProcessDown"},
    ),
    "hangs": ScenarioSetting(hangs, steps=400, envs=TWO_OF_EACH[0], rewards=TWO_OF_EACH[1]),
    "never-ending": ScenarioSetting(
        never_ending, steps=200, generators=("g1",), learner_words=("--leases.longest-attempt-s", "8")
    ),
    "namesakes": ScenarioSetting(namesakes, steps=120, generators=("g1",), envs=TWO_OF_EACH[0]),
    "hangs-alone": ScenarioSetting(hangs_alone, steps=120, generators=("g1",), alerts={"ProcessDown", "NoGenerator"}),
    "network": ScenarioSetting(network, steps=600, generators=("g1",)),
    "messages": ScenarioSetting(messages, steps=200, generators=("g1",)),
    "full-disk": ScenarioSetting(full_disk, steps=120, generators=("g1",), alerts={"DiskRefusesWrites"}),
    "clock": ScenarioSetting(clock, steps=100, generators=("g1",)),
}
