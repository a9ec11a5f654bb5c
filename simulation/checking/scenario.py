"""A scenario of a run, drawn from its seed: the size of the system, its rates, and its faults. Plain data.

The kinds of faults: how each begins and how it ends.
"""

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from simulation.actors.cluster import LEARNER, SECOND_LEARNER, ClusterSettings, Service
from simulation.checking.stage import Stage
from simulation.world.disk import DiskStrike
from simulation.world.network import LinkRates
from simulation.world.process import Process

HEARTBEAT_S = 12.0
ELSEWHERE = "learner-elsewhere"
TASKS_APART = 20
"""Every so many tasks one hangs, or raises, where any does."""
CHECKPOINT = "checkpoint-"
"""Prefix of the names of checkpoints."""
_AIMED = (CHECKPOINT, CHECKPOINT)
PERMANENT = ("shared gap", "clock jumps", "task hangs", "task raises", "second env_service")
"""Faults that a run has to go on with, so that they excuse no standstill."""
HARMLESS = ("clock jumps",)
"""Faults that nothing may go wrong by: not even what is borne after others."""
_MAX_S = 90.0
_LONGER, _RARELY = 15.0, 0.06
"""So many times longer some outages are."""
_SELDOM = 0.12
_AIM_S = 0.3
"""Within so many seconds of a checkpoint, or of a sync."""
_LEARNER_KINDS = ("kill", "terminate", "stop", "power loss", "disk full", "disk fails", "cut off", "slow link")
_GENERATOR_KINDS = ("kill", "terminate", "stop", "cut off", "engine hangs", "load fails", "loads wrong", "slow link")
_OTHERS = (
    "kill env", "terminate env", "stop env", "cut off env", "kill rewards", "rewards hang", "rewards fail",
    "rewards err", "task hangs", "task raises", "absurd reward", "shared gap", "second learner", "second env_service",
)  # fmt: skip
_AT_A_WRITE = ("power loss at a write", "kill at a write", "terminate at a write")
_STRUCK, _TROUBLED = 0.5, 0.2
"""Shares of the runs in which the learner is struck at an operation of its disk, and in which that follows a disk that
was full, or failed.
"""
_OPERATIONS, _AROUND_A_NAME = 25.0, 24
"""Operations of the disk until a strike, on average; those within which it comes once a checkpoint gets its name."""
_BIG_CROWD = 1 / 400
_LONG = 1 / 100
_SLOWEST_TOKEN_S = 5.0
"""Of a long run: an engine that is slower counts as one that does not answer."""
_USUAL_LENGTHS = (1, 2, 3, 4, 5, 6)
"""Tokens of completions, unless something else is drawn."""


@dataclass(frozen=True)
class ScheduledFault:
    """At `at` seconds something of this kind happens to `target`, over after `lasts_s`; `amount` is the kind's."""

    at: float
    kind: str
    target: str = ""
    lasts_s: float = 0.0
    amount: float = 0.0

    def __str__(self) -> str:
        parts = [self.kind, self.target, f"for {self.lasts_s:.0f} s" if self.lasts_s else ""]
        return " ".join(part for part in parts if part) + (f" ({self.amount:g})" if self.amount else "")


Apply = Callable[[Stage, ScheduledFault], None]


def _service(stage: Stage, name: str) -> Service | None:
    return stage.cluster.services.get(name)


def _kill(stage: Stage, fault: ScheduledFault) -> None:
    _at_work(stage, fault, Process.kill)


def _terminate(stage: Stage, fault: ScheduledFault) -> None:
    _at_work(stage, fault, Process.terminate)


def _at_work(stage: Stage, fault: ScheduledFault, end: Callable[[Process], None]) -> None:
    """At once, or within so many seconds of the next sync of the learner's disk: work is under way in a thread then."""

    def act() -> None:
        service = _service(stage, fault.target)
        stage.quiet_since = stage.world.now
        if service is not None and service.process is not None:
            end(service.process)

    if fault.amount:
        stage.disk.syncing.append(lambda: stage.world.after(stage.world.random.random() * fault.amount, act))
    else:
        act()


def _stop(stage: Stage, fault: ScheduledFault) -> None:
    service = _service(stage, fault.target)
    if service is not None and service.process is not None:
        stage.suspects.add(service.host)
        service.process.stand_still()
        stage.switchboard.check_links(after_s=HEARTBEAT_S)


def _continue(stage: Stage, fault: ScheduledFault) -> None:
    service = _service(stage, fault.target)
    if service is not None and service.process is not None:
        service.process.go_on()


def _pairs(stage: Stage, fault: ScheduledFault) -> list[tuple[str, str]]:
    """Both directions between the target and all others; only outwards if the amount is 1."""
    others = [service.host for service in stage.cluster.services.values() if service.host != fault.target]
    outwards = [(fault.target, other) for other in dict.fromkeys(others)]
    return outwards if fault.amount == 1 else outwards + [(other, source) for source, other in outwards]


def _cut(stage: Stage, fault: ScheduledFault) -> None:
    stage.suspects.update(stage.hosts() if fault.target == LEARNER else {fault.target})
    stage.cuts[fault] = _pairs(stage, fault)
    for source, target in stage.cuts[fault]:
        stage.network.cut(source, target)
    stage.switchboard.check_links(after_s=HEARTBEAT_S)


def _mend(stage: Stage, fault: ScheduledFault) -> None:
    for source, target in stage.cuts.pop(fault, []):
        stage.network.mend(source, target)


def _slow(stage: Stage, fault: ScheduledFault) -> None:
    stage.suspects.update(stage.hosts() if fault.target == LEARNER else {fault.target})
    stage.network.slowness[fault.target] = fault.amount


def _fast(stage: Stage, fault: ScheduledFault) -> None:
    stage.network.slowness.pop(fault.target, None)


def _engine(name: str, value: object) -> Apply:
    def apply(stage: Stage, fault: ScheduledFault) -> None:
        script = stage.engines[int(fault.target.removeprefix("gen-"))]
        stage.suspects.add(fault.target)
        if name == "hanging":
            script.hang(bool(value))
        else:
            setattr(script, name, value)

    return apply


def _gap(stage: Stage, fault: ScheduledFault) -> None:
    """Numerics that all generators share, of weights that none of them has had yet: nobody's fault."""
    newest = max(script.newest for script in stage.engines)
    for script in stage.engines:
        script.gaps = (*script.gaps, (newest + 1, fault.amount))


def _second_learner(stage: Stage, fault: ScheduledFault) -> None:
    """Started by mistake beside one that lives. With none there it would be a run of its own, and no fault."""
    first = _service(stage, LEARNER)
    if first is None or first.process is None or first.process.loop.time() - first.process.started_at < 1.0:
        return
    service = stage.cluster.learner(name=SECOND_LEARNER)
    service.wanted = False
    stage.cluster.services[service.name] = service
    stage.cluster.start(service, again=fault.amount == 1)


def _learner_elsewhere(stage: Stage, fault: ScheduledFault) -> None:
    """Started on another machine to go on with the run, as if the first one were gone, where locks tell it nothing."""
    if not (stage.cluster.run_folder / "incarnation").exists():
        return
    service = stage.cluster.learner(name=ELSEWHERE, host=ELSEWHERE)
    service.wanted = False
    stage.cluster.services[service.name] = service
    stage.cluster.start(service, again=True)


def _elsewhere_ends(stage: Stage, fault: ScheduledFault) -> None:
    """Killed, or asked to end, upon which it gives the folder back."""
    end = Process.terminate if fault.amount else Process.kill
    _at_work(stage, replace(fault, target=ELSEWHERE, amount=0.0), end)


def _second_env(stage: Stage, fault: ScheduledFault) -> None:
    stage.cluster.add(stage.cluster.env_service(0, host="second-env", env_id=fault.target))


def _second_env_ends(stage: Stage, fault: ScheduledFault) -> None:
    service = _service(stage, "second-env")
    if service is not None:
        service.wanted = False
        if service.process is not None:
            service.process.kill()


def _rewards(name: str, value: object) -> Apply:
    def apply(stage: Stage, fault: ScheduledFault) -> None:
        setattr(stage.rewards[int(fault.target.removeprefix("rewards-"))], name, value)

    return apply


def _lie(stage: Stage, fault: ScheduledFault) -> None:
    stage.rewards[int(fault.target.removeprefix("rewards-"))].lies += int(fault.amount) or 1


def _disk(name: str, value: bool) -> Apply:
    def apply(stage: Stage, fault: ScheduledFault) -> None:
        setattr(stage.disk, name, value)
        stage.disk_failed = True

    return apply


def _power(stage: Stage, fault: ScheduledFault) -> None:
    """At once, or within so many seconds of the next checkpoint, which is when the disk holds least of what follows."""
    if fault.amount:
        _within(stage, fault.amount, lambda: _goes_down(stage, fault))
    else:
        _goes_down(stage, fault)


def _within(stage: Stage, seconds: float, action: Callable[[], object]) -> None:
    """Has it happen so many seconds after the next checkpoint has its name, or sooner."""

    def named() -> None:
        stage.world.after(stage.world.random.random() * seconds, action)

    stage.disk.expecting.append((CHECKPOINT, named))


def _at_a_write(hit: Apply, *, gently: bool = False) -> Apply:
    """Has it happen at an operation of the learner's disk, after so many others; those of a target are counted from the
    next one of its kind on.
    """

    def apply(stage: Stage, fault: ScheduledFault) -> None:
        def act() -> None:
            stage.world.note("FAULT", f"{fault.kind}: now")
            hit(stage, fault)

        strike = DiskStrike(act, count=int(fault.amount), since=fault.target, gently=gently, place=LEARNER)
        stage.disk.strikes.append(strike)

    return apply


def _learner_ends(end: Callable[[Process], None]) -> Apply:
    return lambda stage, fault: _at_work(stage, replace(fault, target=LEARNER, amount=0.0), end)


def _goes_down(stage: Stage, fault: ScheduledFault) -> None:
    """The learner's host does, with all that runs there: what was not synced is lost in part."""
    for service in list(stage.cluster.services.values()):
        if service.host == LEARNER:
            _kill(stage, ScheduledFault(fault.at, "kill", service.name))
    stage.unsynced_lost, stage.quiet_since = True, stage.world.now
    lost = stage.disk.lose_unsynced(stage.cluster.run_folder) if stage.cluster.run_folder.exists() else []
    stage.world.note(LEARNER, f"its host went down; lost were {', '.join(lost) or 'no bytes'}")


def _damage(stage: Stage, fault: ScheduledFault) -> None:
    """Soon after the next checkpoint."""
    _within(stage, _AIM_S, lambda: _damaged(stage, fault))


def _damaged(stage: Stage, fault: ScheduledFault) -> None:
    """A file of the newest checkpoint is not what was written, where an older one stands, and the learner dies."""
    checkpoints = sorted(path for path in stage.cluster.run_folder.glob(f"{CHECKPOINT}*") if path.is_dir())
    if len(checkpoints) < 2:
        _damage(stage, fault)
        return
    files = sorted(path for path in checkpoints[-1].rglob("*") if path.is_file() and path.stat().st_size)
    weights = [path for path in files if path.parent != checkpoints[-1]]  # of a real one nearly all bytes
    _kill(stage, ScheduledFault(fault.at, "kill", LEARNER))
    stage.quiet_since = stage.world.now
    path = stage.world.random.choice([*files, *weights, *weights, *weights])
    data = bytearray(path.read_bytes())
    at = stage.world.random.randrange(len(data))
    if fault.amount:
        data[at : at + int(fault.amount)] = bytes(len(data[at : at + int(fault.amount)]))
    else:
        data[at] ^= 1
    path.write_bytes(data)
    stage.damaged = True
    stage.world.note(LEARNER, f"its disk holds {'zeros' if fault.amount else 'another byte'} at {at} of {path.name}")


def _clock(stage: Stage, fault: ScheduledFault) -> None:
    stage.world.jumps[fault.target] = stage.world.jumps.get(fault.target, 0.0) + fault.amount


def _hanging_task(stage: Stage, fault: ScheduledFault) -> None:
    stage.environment.hangs.update(range(int(fault.amount), stage.environment.tasks, TASKS_APART))


def _task_recovers(stage: Stage, fault: ScheduledFault) -> None:
    """Only for good: those that hang go on to hang."""


def _raising_task(stage: Stage, fault: ScheduledFault) -> None:
    stage.environment.raises.update(range(int(fault.amount), stage.environment.tasks, TASKS_APART))


def _nothing(stage: Stage, fault: ScheduledFault) -> None:
    """Is over by itself."""


KINDS: dict[str, tuple[Apply, Apply]] = {
    "kill": (_kill, _nothing),
    "terminate": (_terminate, _nothing),
    "stop": (_stop, _continue),
    "cut off": (_cut, _mend),
    "slow link": (_slow, _fast),
    "engine hangs": (_engine("hanging", True), _engine("hanging", False)),
    "load fails": (_engine("fails_to_load", True), _engine("fails_to_load", False)),
    "loads wrong": (_engine("loads_wrong", True), _engine("loads_wrong", False)),
    "shared gap": (_gap, _nothing),
    "second learner": (_second_learner, _nothing),
    "learner elsewhere": (_learner_elsewhere, _elsewhere_ends),
    "second env_service": (_second_env, _second_env_ends),
    "rewards hang": (_rewards("hanging", True), _rewards("hanging", False)),
    "rewards fail": (_rewards("failing", True), _rewards("failing", False)),
    "rewards err": (_rewards("errors", 0.3), _rewards("errors", 0.0)),
    "absurd reward": (_lie, _nothing),
    "disk full": (_disk("full", True), _disk("full", False)),
    "disk fails": (_disk("failing", True), _disk("failing", False)),
    "power loss": (_power, _nothing),
    "power loss at a write": (_at_a_write(_goes_down), _nothing),
    "kill at a write": (_at_a_write(_learner_ends(Process.kill)), _nothing),
    "terminate at a write": (_at_a_write(_learner_ends(Process.terminate), gently=True), _nothing),
    "damaged checkpoint": (_damage, _nothing),
    "clock jumps": (_clock, _nothing),
    "task hangs": (_hanging_task, _task_recovers),
    "task raises": (_raising_task, _nothing),
}
"""By name: how each begins, and how it ends."""


def schedule(stage: Stage, faults: tuple[ScheduledFault, ...]) -> None:
    """Has every fault happen at its time."""
    for fault in faults:
        stage.world.at(fault.at, lambda fault=fault: _begin(stage, fault))  # type: ignore[misc]


def _begin(stage: Stage, fault: ScheduledFault) -> None:
    if stage.violation is not None:
        return
    stage.world.note("FAULT", str(fault))
    stage.faults += fault.kind not in HARMLESS
    stage.active.add(fault)
    KINDS[fault.kind][0](stage, fault)
    if fault.kind in PERMANENT and not fault.lasts_s:
        stage.active.discard(fault)
        stage.quiet_since = stage.world.now
    else:
        stage.world.after(fault.lasts_s, lambda: _end(stage, fault))


def _end(stage: Stage, fault: ScheduledFault) -> None:
    KINDS[fault.kind][1](stage, fault)
    stage.active.discard(fault)
    stage.quiet_since = stage.world.now
    if fault.lasts_s:
        stage.world.note("FAULT", f"over: {fault}")


@dataclass(frozen=True)
class Paces:
    """Durations in seconds. Work beside an event loop and syncs of the disk take so long on average; with 0 such work
    takes a moment and a sync none.
    """

    token_s: float = 0.05
    lengths: tuple[int, ...] = ()
    thread_s: float = 0.0
    sync_s: float = 0.0

    @property
    def rollout_s(self) -> float:
        """A completion, on average."""
        lengths = self.lengths or _USUAL_LENGTHS
        return self.token_s * sum(lengths) / len(lengths)


@dataclass(frozen=True)
class TaskShape:
    """Traits of the environment's conversations: see EnvironmentScript. `patience` is the time limit of one, in
    rollouts of usual length.
    """

    turns: int = 1
    tokens: int | None = None
    patience: float | None = None
    stop: str = ""
    most_invalid: int | None = None
    levels: int = 1
    branch_after: tuple[int, ...] = ()

    @property
    def usual_turns(self) -> float:
        """Of a conversation, on average."""
        return (1 + self.turns) / 2


@dataclass(frozen=True)
class Scenario:
    """Everything that a run depends on, beside the product itself."""

    seed: int
    profile: str
    settings: ClusterSettings
    rates: LinkRates = field(default_factory=LinkRates)
    paces: Paces = field(default_factory=Paces)
    shape: TaskShape = field(default_factory=TaskShape)
    doubled: float = 0.0
    lost: float = 0.0
    step_s: float = 2.0
    weights: int = 8
    unhealthy: float = 0.0
    poison: float = 0.0
    """Share of the tasks that can never be made, and of those that no reward service can judge."""
    redundant: int = 0
    vanished: float = 0.0
    stalls: float = 0.0
    """Share of what reward services judge that takes long."""
    stale: float = 0.0
    faults: tuple[ScheduledFault, ...] = ()

    @property
    def size(self) -> str:
        """Its length, in words."""
        return f"{self.settings.steps} steps"

    @property
    def rollout_s(self) -> float:
        """A conversation, on average."""
        return self.paces.rollout_s * self.shape.usual_turns

    @property
    def conversation_s(self) -> float | None:
        """The time limit of one."""
        return None if self.shape.patience is None else 1.0 + self.shape.patience * self.rollout_s

    @property
    def lasts_s(self) -> float:
        """About how many seconds it takes if nothing goes wrong."""
        waited_s = self.rollout_s / (1 + self.settings.max_lag)
        return 5.0 + self.settings.steps * (0.5 + self.step_s + waited_s)


def scenario_of(seed: int) -> Scenario:
    """The run of a seed."""
    dice = random.Random(seed * 2_654_435_761 % (1 << 63))
    draw = dice.random()
    if draw < _BIG_CROWD:
        return _big_crowd(seed)
    settings = _unkind_settings(_settings(dice), random.Random(f"unkind settings of {seed}"))
    if draw < 0.04:
        return _crowd(seed, settings)
    base = Scenario(
        seed=seed, profile="mixed", settings=settings, doubled=dice.choice((0.0, 0.0, 0.05)),
        lost=random.Random(f"lost packets of {seed}").choice((0.0, 0.0, 0.01, 0.1)),
        step_s=dice.choice((0.5, 2.0, 5.0)), unhealthy=dice.choice((0.0, 0.0, 0.2)),
    )  # fmt: skip
    if random.Random(f"health of {seed}").random() < 0.2:
        base = replace(base, unhealthy=0.7)
    base = _shaped(_spoiled(base))
    base = replace(base, paces=_paces(random.Random(f"paces of {seed}"), base))
    if random.Random(f"length of {seed}").random() < _LONG:
        return _long_run(base)
    if draw < 0.08:
        return replace(base, profile="calm")
    if draw < 0.30:
        kind = dice.choice((*_LEARNER_KINDS, *_OTHERS, *_GENERATOR_KINDS))
        faults = tuple(_fault(dice, settings, base.lasts_s, kind=kind) for _ in range(dice.randint(1, 3)))
        return _with_older_ones(replace(base, profile="one kind", faults=_more(base, faults)))
    faults = tuple(_fault(dice, settings, base.lasts_s) for _ in range(dice.randint(2, 6)))
    return _with_older_ones(replace(base, faults=_more(base, faults)))


def _settings(dice: random.Random) -> ClusterSettings:
    return ClusterSettings(
        generators=dice.choice((1, 2, 2, 3)),
        env_services=dice.choice((1, 1, 2)),
        reward_services=dice.choice((1, 1, 2)),
        steps=dice.randint(8, 24),
        groups_per_step=dice.choice((1, 2, 3)),
        max_lag=dice.choice((0, 1, 2, 4)),
        on_lag=dice.choice(("wait", "drop", "mask")),
        pacing=dice.choice(("demand", "full")),
        straggler_timeout_s=dice.choice((10.0, 60.0)),
        checkpoint_every=dice.choice((2, 4, 8)),
        final_tasks=dice.choice((0, 0, 0, 3)),
        evaluation_every=dice.choice((4, 1000)),
        drop_uniform_groups=dice.random() < 0.3,
    )


def _unkind_settings(settings: ClusterSettings, dice: random.Random) -> ClusterSettings:
    settings = replace(
        settings,
        staging=dice.choice(("staging", "staging", "none")),
        checkpoints_kept=dice.choice((1, 2, 2, 3)),
        max_tokens=dice.choice((6, 6, 16)),
    )
    if settings.reward_services == 1:
        return settings
    return replace(settings, hedged=dice.choice((0.0, 0.5)), hedged_after_s=dice.choice((None, 0.1, 0.1)))


def _shaped(scenario: Scenario) -> Scenario:
    """With conversations of one turn or of several, and with tasks in levels that are soon left again."""
    dice = random.Random(f"tasks of {scenario.seed}")
    turns = dice.choice((1, 1, 1, 2, 3, 4))
    shape = TaskShape(
        turns=turns,
        tokens=dice.choice((None, None, 20)) if turns > 1 else None,
        patience=dice.choice((None, None, 1.5)) if turns > 1 else None,
        most_invalid=dice.choice((None, 1)) if turns > 1 else None,
        stop=dice.choice(("", "", "w5")),
        levels=dice.choice((1, 1, 1, 3)),
    )
    settings = scenario.settings
    dice_of_trees = random.Random(f"trees of {scenario.seed}")
    if turns > 1 and dice_of_trees.random() < 0.4:
        # Two beginnings at least, since a conversation that is over before it branches is one of two members.
        shape = replace(shape, branch_after=dice_of_trees.choice(((1,), (1,), (2,) if turns > 2 else (1,))))
        settings = replace(settings, group_size=4)
    if turns > 1 and random.Random(f"checkpoints of {scenario.seed}").random() < 0.5:
        settings = replace(settings, checkpoints=True)
    if shape.levels > 1:
        curriculum = {"start": dice.choice((0, 1)), "window": 2, "raise_at": 0.6, "lower_at": 0.4}
        settings = replace(settings, curriculum=curriculum, success_reward=0.5)
    stalls = dice.choice((0.0, 0.0, 0.05))
    settings = replace(settings, teachers=dice.choice((0, 0, 0, 0, 1, 2)))
    settings = replace(settings, reuse=_reuse(scenario.seed, settings))
    whole = bool(settings.teachers) or "max_lag" in settings.reuse
    begins = not whole and random.Random(f"partial batches of {scenario.seed}").random() < 0.4
    settings = replace(settings, partial_batches=begins)
    dice = random.Random(f"draws of {scenario.seed}")
    if dice.random() < 0.2:
        tasks = {"by": "signal", "floor": dice.choice((0.1, 0.5)), "half_life_steps": dice.choice((2.0, 32.0))}
        settings = replace(settings, tasks=tasks, success_reward=0.5)
    return replace(scenario, shape=shape, settings=settings, stalls=stalls)


def _reuse(seed: int, settings: ClusterSettings) -> Mapping[str, Any]:
    """In a part of the runs that can, groups are trained again."""
    dice = random.Random(f"reuse of {seed}")
    if dice.random() < 0.5 or settings.max_lag == 0 or settings.groups_per_step == 1 or settings.teachers:
        return {}
    priority, most = dice.choice(("uniform", "recent", "advantage")), dice.choice((1, 2))
    reuse = {"share": 0.5, "priority": priority, "max_reuses": most}
    dice = random.Random(f"old groups of {seed}")
    return {**reuse, "max_lag": settings.max_lag * dice.choice((2, 3))} if dice.random() < 0.4 else reuse


def _long_run(scenario: Scenario) -> Scenario:
    """Of an hour or more, since its steps are long; little goes wrong in most of that time."""
    dice = random.Random(f"long run of {scenario.seed}")
    settings = replace(
        scenario.settings, steps=dice.choice((40, 60)), final_tasks=0, evaluation_every=1000,
        generators=min(2, scenario.settings.generators), env_services=1,
    )  # fmt: skip
    scenario = replace(scenario, profile="long", settings=settings, step_s=dice.choice((60.0, 100.0)))
    paces = _paces(dice, scenario, steps=dice.choice((0.1, 0.2)))
    paces = replace(paces, token_s=min(paces.token_s, _SLOWEST_TOKEN_S), thread_s=min(paces.thread_s, 0.05))
    scenario = replace(scenario, paces=paces)
    faults = tuple(_fault(dice, settings, scenario.lasts_s) for _ in range(dice.randint(1, 4)))
    return _with_older_ones(replace(scenario, faults=_more(scenario, faults)))


def _paces(dice: random.Random, scenario: Scenario, *, steps: float | None = None) -> Paces:
    """A rollout lasts so many steps, 0.1 to 5 if none are given, or as much less as it does on a fast engine."""
    settings, step_s = scenario.settings, scenario.step_s / scenario.shape.usual_turns
    lengths = () if settings.max_tokens == max(_USUAL_LENGTHS) else tuple(range(1, settings.max_tokens + 1))
    steps = dice.choice((0.0, 0.1, 0.3, 1.0, 2.0, 5.0)) if steps is None else steps
    usual = lengths or _USUAL_LENGTHS
    token_s = round(steps * step_s * len(usual) / sum(usual), 4) or Paces().token_s
    return Paces(
        token_s=token_s,
        lengths=lengths,
        thread_s=dice.choice((0.0, 0.0, 0.05, 0.5)),
        sync_s=dice.choice((0.0, 0.0, 0.02, 0.3)),
    )


def _crowd(seed: int, settings: ClusterSettings) -> Scenario:
    """Eight generators download at once from a learner whose uplink gives each a share: nobody is at fault."""
    pull_timeout_s = random.Random(f"downloads of {seed}").choice((120.0, 25.0, 12.0))
    settings = replace(settings, generators=8, steps=6, final_tasks=0, pull_timeout_s=pull_timeout_s)
    rates = LinkRates(bulk_bytes_per_s=64.0)
    return Scenario(seed=seed, profile="crowd", settings=settings, rates=rates, weights=248)


def _big_crowd(seed: int) -> Scenario:
    """More generators than an HTTP client has connections."""
    settings = ClusterSettings(
        generators=260, steps=8, announce_every_s=30.0, silence_s=120.0, max_lag=4, groups_per_step=8
    )
    return Scenario(seed=seed, profile="big crowd", settings=settings, step_s=30.0)


def _spoiled(scenario: Scenario) -> Scenario:
    """With what is wrong from the first moment on."""
    dice = random.Random(f"what is wrong with {scenario.seed}")
    return replace(
        scenario,
        poison=dice.choice((0.0, 0.0, 0.0, 0.05, 0.15)),
        redundant=dice.choice((0, 0, 0, 1)),
        vanished=dice.choice((0.0, 0.0, 0.0, 0.0, 0.02)),
        stale=random.Random(f"stale requests of {scenario.seed}").choice((0.0, 0.5)),
    )


def _more(scenario: Scenario, faults: tuple[ScheduledFault, ...]) -> tuple[ScheduledFault, ...]:
    """In order, with some that come beside them. Of outages some last for many minutes; of losses of power half are
    aimed at a checkpoint, of the learner's ends half at a sync of its disk.
    """
    dice = random.Random(f"more faults of {scenario.seed}")
    more = [_made_longer(dice, fault) for fault in faults]
    if dice.random() < _SELDOM:
        amount = dice.choice((0.0, 8.0))
        more.append(ScheduledFault(_moment(dice, scenario), "damaged checkpoint", amount=amount))
    if dice.random() < _SELDOM:
        hosts = (LEARNER, LEARNER, "env-0", *(f"gen-{index}" for index in range(scenario.settings.generators)))
        amount = dice.choice((-3600.0, -3600.0, 5.0, 3600.0))
        more.append(ScheduledFault(_moment(dice, scenario), "clock jumps", dice.choice(hosts), amount=amount))
    if dice.random() < _SELDOM:
        more += _taken_over(dice, _moment(dice, scenario))
    more += _at_writes(scenario)
    if any(fault.kind == "second learner" for fault in faults) and dice.random() < 0.5:
        at = next(fault.at for fault in faults if fault.kind == "second learner")
        more.append(ScheduledFault(round(at - 0.5, 3), "stop", LEARNER, 40.0))
    if scenario.settings.teachers:
        kind, lasts_s = dice.choice((("kill", 0.0), ("cut off", 30.0), ("cut off", 90.0), ("stop", 30.0)))
        target = f"teacher-{dice.randrange(scenario.settings.teachers)}"
        more.append(ScheduledFault(_moment(dice, scenario), kind, target, lasts_s))
    return _in_order(tuple(more))


def _at_writes(scenario: Scenario) -> Iterator[ScheduledFault]:
    """Strikes at the disk, mostly as its host goes down; half of them while names are given, as at a checkpoint."""
    dice = random.Random(f"disk of {scenario.seed}")

    def strike(at: float) -> ScheduledFault:
        kind, since = dice.choice((_AT_A_WRITE[0], *_AT_A_WRITE)), dice.choice(("", "rename", "sync", *_AIMED))
        amount = dice.randrange(_AROUND_A_NAME) if since in _AIMED else dice.expovariate(1 / _OPERATIONS)
        return ScheduledFault(at, kind, since, amount=float(int(amount)))

    if dice.random() < _STRUCK:
        for _ in range(dice.choice((1, 1, 2))):
            yield strike(_moment(dice, scenario))
    if dice.random() < _TROUBLED:
        trouble = ScheduledFault(
            _moment(dice, scenario), dice.choice(("disk full", "disk fails")), lasts_s=dice.choice((1.0, 3.0, 10.0))
        )
        yield trouble
        yield strike(round(trouble.at + dice.random() * (trouble.lasts_s + 5.0), 3))


def _taken_over(dice: random.Random, at: float) -> tuple[ScheduledFault, ...]:
    """A second machine's learner, mostly while the first one stands still, for longer or shorter than is waited for."""
    lasts_s, amount = dice.choice((20.0, 40.0, 80.0)), dice.choice((0.0, 1.0))
    elsewhere = ScheduledFault(round(at + 1.0, 3), "learner elsewhere", lasts_s=lasts_s, amount=amount)
    stands_still_s = dice.choice((0.0, 10.0, 30.0, 60.0, 100.0))
    return (ScheduledFault(at, "stop", LEARNER, stands_still_s), elsewhere) if stands_still_s else (elsewhere,)


def _with_older_ones(scenario: Scenario) -> Scenario:
    """The scenario with a second checkpoint kept where one is damaged: a single one leaves nothing to fall back to."""
    damaged = any(fault.kind == "damaged checkpoint" for fault in scenario.faults)
    kept = max(scenario.settings.checkpoints_kept, 1 + damaged)
    return replace(scenario, settings=replace(scenario.settings, checkpoints_kept=kept))


def _made_longer(dice: random.Random, fault: ScheduledFault) -> ScheduledFault:
    longer, aimed = dice.random() < _RARELY, dice.random() < 0.5
    if fault.kind == "power loss" or (fault.kind in ("kill", "terminate") and fault.target == LEARNER):
        return replace(fault, amount=_AIM_S if aimed else 0.0)
    return replace(fault, lasts_s=round(_LONGER * fault.lasts_s, 3)) if longer else fault


def _moment(dice: random.Random, scenario: Scenario) -> float:
    return round(1.0 + dice.random() * scenario.lasts_s, 3)


def _in_order(faults: tuple[ScheduledFault, ...]) -> tuple[ScheduledFault, ...]:
    return tuple(sorted(faults, key=lambda fault: fault.at))


def _fault(
    dice: random.Random, settings: ClusterSettings, within_s: float, *, kind: str | None = None
) -> ScheduledFault:
    kind = kind or dice.choice((*_LEARNER_KINDS, *_GENERATOR_KINDS, *_OTHERS))
    at = round(1.0 + dice.random() * within_s, 3)
    lasts_s = round(dice.choice((3.0, 15.0, 30.0, _MAX_S)) * (0.5 + dice.random()), 3)
    kind, target = _target(dice, settings, kind)
    if kind in (
        "kill",
        "terminate",
        "power loss",
        "absurd reward",
        "shared gap",
        "second learner",
        "task hangs",
        "task raises",
    ):
        lasts_s = 0.0
    if kind == "second env_service" and dice.random() < 0.7:
        lasts_s = 0.0
    return ScheduledFault(at=at, kind=kind, target=target, lasts_s=lasts_s, amount=_amount(dice, kind))


def _target(dice: random.Random, settings: ClusterSettings, kind: str) -> tuple[str, str]:
    generator = f"gen-{dice.randrange(settings.generators)}"
    rewards = f"rewards-{dice.randrange(settings.reward_services)}"
    env = f"env-{dice.randrange(settings.env_services)}"
    if kind.endswith(" env"):
        return kind.removesuffix(" env"), env
    if kind == "kill rewards":
        return "kill", rewards
    if kind.startswith("rewards") or kind == "absurd reward":
        return kind, rewards
    if kind == "second env_service":
        return kind, "env-0"
    if kind in ("power loss", "disk full", "disk fails", "second learner", "shared gap", "task hangs", "task raises"):
        return kind, ""
    if kind in _LEARNER_KINDS and dice.random() < 0.5:
        return kind, LEARNER
    return kind, generator


def _amount(dice: random.Random, kind: str) -> float:
    amounts: dict[str, Callable[[], float]] = {
        "slow link": lambda: dice.choice((20.0, 200.0)),
        "cut off": lambda: dice.choice((0.0, 0.0, 1.0)),
        "shared gap": lambda: dice.choice((0.003, 0.015)),
        "second learner": lambda: dice.choice((0.0, 0.0, 1.0)),
        "absurd reward": lambda: 1.0,
        "task hangs": lambda: float(dice.randrange(TASKS_APART)),
        "task raises": lambda: float(dice.randrange(TASKS_APART)),
    }
    return amounts[kind]() if kind in amounts else 0.0


def smaller(scenario: Scenario) -> Iterator[Scenario]:
    """The same with less of something: fewer faults, fewer processes, fewer steps."""
    faults = scenario.faults
    half = len(faults) // 2
    if half > 1:
        yield replace(scenario, faults=faults[:half])
        yield replace(scenario, faults=faults[half:])
    for index in range(len(faults)):
        yield replace(scenario, faults=faults[:index] + faults[index + 1 :])
    for settings in _smaller_settings(scenario.settings, faults):
        yield replace(scenario, settings=settings)
    plain = Paces()
    for name in ("thread_s", "sync_s", "token_s"):
        if getattr(scenario.paces, name) != getattr(plain, name):
            yield replace(scenario, paces=replace(scenario.paces, **{name: getattr(plain, name)}))
    if scenario.doubled or scenario.unhealthy or scenario.lost or scenario.stale:
        yield replace(scenario, doubled=0.0, unhealthy=0.0, lost=0.0, stale=0.0)
    if scenario.poison or scenario.redundant or scenario.vanished or scenario.stalls:
        yield replace(scenario, poison=0.0, redundant=0, vanished=0.0, stalls=0.0)
    yield from _simpler_shapes(scenario)
    for index, fault in enumerate(faults):
        if fault.lasts_s > 2:
            shorter = replace(fault, lasts_s=round(fault.lasts_s / 2, 3))
            yield replace(scenario, faults=(*faults[:index], shorter, *faults[index + 1 :]))


def _simpler_shapes(scenario: Scenario) -> Iterator[Scenario]:
    simple = TaskShape()
    for name in ("branch_after", "turns", "tokens", "patience", "stop", "most_invalid"):
        if getattr(scenario.shape, name) != getattr(simple, name):
            yield replace(scenario, shape=replace(scenario.shape, **{name: getattr(simple, name)}))
    if scenario.shape.levels > 1:
        settings = replace(scenario.settings, curriculum={})
        yield replace(scenario, shape=replace(scenario.shape, levels=1), settings=settings)


def _smaller_settings(settings: ClusterSettings, faults: tuple[ScheduledFault, ...]) -> Iterator[ClusterSettings]:
    plain = ClusterSettings()
    for name in ("env_services", "reward_services", "generators", "teachers"):
        fewer = getattr(settings, name) - 1
        if fewer >= (name != "teachers") and not _names(faults, name, fewer):
            yield replace(settings, **{name: fewer})
    for name in (
        "final_tasks",
        "evaluation_every",
        "drop_uniform_groups",
        "pacing",
        "on_lag",
        "staging",
        "checkpoints_kept",
        "hedged",
        "tasks",
        "checkpoints",
    ):
        if getattr(settings, name) != getattr(plain, name):
            yield replace(settings, **{name: getattr(plain, name)})
    if settings.steps > 3:
        yield replace(settings, steps=settings.steps // 2)


def _names(faults: tuple[ScheduledFault, ...], service: str, index: int) -> bool:
    prefix = {"env_services": "env", "reward_services": "rewards", "generators": "gen", "teachers": "teacher"}[service]
    return any(fault.target == f"{prefix}-{index}" for fault in faults)
