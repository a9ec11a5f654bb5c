"""Each line of defence is looked at by itself: taken away, it is missed though the next one holds."""

import gc
import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from services.process import Stop
from simulation.actors.cluster import Service
from simulation.checking import stage as stages
from simulation.checking.first_lines import FirstLines
from simulation.checking.scenario import KINDS, ScheduledFault
from simulation.world.clock import ProcessKilled, World
from simulation.world.disk import Disk
from simulation.world.process import Process
from tests.simulation.simulating import Simulator

if TYPE_CHECKING:
    from simulation.checking.stage import Stage

PROGRAM = """
import json
from dataclasses import replace
from simulation.install import install
install()
from simulation.actors.cluster import ClusterSettings
from simulation.checking.invariants import simulate
from simulation.checking.scenario import Paces, ScheduledFault, Scenario
from generator.engine.gated_llm import GatedLLM
from learner import recovery
from learner.leases.incarnations import Incarnations
from learner.ledger import Ledger
from protocol.trajectories import TrajectoryGroup

settings = ClusterSettings(generators=2, steps=6, max_lag=1)
plain = Scenario(seed=5, profile="test", settings=settings, paces=Paces(token_s=0.2))
kill = ScheduledFault(9.0, "kill", "learner")
slow = replace(plain, faults=(kill,), paces=Paces(token_s=3.0, lengths=(6,)), settings=replace(settings, steps=3))
busy = replace(plain, step_s=0.5, paces=Paces(), settings=replace(settings, steps=20, groups_per_step=3, max_lag=4))

def with_(owner, name, stand_in, scenario=plain):
    real = vars(owner)[name]
    setattr(owner, name, stand_in(real))
    try:
        return simulate(scenario).violation
    finally:
        setattr(owner, name, real)

async def nothing(self):
    pass

def opened(self):
    self._closed = False

def adopted_anew(real):
    def adopt(self, lease, **kwargs):
        attempt = real(self, lease, **kwargs)
        self._adopted.clear()
        return attempt
    return adopt

found = {
    "whole": [simulate(each).violation for each in (replace(plain, faults=(kill,)), slow, busy)],
    "pacing": with_(Ledger, "places", lambda real: lambda self: 2 + real(self) if self._served is not None else 0),
    "a pause is a pause": with_(GatedLLM, "close_gate", lambda real: nothing, busy),
    "a pause ends": with_(GatedLLM, "open_gate", lambda real: opened, busy),
    "trained twice": with_(
        recovery, "_spare", lambda real: lambda logged, history: tuple(logged.groups.values()),
        replace(plain, faults=(kill,)),
    ),
    "no work twice": with_(Incarnations, "_adopt", adopted_anew, slow),
    "stamps": with_(
        TrajectoryGroup, "oldest_version", lambda real: property(lambda self: max(0, real.fget(self) - 1)), busy
    ),
}
print(json.dumps({promise: str(violation) for promise, violation in found.items()}))
"""


def test_what_only_a_second_line_makes_good_is_seen(simulator: Simulator) -> None:
    ended = simulator.run(PROGRAM)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found.pop("whole") == "[None, None, None]"
    assert [promise for promise, said in found.items() if not said.startswith(f"{promise}: ")] == [], found


def _process(world: World, name: str, *, host: str) -> Process:
    return Process(world, name=name, host=host, ended=lambda process, code: None)


async def _nothing(stop: Stop) -> None:
    """Is never begun."""


class SmallStage:
    """A stage with a learner, a second one on its host, and a generator that was started again."""

    def __init__(self, folder: Path) -> None:
        self.world = World(seed=1)
        self.disk = Disk(folder, self.world)
        self.learner = _process(self.world, "learner#2", host="learner")
        self.second = _process(self.world, "second-learner", host="learner")
        self.former = _process(self.world, "gen-0", host="gen-0")
        self.later = _process(self.world, "gen-0#2", host="gen-0")
        here = {"learner": self.learner, "second-learner": self.second, "gen-0": self.later}
        services = {
            name: Service(name=name, host=process.host, make=lambda again: _nothing, process=process)
            for name, process in here.items()
        }
        self.cluster = SimpleNamespace(services=services, run_folder=folder / "run")
        self.engines: tuple[object, ...] = ()
        self.active = set[object]()
        self.damaged = False
        self.found: list[str] = []
        self.world.current = self.learner

    def broken(self, promise: str, what: str) -> None:
        self.found.append(f"{promise}: {what}")


class Talker:
    """In a circle, and says something as it is freed."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        logging.getLogger("simulation").warning("freed")


def test_what_former_runs_say_as_they_are_freed_is_not_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stages, "_COLLECT_EVERY", 1)
    Talker()
    try:
        stages._collect()
    finally:
        gc.enable()
    assert caplog.messages == []
    logging.getLogger("simulation").warning("said")
    assert caplog.messages == ["said"]


@pytest.fixture
def stage(tmp_path: Path) -> SmallStage:
    return SmallStage(tmp_path)


@pytest.fixture
def lines(stage: SmallStage) -> FirstLines:
    return FirstLines(cast("Stage", stage))


def test_who_was_expelled_is_the_process_that_the_learner_knows(stage: SmallStage, lines: FirstLines) -> None:
    lines.instances = {"a": stage.former, "b": stage.later}
    fleet = SimpleNamespace(expelled=lambda name, instance: "it is wrong" if instance == "a" else None, members=list)
    lines.was_expelled(None, (fleet, "gen-0"), {"reason": "it is wrong"})
    assert lines.expelled == {stage.former: (stage.learner, 0.0)}


def test_a_guard_goes_on_as_in_a_checkpoint_that_was_begun(stage: SmallStage, lines: FirstLines) -> None:
    """The first one may stand there though a second one was begun, whose learner died before it got its name."""
    for guard in ("first", "second"):
        lines.checkpoint_begun(None, (), {"version": 4, "guard": guard})
    found = {}
    for guard in ("first", "second", "third"):
        lines.taken_up(SimpleNamespace(version=4, guard=guard, checkpoint="there", batches=(), spare=()))
        found[guard], stage.found = stage.found, []
    assert found == {
        "first": [], "second": [], "third": ["the guard's bound: the guard goes on as third, and was second"]
    }  # fmt: skip


def test_what_nobody_looked_at_for_a_while_begins_anew(stage: SmallStage, lines: FirstLines) -> None:
    for what in ("able", "served"):
        lines._lasts_s((what, stage.learner), holds=True)
    lines.look()
    stage.world.now = 100.0
    lasts_s = {what: lines._lasts_s((what, stage.learner), holds=True) for what in ("able", "served")}
    assert lasts_s == {"able": 0.0, "served": 100.0}  # grants are not looked at every few seconds


def test_only_the_learner_is_struck_at_its_disk(stage: SmallStage) -> None:
    KINDS["kill at a write"][0](cast("Stage", stage), ScheduledFault(0.0, "kill at a write"))
    stage.world.current = stage.second
    stage.disk.operation()
    assert stage.learner.alive
    stage.world.current = stage.learner
    with pytest.raises(ProcessKilled):
        stage.disk.operation()
    assert (stage.learner.alive, stage.second.alive) == (False, True)


def test_all_that_runs_on_the_host_of_the_learner_goes_down_with_it(stage: SmallStage) -> None:
    KINDS["power loss"][0](cast("Stage", stage), ScheduledFault(0.0, "power loss"))
    alive = [process.name for process in (stage.learner, stage.second, stage.later) if process.alive]
    assert alive == ["gen-0#2"]
