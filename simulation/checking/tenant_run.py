"""A run of tenants: clients, the learner that serves them, generators; from its first to its last moment under the
promises of the service.
"""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from simulation.actors.cluster import LEARNER, ClusterSettings, Service
from simulation.actors.tenant_client import StubTenantClient, TenantNotes, TenantWorld
from simulation.actors.tenant_generator import PORT, StubAdapterGenerator
from simulation.actors.tenant_trainer import BASE
from simulation.checking.invariants import crashed, result_of
from simulation.checking.scenario import schedule
from simulation.checking.stage import Result, Stage, staged
from simulation.checking.tenant_scenario import TenantScenario
from simulation.world.clock import Stuck
from simulation.world.process import Main

STANDSTILL_S = 300.0
"""A client whose processes are well is answered something at least this often."""
_LEARNER_URL = f"http://{LEARNER}:7300"
_LOOK_EVERY_S = 5.0
_MAX_FILES = 60


def simulate_tenants(scenario: TenantScenario) -> Result:
    """Runs it once."""
    settings = ClusterSettings(generators=0, env_services=0, reward_services=0)
    with staged(seed=scenario.seed, settings=settings) as stage:
        stage.network.lost = scenario.lost
        stage.cluster.thread_s, stage.disk.sync_s = scenario.thread_s, scenario.sync_s
        stage.disk.name_s = scenario.name_s
        stage.world.add(scenario.learner)
        stage.cluster.crashed = lambda process, error: crashed(stage, process.name, error)
        notes = _begin(stage, scenario)
        schedule(stage, scenario.faults)
        stage.world.after(_LOOK_EVERY_S, lambda: _look(stage, notes))
        try:
            stage.world.run(until=lambda: stage.violation is not None or all(each.finished for each in notes))
        except Stuck as error:
            stage.broken("time passes", str(error))
        return replace(result_of(stage), steps=sum(each.steps for each in notes))


def _begin(stage: Stage, scenario: TenantScenario) -> list[TenantNotes]:
    """Starts every process."""
    names = [f"client-{index}" for index in range(len(scenario.clients))]
    notes = [
        TenantNotes(name, habits, random.Random(f"{name} of {scenario.seed}"))
        for name, habits in zip(names, scenario.clients, strict=True)
    ]
    keys = stage.cluster.folder / "keys.json"
    _write_keys(keys, notes)
    config = _config(stage, scenario, keys)
    stage.cluster.add(Service(name=LEARNER, host=LEARNER, make=lambda again: _learner(config)))
    for index in range(scenario.generators):
        _add(stage, f"gen-{index}", lambda index=index: _generator(f"gen-{index}", scenario))
    world = TenantWorld(
        learner=_LEARNER_URL,
        others=lambda name: [each for other in notes if other.name != name for each in other.ids()],
        broken=stage.broken,
        seen=lambda: _seen(stage),
        excused=lambda: stage.disk_failed,
    )
    for each in notes:
        stage.world.note(each.name, str(each.habits))
        _add(stage, each.name, lambda each=each: StubTenantClient(each, world).serve)
    return notes


def _add(stage: Stage, name: str, make: Any) -> None:
    stage.cluster.add(Service(name=name, host=name, make=lambda again: make()))


def _generator(name: str, scenario: TenantScenario) -> Main:
    return StubAdapterGenerator(name, _LEARNER_URL, scenario.token_s).serve


def _learner(config: Any) -> Main:
    from learner.tinker import serve_tinker

    return lambda stop: serve_tinker(config, stop)


def _config(stage: Stage, scenario: TenantScenario, keys: Path) -> Any:
    from learner.config import LearnerConfig

    return LearnerConfig.model_validate(
        {
            "run": {"name": "run", "directory": stage.cluster.folder / "runs"},
            "model": stage.cluster.folder / "model",
            "http": {"port": 7300, "token": "of the generators"},
            "tinker": {
                "enabled": True, "base_model": BASE, "keys_file": keys,
                "generators": [f"http://gen-{index}:{PORT}" for index in range(scenario.generators)],
                "snapshot_every": scenario.snapshot_every, "max_resident": scenario.max_resident,
            },
        }
    )  # fmt: skip


def _write_keys(path: Path, notes: list[TenantNotes]) -> None:
    from learner.tenants.keys import hash_of

    keys = [{"name": each.name, "sha256": hash_of(each.key)} for each in notes]
    path.write_text(json.dumps({"keys": keys}), encoding="utf-8")
    path.chmod(0o600)


def _seen(stage: Stage) -> None:
    stage.last_step_at = stage.world.now


def _look(stage: Stage, notes: list[TenantNotes]) -> None:
    """Every few seconds."""
    since = max(stage.last_step_at, stage.quiet_since)
    if not stage.active and stage.world.now - since > STANDSTILL_S:
        waiting = {each.name: each.waiting()[:3] for each in notes if not each.finished}
        stage.broken("progress", f"all are well since {stage.quiet_since:.0f} s, and nothing was answered: {waiting}")
    journal = stage.cluster.run_folder / "tinker" / "journal"
    if journal.exists() and len(list(journal.iterdir())) > _MAX_FILES and not stage.disk_failed:
        stage.broken("bounds", f"the journal has more than {_MAX_FILES} files")
    if stage.violation is None:
        stage.world.after(_LOOK_EVERY_S, lambda: _look(stage, notes))
