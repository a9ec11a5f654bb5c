"""Each line of defence is looked at by itself: taken away, it is missed though the next one holds."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
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


def test_what_only_a_second_line_makes_good_is_seen() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found.pop("whole") == "[None, None, None]"
    assert [promise for promise, said in found.items() if not said.startswith(f"{promise}: ")] == [], found
