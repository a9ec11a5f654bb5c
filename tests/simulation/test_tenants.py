"""Clients of the Tinker API under a virtual clock, in processes of their own, and what their twins see."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SEEDS = "1-25"


def _python(*arguments: str, hash_seed: int = 0) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def _fingerprints(*, hash_seed: int) -> dict[int, str]:
    ended = _python("-m", "simulation", "--tenants", "--seeds", "1-5", "--worker", hash_seed=hash_seed)
    assert ended.returncode == 0, ended.stderr
    lines = [json.loads(line) for line in ended.stdout.splitlines()]
    return {line["seed"]: line["fingerprint"] for line in lines}


def test_the_same_seed_of_tenants_gives_the_same_history_in_another_process() -> None:
    first, second = _fingerprints(hash_seed=1), _fingerprints(hash_seed=2)
    assert first == second
    assert len(set(first.values())) == 5


def test_every_promise_to_tenants_is_kept_under_many_faults() -> None:
    ended = _python("-m", "simulation", "--tenants", "--seeds", SEEDS, "--processes", "2")
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_what_a_life_forgets_is_found_and_its_run_made_short() -> None:
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
    ended = _python("-c", program)
    assert ended.returncode == 0, ended.stderr
