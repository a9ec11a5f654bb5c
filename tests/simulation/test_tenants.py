"""Clients of the Tinker API under a virtual clock, in processes of their own, and what their twins see."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulation.simulating import Simulator

ROOT = Path(__file__).parents[2]
SEEDS = "1-25"


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> "tuple[subprocess.CompletedProcess[str], dict[int, str]]":
    """The command, run for all seeds, and their fingerprints."""
    kept = tmp_path_factory.mktemp("simulated") / "kept.jsonl"
    environment = {**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-m",
        "simulation",
        "--tenants",
        "--seeds",
        SEEDS,
        "--processes",
        "2",
        "--kept",
        str(kept),
    ]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    return ended, _fingerprints(kept.read_text() if kept.exists() else "")


def _fingerprints(text: str) -> dict[int, str]:
    lines = [json.loads(line) for line in text.splitlines()]
    return {line["seed"]: line["fingerprint"] for line in lines}


def test_the_same_seed_of_tenants_gives_the_same_history_in_another_process(
    many: "tuple[subprocess.CompletedProcess[str], dict[int, str]]", other_simulator: Simulator
) -> None:
    ended = other_simulator.simulation("--tenants", "--seeds", "1-5", "--worker")
    assert ended.returncode == 0, ended.stderr
    again = _fingerprints(ended.stdout)
    assert again == {seed: fingerprint for seed, fingerprint in many[1].items() if seed <= 5}
    assert len(set(again.values())) == 5


def test_every_promise_to_tenants_is_kept_under_many_faults(
    many: "tuple[subprocess.CompletedProcess[str], dict[int, str]]",
) -> None:
    ended, fingerprints = many
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert sorted(fingerprints) == list(range(1, 26))


def test_what_a_life_forgets_is_found_and_its_run_made_short(simulator: Simulator) -> None:
    """Gradients and moments that a model's snapshot has are not taken back by the next life."""
    program = """
from simulation.install import install
install()
from learner.tenants.turns import TrainerTurns
from simulation.checking.invariants import shortened
from simulation.checking.tenant_run import simulate_tenants
from simulation.checking.tenant_scenario import smaller_tenants, tenant_scenario_of
from simulation.actors.tenant_trainer import MarkedTrainer
restore = MarkedTrainer.restore
MarkedTrainer.restore = lambda self, *args, optimizer=True: restore(self, *args, optimizer=False)
for seed in range(1, 40):
    scenario = tenant_scenario_of(seed)
    result = simulate_tenants(scenario)
    if result.violation is not None:
        break
assert result.violation.promise == "once, and in order", result.violation
small, found = shortened(scenario, result, tries=3, simulated=simulate_tenants, less=smaller_tenants)
assert found.violation.promise == "once, and in order"
assert len(small.faults) <= len(scenario.faults)
"""
    ended = simulator.run(program)
    assert ended.returncode == 0, ended.stderr
