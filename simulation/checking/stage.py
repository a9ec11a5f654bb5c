"""A world with all that stands in it, the first promise that is broken there, and what a run in it came to."""

import contextlib
import gc
import logging
import os
import random
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from simulation.actors.cluster import LEARNER, Cluster, ClusterSettings, Service, write_model
from simulation.actors.engine import EngineScript, EngineScripts, History, Truth
from simulation.actors.environment import EnvironmentScript
from simulation.actors.rewards import RewardScript
from simulation.actors.trainer import Trainers, TrainerScript
from simulation.world.clock import Event, World
from simulation.world.collective import Collectives
from simulation.world.disk import Disk
from simulation.world.http import Directory
from simulation.world.network import LinkRates, Network
from simulation.world.process import Process
from simulation.world.zeromq import Switchboard

_COLLECT_EVERY = 8
"""Runs: to look for what they left is slow, and what one leaves is a few megabytes."""

_begun = count()
_REMINDER = re.compile(r"waiting for .* since [1-9]\d* s")
"""A wait that was said before goes on."""


@dataclass(frozen=True)
class Violation:
    """A promise that was not kept: its name, and what was seen."""

    promise: str
    what: str

    def __str__(self) -> str:
        return f"{self.promise}: {self.what}"


@dataclass(frozen=True)
class Result:
    """The outcome of a run. `fingerprint` is over its whole history: equal seeds have equal ones."""

    seed: int
    virtual_s: float
    callbacks: int
    requests: int
    steps: int
    violation: Violation | None
    history: tuple[Event, ...]
    fingerprint: str


@dataclass
class Stage:
    """A world with all that stands in it."""

    world: World
    cluster: Cluster
    network: Network
    disk: Disk
    environment: EnvironmentScript
    rewards: list[RewardScript]
    engines: list[EngineScript]
    trainers: Trainers
    switchboard: Switchboard
    violation: Violation | None = None
    trained: list[History] = field(default_factory=list)
    last_step_at: float = 0.0
    done: bool = False
    active: set[object] = field(default_factory=set)
    """Faults that are not over."""
    quiet_since: float = 0.0
    faults: int = 0
    suspects: set[str] = field(default_factory=set)
    """Hosts that something was wrong with: to be blamed is no surprise to them."""
    cuts: dict[object, list[tuple[str, str]]] = field(default_factory=dict)
    unsynced_lost: bool = False
    """Since the last resume."""
    disk_failed: bool = False
    """At some time it took no writes."""
    damaged: bool = False
    """At some time something else stood on it than what was written."""

    def hosts(self) -> set[str]:
        """All hosts."""
        return {service.host for service in self.cluster.services.values()}

    def broken(self, promise: str, what: str) -> None:
        """The first violation ends the run."""
        if self.violation is None:
            self.violation = Violation(promise, what)
            self.world.note("VIOLATION", str(self.violation))


class _Lines(logging.Handler):
    """Makes what the processes log a part of the history."""

    def __init__(self, world: World) -> None:
        super().__init__(level=logging.INFO)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        """Notes a line."""
        who = self._world.current
        if _REMINDER.match(record.getMessage()):
            return
        text = record.getMessage().split("\n")[0][:400]
        mark = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
        self._world.note(who.name if who is not None else "", f"{mark}{text}")


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    path = Path(tempfile.mkdtemp(prefix="headway-sim-", dir=parent))
    try:
        yield path
    finally:
        with contextlib.suppress(OSError):
            _remove(path)


def _remove(folder: str | Path) -> None:
    """Removes a folder of the simulation with all that is in it: nobody changes it meanwhile, against which
    `shutil.rmtree` guards with more system calls.
    """
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                _remove(entry.path)
            else:
                os.unlink(entry.path)
    os.rmdir(folder)


def _collect() -> None:
    """Frees what former runs left in circles, once nothing holds them any more."""
    gc.disable()  # during a run, too: it would look through all that lives, again and again
    if next(_begun) % _COLLECT_EVERY == _COLLECT_EVERY - 1:
        disabled = logging.root.manager.disable
        logging.disable()  # what coroutines of former runs say as they are closed is of no run
        try:
            while gc.collect():  # coroutines that are closed now hold what they touch until the next time
                pass
        finally:
            logging.disable(disabled)


@contextlib.contextmanager
def _logged(world: World) -> Iterator[None]:
    """Has all lines that are logged meanwhile in the history. Handlers of processes that were killed go at its end."""
    logger = logging.getLogger()
    before = list(logger.handlers)
    logger.addHandler(_Lines(world))
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.handlers[:] = before


@contextlib.contextmanager
def staged(
    *,
    seed: int,
    settings: ClusterSettings,
    rates: LinkRates | None = None,
    trainer: TrainerScript | None = None,
    environment: EnvironmentScript | None = None,
) -> Iterator[Stage]:
    """A world with a cluster that has not begun; at its end nothing of it is left."""
    _collect()
    with _folder() as root:
        world = World(seed=seed)
        random.seed(seed)  # what the product draws by chance
        stage = _stage(world, root, settings, rates, trainer, environment)
        write_model(root / "model")
        (root / "tmp").mkdir()
        world.masked[str(root)] = "~"
        World.active = world
        with _logged(world):
            try:
                yield stage
            finally:
                _clear(stage)
                World.active = None


def _stage(
    world: World,
    root: Path,
    settings: ClusterSettings,
    rates: LinkRates | None,
    trainer: TrainerScript | None,
    environment: EnvironmentScript | None,
) -> Stage:
    network = Network(world, rates or LinkRates())
    disk = Disk(root, world)
    environment = environment or EnvironmentScript()
    switchboard = Switchboard(network)

    def broken(promise: str, what: str) -> None:
        stage.broken(promise, what)

    def trained(history: History) -> None:
        stage.trained.append(history)
        stage.last_step_at = world.now
        world.note(world.current.name if world.current else "", f"trains step {len(history)} on leases {history[-1]}")

    def exported(history: History) -> None:
        stage.done = len(history) == settings.steps or settings.time_limit_s is not None
        world.note(LEARNER, f"exports a model of {len(history)} steps")

    trainers = Trainers(
        script=trainer or TrainerScript(), max_lag=settings.max_lag, group_size=settings.group_size,
        teachers=settings.teachers, broken=broken, trained=trained, exported=exported,
        groups_per_step=settings.groups_per_step - settings.reused_per_step, reused_per_step=settings.reused_per_step,
        max_reuses=settings.reuse.get("max_reuses", 1), max_lag_of_reused=settings.reuse.get("max_lag"),
    )  # fmt: skip

    def exited(service: Service, process: Process, code: int | None) -> None:
        disk.release(process)

    cluster = Cluster(world, root, settings, exited)
    for part in (network, disk, environment, switchboard, trainers, Truth(), EngineScripts()):
        world.add(part)
    world.add(Directory(network))
    world.add(Collectives(network))
    stage = Stage(
        world=world, cluster=cluster, network=network, disk=disk, environment=environment,
        rewards=[RewardScript() for _ in range(settings.reward_services)],
        engines=[EngineScript() for _ in range(settings.generators)],
        trainers=trainers, switchboard=switchboard,
    )  # fmt: skip
    return stage


def _clear(stage: Stage) -> None:
    """Ends threads and tasks of all lives; nothing that they do counts any more."""
    stage.world.end()
    for process in stage.cluster.processes:
        if process.alive:
            process._die()
        stage.disk.release(process)
    for process in stage.cluster.processes:
        for task in process.loop.tasks:
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        process.loop.tasks.clear()
    stage.cluster.processes.clear()
    stage.cluster.services.clear()
