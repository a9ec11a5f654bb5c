"""The whole system under a virtual clock, in processes of its own: it takes hold of the clock before anything else."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from simulation.__main__ import _kept
from tests.simulation.simulating import Simulator

ROOT = Path(__file__).parents[2]
SEEDS = "1-150"


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> "tuple[subprocess.CompletedProcess[str], dict[int, str]]":
    """The command, run for all seeds, and their fingerprints."""
    kept = tmp_path_factory.mktemp("simulated") / "kept.jsonl"
    environment = {**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "simulation", "--seeds", SEEDS, "--processes", "2", "--kept", str(kept)]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    return ended, _fingerprints(kept.read_text() if kept.exists() else "")


def _fingerprints(text: str) -> dict[int, str]:
    lines = [json.loads(line) for line in text.splitlines()]
    return {line["seed"]: line["fingerprint"] for line in lines}


@pytest.mark.timeout(900)
def test_the_same_seed_gives_the_same_history_in_another_process(
    many: "tuple[subprocess.CompletedProcess[str], dict[int, str]]", other_simulator: Simulator
) -> None:
    ended = other_simulator.simulation("--seeds", "1-8", "--worker")
    assert ended.returncode == 0, ended.stderr
    again = _fingerprints(ended.stdout)
    assert again == {seed: fingerprint for seed, fingerprint in many[1].items() if seed <= 8}
    assert len(set(again.values())) == 8


@pytest.mark.timeout(900)
def test_every_promise_is_kept_under_many_faults(
    many: "tuple[subprocess.CompletedProcess[str], dict[int, str]]",
) -> None:
    ended, fingerprints = many
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert sorted(fingerprints) == list(range(1, 151))


def test_what_was_the_simulators_own_fault_is_nobodys(simulator: Simulator) -> None:
    """Tasks that hang, one after the other; requests that a hung service kept for ever; a second learner that started
    while the first ended; a second gap in the middle of a publish with the first; errors of all reward services at
    once; a grant that a lossy link held up for seconds; a lease that was being given up when the learner was killed;
    a task that nobody can judge, of which some conversations have a reward of their own; a group that was being left
    out when the learner was killed.
    """
    seeds = [754, 960, 1029, 1714, 2095, 2157, 2514, 4596, 9799]
    ended = simulator.simulation("--seeds", "-", "--worker", told=json.dumps(seeds))
    assert ended.returncode == 0, ended.stderr
    lines = [json.loads(line) for line in ended.stdout.splitlines()]
    assert [(line["seed"], line["violation"]) for line in lines] == [(seed, None) for seed in seeds]


def test_a_failing_run_is_shortened_to_the_fault_that_matters(simulator: Simulator) -> None:
    program = """
from simulation.install import install
install()
from simulation.checking import invariants
from simulation.actors.cluster import ClusterSettings
from simulation.checking.scenario import ScheduledFault
from simulation.checking.scenario import Scenario
from simulation.checking.invariants import shortened, simulate
invariants.STANDSTILL_S = 30.0
faults = (ScheduledFault(2.5, "kill", "env-0"), ScheduledFault(4.0, "cut off", "gen-0", 90.0))
invariants.EXCUSED = False
scenario = Scenario(seed=5, profile="test", settings=ClusterSettings(generators=1, steps=3), faults=faults)
result = simulate(scenario)
assert result.violation is not None and result.violation.promise == "progress", result.violation
small, found = shortened(scenario, result, tries=4)
assert found.violation is not None and found.violation.promise == "progress"
print([fault.kind for fault in small.faults])
"""
    ended = simulator.run(program)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == "['cut off']"


def test_a_run_ends_at_its_time_limit_with_a_model_and_no_step_is_cut_off(simulator: Simulator) -> None:
    program = """
from simulation.install import install
install()
from simulation.actors.cluster import ClusterSettings
from simulation.checking.scenario import Scenario
from simulation.checking.invariants import simulate
settings = ClusterSettings(generators=1, steps=10_000, time_limit_s=20.0)
result = simulate(Scenario(seed=5, profile="test", settings=settings))
assert result.violation is None, result.violation
print(result.steps)
"""
    ended = simulator.run(program)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert 1 < int(ended.stdout.splitlines()[-1]) < 10_000


def test_one_seed_is_told_as_a_history(simulator: Simulator) -> None:
    ended = simulator.simulation("--seed", "2", "--verbose")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "trains step 1 on leases" in ended.stdout
    assert "every promise was kept" in ended.stdout


def test_a_run_looks_at_no_process_of_the_real_machine_and_leaves_nothing_behind(simulator: Simulator) -> None:
    """To walk through processes was a sixth of the time of a run, and gave another number on each machine. A handler
    that a dead process leaves takes the lines of all runs that follow, and a world that stays slows each collection.
    """
    program = """
import gc, logging, re, sys
from simulation.install import install
install()
from simulation.checking.invariants import simulate
from simulation.checking.scenario import scenario_of
opened = []
sys.addaudithook(lambda event, given: opened.append(str(given[0])) if event == "open" else None)
for _ in range(2):
    result = simulate(scenario_of(9))
    assert result.violation is None and len(opened) > result.steps > 0, result
print([path for path in opened if re.match("/proc/[0-9]+/|/sys/", path)][:3], logging.getLogger().handlers)
while gc.collect():
    pass
from simulation.world.clock import World
worlds = sum(type(each) is World for each in gc.get_objects())
assert worlds <= 1, worlds  # the product's globals may know a process of the last one
"""
    ended = simulator.run(program)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == "[] []"


def test_the_life_of_a_lease_is_one_trace_from_its_grant_to_its_step(simulator: Simulator) -> None:
    program = """
import json
from simulation.install import install
install()
from services import tracing
spans = []
tracing._exporting = tracing._Exporting("simulated", 1.0, lambda *span: span, spans.append)
from simulation.actors.cluster import ClusterSettings
from simulation.checking.invariants import simulate
from simulation.checking.scenario import Scenario
result = simulate(Scenario(seed=5, profile="test", settings=ClusterSettings(generators=1, steps=3), faults=()))
assert result.violation is None, result.violation
print(json.dumps([[*span[:3], span[5]] for span in spans]))
"""
    ended = simulator.run(program)
    assert ended.returncode == 0, ended.stderr
    traces: dict[str, list[Any]] = {}
    for span in json.loads(ended.stdout):
        traces.setdefault(span[1].split("-")[1], []).append(span)
    assert traces
    for spans in traces.values():
        names = {own: name for name, own, *_ in spans}
        assert {(name, names.get(parent, parent)) for name, _, parent, _ in spans} == {
            ("lease", ""), ("rollout", "lease"), ("turn", "rollout"), ("scoring", "rollout"), ("journal", "lease"),
            ("batch", "lease"), ("step", "lease"),
        }  # fmt: skip
        told = {name: facts for name, _, _, facts in spans}
        assert told["turn"].keys() == {"completions", "tokens", "generators", "versions"}
        assert told["scoring"].keys() == {"rewards", "reward_mean"}
        assert told["step"] == {name: told["lease"][name] for name in ("step", "lag", "tokens", "reward_mean")}
        assert told["step"]["tokens"] >= told["turn"]["tokens"] > 0
        assert told["turn"]["generators"]


def test_a_seed_is_not_run_again_on_the_same_commit_and_is_on_another(tmp_path: Path) -> None:
    file = tmp_path / "kept.jsonl"
    lines = [(1, "`aaa`", None), (2, "`aaa`", "a promise"), (3, "`bbb`", None), (9, "`aaa`", None)]
    entries = [{"seed": seed, "code": code, "violation": broken} for seed, code, broken in lines]
    file.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    assert list(_kept(file, range(1, 5), code="`aaa`")) == [1], "not the one that failed, nor another commit's"
    assert _kept(file, range(1, 5), code="`aaa-dirty`") == {}
    assert _kept(tmp_path / "none", range(1, 5), code="`aaa`") == {}
