"""The promises of the architecture, looked at after every callback, at moments, and over time; and one run of the
system in a world of its own under them, from its first to its last moment. A failing one is made as short as it gets.
"""

import asyncio
import hashlib
import json
import os
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from simulation.actors.cluster import LEARNER, SECOND_LEARNER, ClusterSettings
from simulation.actors.engine import is_finite
from simulation.actors.environment import EnvironmentScript
from simulation.actors.trainer import TrainerScript
from simulation.checking.first_lines import FirstLines
from simulation.checking.scenario import TASKS_APART, Scenario, schedule, smaller
from simulation.checking.stage import Result, Stage, staged
from simulation.world.clock import Stuck
from simulation.world.cores import Cores
from simulation.world.http import Directory
from simulation.world.network import LinkRates
from simulation.world.process import Process

Held = tuple[int, int]
"""A lease, and the attempt whose group was accepted."""

Told = Callable[[Any, tuple[Any, ...], Mapping[str, Any]], None]
Shortened = TypeVar("Shortened")
HUNG_TASK_S = 130.0
"""Two attempts of 60 s at a task that hangs."""
POISON_S = 200.0
"""Two slow rollouts and judgements of a task that cannot be judged, twice in a row."""
STANDSTILL_S = 300.0
"""A run whose processes are well trains a step at least this often."""
EXCUSED = True
"""If true, time in which a fault lasts does not count."""
_LOOK_EVERY_S = 5.0
_BOOKS_EVERY = 16
_MAX_PAUSE_S = 120.0
_MAX_UNAWARE_S = 20.0
_REMEDY_S = 120.0
_MISTAKES = (
    AssertionError,
    AttributeError,
    IndexError,
    KeyError,
    NameError,
    TypeError,
    ValueError,
    asyncio.InvalidStateError,
)
_REASONS = {"dropped"}
_MAX_SEGMENTS = 12
_MAX_FILES = 400
_MAX_TASKS = 300


@dataclass
class Watcher:
    """Each is told the result of a call, and its arguments: a ledger or a guard was made, a run was taken up from its
    folder, a generator was expelled, or left the fleet, a process took an env_service's name over. Before a learner
    opens its folder `may_begin` is told, and may raise. `bound` is that of a process on the lag of its next step.
    `held` are the accepted groups of who runs now, and `synced` is told those of them that a sync has put on the disk.
    `has_in_hand` is told the lease that is being given up, or taken in once the journal has it, and None thereafter.
    """

    bound: Callable[[Any], float]
    held: Callable[[], "frozenset[Held]"]
    synced: Callable[["frozenset[Held]"], None]
    has_in_hand: Callable[[int | None], None]
    granted: Told
    may_begin: Told
    guard_made: Told
    leased: Told
    replaced: Told
    ledger_made: Told
    recovered: Told
    expelled: Told
    dropped: Told


@dataclass
class LearnerStates:
    """The learners' insides as the invariants know them: the ledger of each life, and what the last one held."""

    stage: Stage
    ledgers: dict[str, Any] = field(default_factory=dict)
    keepers: list[Process] = field(default_factory=list)
    folder_of: dict[str, int] = field(default_factory=dict)
    guards: dict[str, Any] = field(default_factory=dict)
    replays: dict[str, int] = field(default_factory=dict)
    """By process: the version up to which it trains again what a former life trained."""
    last: str | None = None
    run_name: str = ""
    two_since: float | None = None
    """Time at which a second learner began to run beside the first."""
    afresh: int = 0
    """Number of times that a learner took an env_service for one that was started afresh."""
    durable: set[Held] = field(default_factory=set)
    """Groups that no loss of power takes."""
    in_hand: dict[str, int | None] = field(default_factory=dict)
    """By process: the lease that it gives up or takes in, or did when it was killed in the middle of that."""
    tasks: dict[int, int] = field(default_factory=dict)
    """The task of each lease, over all lives."""
    lines: FirstLines = field(init=False)

    def __post_init__(self) -> None:
        self.lines = FirstLines(self.stage)

    def ledger_made(self, ledger: Any) -> None:
        """A learner begins to keep books."""
        process = self.stage.world.current
        if isinstance(process, Process):
            self.ledgers[process.name] = ledger
            if process not in self.keepers:
                self.keepers.append(process)

    def recovered(self, result: Any) -> None:
        """A learner took up the run's folder. Nothing that a former life had on disk is missing."""
        process = self.stage.world.current
        assert isinstance(process, Process)
        self._see_none_ousted(by=process)
        self.folder_of[process.name] = _inode(self.stage.cluster.run_folder)
        self.replays[process.name] = result.replayed_version
        self.lines.taken_up(result)
        before, self.last = self.last, process.name
        if before is None:
            return
        trained = max((len(history) for history in self.stage.trained), default=0)
        if result.replayed_version < trained:
            self.stage.broken(
                "nothing is lost",
                f"version {trained} was trained, and the learner resumes at {result.replayed_version}",
            )
        # Of a group in hand the journal may say already that it is left out.
        held = frozenset(each for each in _held(self.ledgers[before]) if each[0] != self.in_hand.get(before))
        if self.stage.unsynced_lost:
            self._groups_kept(held & self.durable, result)
        else:
            self._groups_kept(held, result)
            self._closed_kept(self.ledgers[before], result.ledger, in_hand=self.in_hand.get(before))
        self.stage.unsynced_lost = False

    def held(self) -> frozenset[Held]:
        """The accepted groups of the learner that runs now."""
        process = self.stage.world.current
        ledger = self.ledgers.get(process.name) if isinstance(process, Process) else None
        return frozenset() if ledger is None else _held(ledger)

    def synced(self, groups: frozenset[Held]) -> None:
        """These are on the disk."""
        self.durable |= groups

    def granted(self, grants: Any, ledger: Any) -> None:
        """While nothing has gone wrong, no lease is granted again, but for what was too old or cannot succeed."""
        stage = self.stage
        self.lines.granted(grants, ledger)
        unkind = stage.faults or stage.network.vanished or stage.environment.conversation_s is not None
        for grant in () if unkind else grants:
            lease = ledger._table.leases[grant.lease_id]
            ended = [str(outcome) for outcome in lease.attempts[: grant.attempt]]
            # A grant that TCP has to send again is late by seconds, and counts as lost before it is there.
            reasons = _REASONS | ({"expired"} if stage.network.lost else set())
            if not set(ended) <= reasons and not lease.failures.get("data"):
                what = f"lease {grant.lease_id} is granted again, though nothing went wrong: {', '.join(ended)}"
                self.stage.broken("no work twice", what)

    def leased(self, leases: Any, granting: Any) -> None:
        """A lease is of the same task whenever it is granted, whatever the level is by then."""
        self.lines.leased(leases, granting)
        for lease in leases:
            if lease.purpose != "train":
                continue
            task = self.tasks.setdefault(lease.lease_id, lease.task_index)
            if task != lease.task_index:
                what = f"lease {lease.lease_id} was task {task}, and is granted as task {lease.task_index}"
                self.stage.broken("a lease is one task", what)

    def _groups_kept(self, held: frozenset[Held], result: Any) -> None:
        spare = result.spare_groups
        kept = {group.lease_id for group in (spare() if callable(spare) else spare)}
        for batch in result.batches:
            kept |= set(batch.lease_ids) if hasattr(batch, "lease_ids") else {group.lease_id for group in batch.groups}
        kept |= {lease for history in self.stage.trained for batch in history for lease in batch}
        lost = sorted({lease for lease, _ in held} - kept)
        if lost:
            self.stage.broken(
                "nothing is lost", f"the groups of leases {lost} were accepted and are not in the journal"
            )

    def _closed_kept(self, before: Any, after: Any, *, in_hand: int | None) -> None:
        """But for a lease of which nobody was told yet that it was given up: it is granted again."""
        opened = sorted(_closed(before) - _closed(after) - _untrained(after) - {in_hand})
        if opened and not self.stage.disk_failed:
            self.stage.broken("closed stays closed", f"leases {opened} were closed, and are open again after a resume")

    def has_in_hand(self, lease_id: int | None) -> None:
        """A learner begins to give a lease up or to take it in, or has done so."""
        process = self.stage.world.current
        if isinstance(process, Process):
            self.in_hand[process.name] = lease_id

    def guard_made(self, guard: Any) -> None:
        """A learner's guard begins."""
        process = self.stage.world.current
        if isinstance(process, Process):
            self.guards[process.name] = guard

    def bound(self, process: Process) -> float:
        """The guard's bound on the lag of the step that a learner takes next; none while it trains again."""
        trainer = self.stage.trainers.by_process[process.name]
        if len(trainer.history) < self.replays.get(process.name, 0):
            return float("inf")
        return float(self.guards[process.name].max_lag)

    def replaced(self) -> None:
        """A learner takes an env_service for one that was started afresh. One that lives on is not taken for another
        one, and loses its leases to nobody.
        """
        self.afresh += 1
        lives = sum(service.lives for service in self.stage.cluster.services.values() if "env" in service.name)
        if self.afresh > lives:
            what = f"{lives} env_services were started, and {self.afresh} times one lost its leases as if it had been"
            self.stage.broken("nobody is blamed for nothing", what)

    def _see_none_ousted(self, *, by: Process) -> None:
        """Only the folder of a learner that stands still, or did until now, may be taken by another one."""
        now = self.stage.world.now
        for each in self.keepers:
            if each is not by and each.alive and not each.stopped and now - each.awake_since > _MAX_UNAWARE_S:
                self.stage.broken("one learner", f"{by.name} takes the folder of {each.name}, which is at work")

    def _see_how_many(self, living: list[Process]) -> None:
        """Breaks on two learners at once. Without locks across machines, one that stood still may learn late of its
        successor.
        """
        if len(living) > 1 and not self.stage.disk.apart:
            self.stage.broken("one learner", f"{_names(living)} run at once")
        if len([each for each in living if not each.stopped]) < 2:
            self.two_since = None
            return
        now = self.stage.world.now
        self.two_since = now if self.two_since is None else self.two_since
        if now - self.two_since > _MAX_UNAWARE_S:
            self.stage.broken("one learner", f"{_names(living)} run at once since {self.two_since:.0f} s")

    def look_at_books(self) -> None:
        """Cheap, and often."""
        living = [each for each in self.keepers if each.alive]
        self._see_how_many(living)
        for process in living:
            try:
                self.ledgers[process.name].books().check()
            except AssertionError as error:
                self.stage.broken("books", str(error)[:300])


def _names(processes: list[Process]) -> str:
    return " and ".join(each.name for each in processes)


def _held(ledger: Any) -> frozenset[Held]:
    return frozenset((lease, group.attempt) for lease, group in ledger._table.buffered.items())


def _closed(ledger: Any) -> set[int]:
    """Leases that are trained, filtered or given up."""
    return set(range(ledger._table.cursor)) - set(ledger._table.leases)


def _untrained(ledger: Any) -> set[int]:
    """Leases of batches that are trained again."""
    return {lease for batch in ledger._table.untrained for lease in batch}


def _inode(path: Path) -> int:
    return os.stat(path).st_ino if path.exists() else 0


def watch(stage: Stage) -> LearnerStates:
    """Begins to look."""
    learned = LearnerStates(stage)
    stage.world.add(
        Watcher(
            bound=learned.bound,
            held=learned.held,
            synced=learned.synced,
            has_in_hand=learned.has_in_hand,
            granted=lambda result, args, kwargs: learned.granted(result, args[0]),
            leased=lambda result, args, kwargs: learned.leased(result, args[0]),
            guard_made=lambda result, args, kwargs: learned.guard_made(args[0]),
            replaced=lambda result, args, kwargs: learned.replaced(),
            may_begin=lambda result, args, kwargs: may_begin(stage, resume=kwargs["resume"]),
            ledger_made=lambda result, args, kwargs: learned.ledger_made(args[0]),
            recovered=lambda result, args, kwargs: learned.recovered(result),
            expelled=lambda result, args, kwargs: expelled(stage, args[1], kwargs.get("reason", "")),
            dropped=lambda result, args, kwargs: dropped(stage, args[1]),
        )
    )
    stage.world.add(learned.lines)
    for script in stage.engines:
        script.loaded = lambda who, tensors: served(stage, who, tensors)
        script.broken = stage.broken
    stage.cluster.crashed = lambda process, error: crashed(stage, process.name, error)
    stage.world.observe, stage.world.observe_every = learned.look_at_books, _BOOKS_EVERY
    stage.world.after(_LOOK_EVERY_S, lambda: _look(stage, learned))
    return learned


def _look(stage: Stage, learned: LearnerStates) -> None:
    _progress(stage)
    learned.lines.look()
    _folder(stage, learned)
    _pauses(stage)
    _bounds(stage)
    if stage.violation is None:
        stage.world.after(_LOOK_EVERY_S, lambda: _look(stage, learned))


def _progress(stage: Stage) -> None:
    since = max(stage.last_step_at, stage.quiet_since if EXCUSED else 0.0)
    if not (stage.active and EXCUSED) and stage.world.now - since > STANDSTILL_S + _bad_tasks_s(stage):
        stage.broken(
            "progress", f"all are well since {stage.quiet_since:.0f} s, and no step was trained since {since:.0f} s"
        )


def _bad_tasks_s(stage: Stage) -> float:
    """Allowance for tasks that come to nothing, which a step with a lag of 0 meets one after the other."""
    hung = len({task % TASKS_APART for task in stage.environment.hangs})
    poisoned = any(rewards.unjudged for rewards in stage.rewards)
    return HUNG_TASK_S * hung + POISON_S * poisoned


def _folder(stage: Stage, learned: LearnerStates) -> None:
    service = stage.cluster.services[LEARNER]
    process = service.process
    known = None if process is None else learned.folder_of.get(process.name)
    if process is not None and known is not None and known != _inode(stage.cluster.run_folder):
        stage.broken("one learner", f"the folder of {process.name}, which lives, was moved away or replaced")
    path = stage.cluster.run_folder / "run_name"
    name = path.read_text(encoding="utf-8") if stage.trained and path.exists() else learned.run_name
    if learned.run_name not in ("", name):
        stage.broken("nothing is lost", "the run has another name, and no env_service knows it for its own")
    learned.run_name = name


def dropped(stage: Stage, name: str) -> None:
    """A generator left the fleet. Where nothing at all went wrong, none that answers does."""
    service = stage.cluster.services.get(name)
    if not stage.faults and service is not None and service.process is not None and name not in stage.suspects:
        stage.broken("nobody is blamed for nothing", f"{name} is dropped, though nothing went wrong in this run")


def _pauses(stage: Stage) -> None:
    for script in stage.engines:
        worker = script.worker
        if worker is None or worker.paused_since is None or script.hanging or worker.half_loaded:
            continue
        process = worker._process
        if process.alive and not process.stopped and stage.world.now - worker.paused_since > _MAX_PAUSE_S:
            stage.broken("a pause ends", f"{process.name} is paused since {worker.paused_since:.0f} s")


def _bounds(stage: Stage) -> None:
    journal = stage.cluster.run_folder / "journal"
    if not stage.active and len(list(journal.glob("segment-*.log"))) > _MAX_SEGMENTS:
        stage.broken("files are bounded", f"{len(list(journal.iterdir()))} files in {journal.name}")
    if len(list(stage.cluster.run_folder.glob("*"))) > _MAX_FILES:
        stage.broken("files are bounded", "the run's folder fills")
    most = _MAX_TASKS + 8 * len(stage.engines)
    for process in stage.cluster.processes:
        if process.alive and len(process.loop.tasks) > most:
            process.loop.tasks = [task for task in process.loop.tasks if not task.done()]
            if len(process.loop.tasks) > most:
                stage.broken("memory is bounded", f"{process.name} has {len(process.loop.tasks)} tasks")


def may_begin(stage: Stage, *, resume: bool) -> None:
    """Raises FolderTaken for a second learner, started beside one that lived, if that has ended while it started: it
    would be a run of its own then, on purpose, and what was trained is in the folder that is kept of the first.
    """
    process, first = stage.world.current, stage.cluster.services[LEARNER].process
    second = isinstance(process, Process) and process.name.startswith(SECOND_LEARNER)
    if second and not resume and (first is None or not first.alive):
        from services.run_lock import FolderTaken  # the product is imported after its clock is replaced

        raise FolderTaken("the learner beside which this one was started has ended: it begins no run of its own")


def crashed(stage: Stage, who: str, error: BaseException) -> None:
    """A process ended by an error that is nobody's but its programmer's."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            crashed(stage, who, inner)
    elif isinstance(error.__cause__, Exception) and type(error).__name__ == "LoopCrashed":
        crashed(stage, who, error.__cause__)
    elif isinstance(error, _MISTAKES):
        stage.broken("nobody crashes", f"{who}: {type(error).__name__}: {str(error)[:300]}")


def expelled(stage: Stage, name: str, reason: str) -> None:
    """A generator was sent away: not one that did nothing wrong. A person starts it again, in a while."""
    if name not in stage.suspects:
        stage.broken("nobody is blamed for nothing", f"{name} is expelled: {reason}")
    service = stage.cluster.services.get(name)
    process = None if service is None else service.process
    if process is not None:
        stage.world.after(_REMEDY_S, process.kill)


def served(stage: Stage, who: str, tensors: dict[str, Any]) -> None:
    """An engine has loaded weights."""
    if not is_finite(tensors):
        stage.broken("finite weights", f"{who} is given weights that are not finite")


def begin(stage: Stage) -> None:
    """Starts every process of the cluster."""
    cluster = stage.cluster
    for index, script in enumerate(stage.rewards):
        cluster.add(cluster.reward_service(index, script))
    for index in range(cluster.settings.teachers):
        cluster.add(cluster.teacher(index))
    cluster.add(cluster.learner())
    for index, engine in enumerate(stage.engines):
        cluster.add(cluster.generator(index, engine))
    for index in range(cluster.settings.env_services):
        cluster.add(cluster.env_service(index))


def is_over(stage: Stage) -> bool:
    """True if the run has come to an end, good or bad."""
    if stage.violation is not None:
        return True
    learner = stage.cluster.services[LEARNER]
    return stage.done and learner.process is None and learner.last_code == 0


def live(stage: Stage) -> None:
    """Lets time pass until the run is over."""
    learner = stage.cluster.services[LEARNER]
    try:
        stage.world.run(until=lambda: stage.violation is not None or (learner.process is None and is_over(stage)))
    except Stuck as error:
        stage.broken("time passes", str(error))


def result_of(stage: Stage) -> Result:
    """The outcome of the run."""
    world = stage.world
    digest = hashlib.blake2b(digest_size=16)
    for event in world.history:
        digest.update(str(event).encode())
    digest.update(f"{world.callbacks} {world.now:.9f}".encode())
    return Result(
        seed=world.seed,
        virtual_s=world.now,
        callbacks=world.callbacks,
        requests=world.part(Directory).requests,
        steps=max((len(history) for history in stage.trained), default=0),
        violation=stage.violation,
        history=tuple(world.history),
        fingerprint=digest.hexdigest(),
    )


def simulate(scenario: Scenario) -> Result:
    """Runs it once."""
    trainer = TrainerScript(step_s=scenario.step_s, body=scenario.weights, unhealthy=scenario.unhealthy)
    shape = scenario.shape
    environment = EnvironmentScript(
        redundant=scenario.redundant, turns=shape.turns, tokens=shape.tokens, conversation_s=scenario.conversation_s,
        stop=shape.stop, most_invalid=shape.most_invalid, levels=shape.levels,
        branch_after=() if scenario.redundant else shape.branch_after, replayable=scenario.settings.checkpoints,
    )  # fmt: skip
    with staged(
        seed=scenario.seed, settings=scenario.settings, rates=scenario.rates, trainer=trainer, environment=environment
    ) as stage:
        stage.network.doubled, stage.network.lost = scenario.doubled, scenario.lost
        stage.cluster.thread_s, stage.disk.sync_s = scenario.paces.thread_s, scenario.paces.sync_s
        for script in stage.engines:
            script.token_s, script.lengths = scenario.paces.token_s, scenario.paces.lengths
        stage.network.vanished, stage.network.stale = scenario.vanished, scenario.stale
        for rewards in stage.rewards:
            rewards.stalls = scenario.stalls
        stage.disk.apart = any(fault.kind == "learner elsewhere" for fault in scenario.faults)
        _poison(stage, scenario.poison)
        begin(stage)
        watch(stage)
        schedule(stage, scenario.faults)
        live(stage)
        return result_of(stage)


def _poison(stage: Stage, share: float) -> None:
    dice = random.Random(f"poisoned tasks of {stage.world.seed}")
    for task in range(stage.environment.tasks):
        draw = dice.random()
        if draw < share / 2:
            stage.environment.raises.add(task)
        elif draw < share:
            for rewards in stage.rewards:
                rewards.unjudged = {*rewards.unjudged, task}


@dataclass(frozen=True)
class Rehearsal:
    """A run that is planned: how fast its parts are, in seconds and tokens. `lengths` are drawn from at random.
    `readings` of its steps, by measure, have the guard lower and raise the bound on lag; without any it leaves it.
    A message takes `link_s` to twice as long.

    With `cores` all processes share so many: times of steps, tokens and sequences are then computed seconds, and so are
    `request_s`, which a completion costs the process before an engine, and `computed_s`, those of other threads.
    """

    settings: Mapping[str, Any]
    train_s: tuple[float, ...]
    lengths: tuple[int, ...]
    token_s: float
    sequence_s: float
    begin_s: float = 0.0
    at_once: int = 0
    environment_s: float = 0.0
    reward_s: float = 0.05
    load_s: float = 0.05
    score_s: float = 0.0
    readings: tuple[Mapping[str, float | None], ...] = ()
    link_s: float = 0.0002
    cores: float = 0.0
    request_s: float = 0.0
    computed_s: Mapping[str, float] = field(default_factory=dict)
    seed: int = 1


def rehearse(rehearsal: Rehearsal) -> list[dict[str, Any]]:
    """The lines of its metrics.jsonl, in virtual seconds. Raises RuntimeError if a promise is broken."""
    settings = ClusterSettings(**rehearsal.settings)
    trainer = TrainerScript(open_s=0.1, save_s=0.0, durations=rehearsal.train_s, readings=rehearsal.readings)
    environment = EnvironmentScript(
        tasks=10**6, slow_s=2 * rehearsal.environment_s, computed_s=rehearsal.computed_s if rehearsal.cores else {}
    )
    rates = LinkRates(delay_s=rehearsal.link_s, jitter_s=rehearsal.link_s)
    with staged(seed=rehearsal.seed, settings=settings, rates=rates, trainer=trainer, environment=environment) as stage:
        if rehearsal.cores:
            stage.world.add(Cores(stage.world, rehearsal.cores))
        for number, script in enumerate(stage.engines):
            script.core, script.request_s = f"engine {number}" if rehearsal.cores else "", rehearsal.request_s
            script.start_s, script.load_s, script.lengths = 0.1, rehearsal.load_s, rehearsal.lengths
            script.token_s, script.sequence_s = rehearsal.token_s, rehearsal.sequence_s
            script.begin_s = rehearsal.begin_s
            script.at_once, script.score_s = rehearsal.at_once, rehearsal.score_s
        for rewards in stage.rewards:
            rewards.latency_s, rewards.uniform = rehearsal.reward_s, 0.0
        stage.trainers.uniform = 0.0
        begin(stage)
        live(stage)
        if stage.violation is not None:
            raise RuntimeError(str(stage.violation))
        text = (stage.cluster.run_folder / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def shortened(
    scenario: Shortened,
    result: Result,
    *,
    tries: int = 40,
    said: Callable[[str], None] = lambda text: None,
    simulated: Callable[[Any], Result] = simulate,
    less: Callable[[Any], Iterator[Any]] = smaller,
) -> tuple[Shortened, Result]:
    """The smallest scenario found that breaks the same promise, and what it came to."""
    assert result.violation is not None
    left = tries
    improved = True
    while improved and left > 0:
        improved = False
        for candidate in islice(less(scenario), left):
            left -= 1
            found = simulated(candidate)
            if found.violation is not None and found.violation.promise == result.violation.promise:
                scenario, result, improved = candidate, found, True
                said(f"{len(candidate.faults)} faults, {candidate.size}")
                break
    return scenario, result
